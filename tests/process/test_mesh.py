"""Replicas that are meshes of processes, against a plain loop in one process."""

import os
import random
import signal
from contextlib import nullcontext
from functools import partial

import pytest
import splits
import torch
from safetensors.torch import load_file
from started import Start, kill_members, slow
from torch import nn
from torch.nn import functional

from instep import events
from instep.data.order import Order, key, micro_batch, position
from instep.parallel.pipeline.stages import drawn_by_block

pytestmark = pytest.mark.process

BLOCKS = [f"blocks.{number}" for number in range(3)]
BATCH, MICRO_BATCHES, STEPS = 32, 8, 24
QUICK = (
    f"train.steps={STEPS}",
    f"train.global_batch={BATCH}",  # the last batch of an epoch has 26 samples: 7 micro-batches
    f"train.micro_batches={MICRO_BATCHES}",
    "train.max_grad_norm=0.5",
    "train.threads=1",
)


def plain_loop(steps=STEPS, pieces=0, drop=0.1):
    """Whole global batches in one process, dropout drawn micro-batch by micro-batch; or with
    `pieces` by each of so many parts of one, and by the block that draws."""
    torch.manual_seed(0)
    model = splits.recipe(drop=drop).model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, order = splits.sgd(trained), Order(splits.SAMPLES, 0)
    x, y = splits.samples(1, splits.SAMPLES).tensors
    for step in range(1, steps + 1):
        epoch, first, stop = position(step, splits.SAMPLES, BATCH)
        parts = -(-(stop - first) * MICRO_BATCHES // BATCH)
        optimizer.zero_grad()
        for number in range(parts):
            low, high = micro_batch(first, stop, number, parts)
            rows = torch.from_numpy(order.indices(epoch, low, high))
            keyed, drawn = key(0, 1, step, number), nullcontext
            for part, own in enumerate(rows.tensor_split(pieces) if pieces else [rows]):
                if pieces:
                    drawn = partial(drawn_by_block, model, BLOCKS, (keyed, part))
                else:
                    torch.manual_seed(keyed)
                with drawn():
                    loss = functional.cross_entropy(model(x[own]), y[own], reduction="sum")
                    (loss / (stop - first)).backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    return model.state_dict()


def check_equal(program, wanted, most=1e-10):
    found = load_file(program.run / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) <= most, name


@pytest.mark.parametrize(
    ("workers", "mesh"),
    [
        (2, {"shard": 2}),
        (2, {"tensor": 2}),
        slow(4, {"tensor": 2}),
        slow(4, {"shard": 2, "tensor": 2}),
        slow(2, {"shard": 2, "zero": 2, "checkpointing": '"blocks"'}),
        slow(4, {"shard": 2}),
        slow(2, {"shard": 2, "offload": '"optimizer"'}),
        slow(3, {"shard": 3}),
        slow(4, {"shard": 4}),
        (2, {"stages": 2, "pipeline_batches": 2}),
        slow(4, {"stages": 2, "pipeline_batches": 1}),
        slow(2, {"stages": 2, "pipeline_batches": 2, "schedule": '"gpipe"'}),
        slow(4, {"stages": 2, "tensor": 2, "pipeline_batches": 2}),
        slow(4, {"stages": 2, "shard": 2, "zero": 2, "pipeline_batches": 2}),
        slow(8, {"stages": 2, "shard": 2, "tensor": 2, "zero": 2, "pipeline_batches": 1}),
    ],
    ids=str,
)
def test_a_mesh_trains_what_a_plain_loop_does(run: Start, workers, mesh):
    keys = [f"mesh.{name}={value}" for name, value in mesh.items()]
    program = run("splits.py:recipe", *QUICK, f"workers={workers}", *keys)
    assert program.end(300) == 0, program.stderr
    check_equal(program, plain_loop(pieces=mesh.get("pipeline_batches", 0)))
    says = program.summary["same_as_one_machine"]
    assert says.startswith("no: with mesh.stages each block" if "stages" in mesh else "yes"), says
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    (checked,) = program.events("mesh_checked")
    assert checked["tensors"] == 16


def test_a_mesh_that_computes_other_gradients_is_refused_before_its_first_step(run: Start):
    program = run("splits.py:sabotaged", *QUICK, "workers=2", "mesh.shard=2")
    assert program.end() == 3
    assert "[mesh] shard = 2 would train another model than one process does" in program.stderr
    assert "its gradient of 'scale' is off by" in program.stderr


@pytest.mark.slow
def test_a_run_that_is_resumed_on_other_meshes_trains_what_a_plain_loop_does(
    run: Start, start: Start
):
    keys = (*QUICK, "workers=2", "mesh.shard=2", "train.stop_after_steps=6", "arguments.drop=0.0")
    first = run("splits.py:recipe", *keys)
    assert first.end() == 0, first.stderr
    for steps, workers, shard, tensor, stages in (
        (9, 1, 1, 1, 1),
        (11, 3, 3, 1, 1),
        (13, 4, 2, 1, 1),
        (15, 4, 2, 2, 1),
        (17, 2, 1, 1, 2),
        (19, 2, 1, 2, 1),
        (21, 4, 2, 1, 2),
        (STEPS, 2, 2, 1, 1),
    ):
        keys = [f"workers={workers}", f"train.stop_after_steps={steps}", "mesh.zero=2"]
        keys += [f"mesh.offload={'optimizer' if shard == 3 else 'none'!r}"]
        keys += [f"mesh.shard={shard}", f"mesh.tensor={tensor}", f"mesh.stages={stages}"]
        sets = [part for key in keys for part in ("--set", key)]
        program = start("-m", "instep", "resume", first.run, *sets)
        assert program.end() == 0, program.stderr
    check_equal(first, plain_loop(drop=0.0))
    assert first.summary["repeated_samples"] == first.summary["missing_samples"] == 0


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_compiled_blocks_train_what_a_plain_loop_does(run: Start):
    keys = ("workers=2", "mesh.shard=2", 'mesh.compile="blocks"', 'mesh.checkpointing="blocks"')
    program = run("splits.py:recipe", *QUICK, *keys)
    assert program.end(360) == 0, program.stderr
    check_equal(program, plain_loop())
    assert len(program.events("mesh_checked")) == 1


def test_a_machine_that_cannot_compile_is_refused_before_the_first_step(
    run: Start, tmp_path, monkeypatch
):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    program = run("splits.py:recipe", *QUICK, "workers=2", "mesh.shard=2", 'mesh.compile="blocks"')
    assert program.end() == 2
    assert "torch.compile does not work on this machine" in program.stderr


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4, 6])
def test_bits_are_the_same_at_any_number_of_replicas_of_one_mesh(run: Start, workers):
    hashes = set()
    for each in (2, workers):
        keys = ('train.determinism="bits"', f"workers={each}", "mesh.shard=2")
        program = run("splits.py:recipe", *QUICK, *keys)
        assert program.end() == 0, program.stderr
        hashes.add(program.summary["parameters_sha256"])
    assert len(hashes) == 1
    check_equal(program, plain_loop(), 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4])
def test_a_replica_that_starts_again_tries_nothing_and_computes_only_its_steps(
    run: Start, tmp_path, workers
):
    passes = tmp_path / "passes"
    keys = (*QUICK, "mesh.shard=2", "train.steps=60", f"workers={workers}")
    keys = (*keys, "arguments.pause_s=0.02", f'arguments.tells="{passes}"')
    program = run("splits.py:recipe", *keys)
    program.until(program.is_training, "training")
    kill_members(program, 1, random.Random(workers))
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(60))
    assert len(program.events("mesh_checked")) == 1
    (lost,) = program.events("worker_lost")
    again = [e for e in program.events("worker_joined") if e["time"] > lost["time"]]
    assert len(again) == 2
    steps = events.read_records(program.run / "steps.bin", events.STEPS)
    of_step, validations = MICRO_BATCHES // 2, len(program.events("validated"))
    for each in again:  # a trial has more than twenty passes
        own = steps[(steps["worker"] == each["worker"]) & (steps["begin"] > each["time"])]
        most = of_step * (len(own) + 1) + validations
        assert 0 < passes.read_text().split().count(str(each["pid"])) <= most
    if workers == 2:
        (taken,) = program.events("taken_from_host")
        assert taken["time"] > lost["time"]


@pytest.mark.slow
def test_a_rank_lost_while_all_normalise_together_restarts_its_own_replica_alone(run: Start):
    keys = (*QUICK, "workers=4", "mesh.shard=2", 'train.batch_norm="global"', "train.steps=60")
    keys = (*keys, "arguments.drop=0.0", "arguments.norm=true", "arguments.pause_s=0.02")
    program = run("splits.py:recipe", *keys)
    program.until(program.is_training, "training")
    pids = {each["worker"]: each["pid"] for each in program.events("worker_joined")}
    os.kill(pids[3], signal.SIGKILL)
    assert program.end(100) == 0, program.stderr
    lost = program.events("worker_lost")
    assert [(each["worker"], each["restarted"]) for each in lost] == [(3, [2])]
    assert not program.events("went_back")
    check_equal(program, normalising_loop(60))


def normalising_loop(steps):
    """Whole global batches in one process, each normalised as one."""
    torch.manual_seed(0)
    model = splits.recipe(drop=0.0, norm=True).model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, order = splits.sgd(trained), Order(splits.SAMPLES, 0)
    x, y = splits.samples(1, splits.SAMPLES).tensors
    for step in range(1, steps + 1):
        epoch, first, stop = position(step, splits.SAMPLES, BATCH)
        rows = torch.from_numpy(order.indices(epoch, first, stop))
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(trained, 0.5)
        optimizer.step()
    return model.state_dict()


NORMALISING = ('train.batch_norm="global"', "arguments.drop=0.0", "arguments.norm=true")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "wanted"),
    [
        (["mesh.shard=2"], plain_loop),
        (["mesh.tensor=2"], plain_loop),
        (["mesh.stages=2", "mesh.pipeline_batches=2"], partial(plain_loop, pieces=2)),
        (["mesh.shard=2", *NORMALISING], normalising_loop),
    ],
    ids=["shard", "tensor", "stages", "normalising"],
)
def test_a_slow_replica_gets_less_and_a_plain_loop_does_the_same(
    run: Start, tmp_path, keys, wanted
):
    mark = f"arguments.mark={tmp_path / 'slow'}"
    program = run("splits.py:one_is_slow", *QUICK, "workers=4", mark, *keys)
    assert program.end() == 0, program.stderr
    check_equal(program, wanted(STEPS))
    dealt = program.events("work_dealt")[0]
    assert dealt["reason"] == "speed"
    slow = int(dealt["speeds"][0] > dealt["speeds"][3])
    counts = dealt["micro_batches"]
    assert counts[2 * slow] == counts[2 * slow + 1] < counts[2 - 2 * slow] == counts[3 - 2 * slow]
    ledger = program.ledger[program.ledger["step"] > dealt["step"]]
    samples = [0, 0]
    for row in ledger:
        samples[row["worker"] // 2] += int(row["stop"] - row["first"])
    assert samples[slow] < samples[1 - slow] / 2
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("axis", ["shard", "tensor"])
def test_a_slow_replica_gets_fewer_participants_and_the_bits_stay(run: Start, tmp_path, axis):
    keys = ["workers=4", f"mesh.{axis}=2", 'train.determinism="bits"', "sync.name=averaging"]
    keys += ["sync.participants=8", "sync.local_steps=2", 'sync.local_optimizers="kept"']
    hashes = set()
    for deal in ("even", "speed"):
        mark = f"arguments.mark={tmp_path / deal}"
        quick = [key for key in QUICK if "micro_batches" not in key and "grad_norm" not in key]
        program = run("splits.py:one_is_slow", *quick, *keys, mark, f"train.deal={deal}")
        assert program.end(200) == 0, program.stderr
        assert bool(program.events("work_dealt")) == (deal == "speed")
        hashes.add(program.summary["parameters_sha256"])
    assert len(hashes) == 1


LONG = 200


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "kills", "axis"),
    [(4, 25, "shard"), (2, 12, "shard"), (4, 25, "tensor"), (4, 25, "stages"), (2, 12, "stages")],
)
def test_ranks_that_are_killed_at_random_moments_leave_no_trace(run: Start, workers, kills, axis):
    """With one replica the processes find the last commit in memory of their host."""
    keys = (*QUICK, f"mesh.{axis}=2", 'train.determinism="bits"', "checkpoint.every=10")
    keys = (*keys, f"train.steps={LONG}", "train.validate_every=50")
    calm = run("splits.py:recipe", *keys, "workers=2")
    assert calm.end() == 0, calm.stderr
    program = run("splits.py:recipe", *keys, f"workers={workers}", "arguments.pause_s=0.005")
    program.until(program.is_training, "training")
    killed = kill_members(program, kills, random.Random(workers)).total()
    assert program.end(300) == 0, program.stderr
    assert killed == kills
    assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    program.check_nothing_is_left()
    lost = program.events("worker_lost")
    assert any(each.get("restarted") for each in lost)
    for generation in program.events("generation_started"):
        members = generation["members"]
        assert {n // 2 for n in members} == {n // 2 for n in members if n % 2}
