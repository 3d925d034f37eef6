"""Replicas that are meshes of processes, against a plain loop in one process."""

import json
import os
import random
import signal
from contextlib import nullcontext
from functools import partial

import pytest
import splits
import torch
from safetensors.torch import load_file
from started import Start, kill, kill_members, newest_pids
from torch import nn
from torch.nn import functional

from instep import events
from instep.data.order import Order, key, micro_batch, position
from instep.parallel.pipeline.stages import drawn_by_block
from marks import slow

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


def plain_loop(steps=STEPS, pieces=0, drop=0.1, lost=(), told=None, **arguments):
    """Whole global batches in one process, without those samples that are lost. Dropout is drawn
    micro-batch by micro-batch; or with `pieces` by each of so many parts of one, and by the block
    that draws. Each step's loss and gradient norm are added to `told`."""
    torch.manual_seed(0)
    recipe = splits.recipe(drop=drop, **arguments)
    model = recipe.model
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer, order = recipe.optimizer(trained), Order(splits.SAMPLES, 0)
    x, y = splits.samples(1, splits.SAMPLES).tensors
    for step in range(1, steps + 1):
        epoch, first, stop = position(step, splits.SAMPLES, BATCH)
        parts = -(-(stop - first) * MICRO_BATCHES // BATCH)
        optimizer.zero_grad()
        total, count = 0.0, sum(i not in lost for i in order.indices(epoch, first, stop))
        for number in range(parts):
            low, high = micro_batch(first, stop, number, parts)
            rows = torch.tensor([n for n in order.indices(epoch, low, high) if n not in lost])
            keyed, drawn = key(0, 1, step, number), nullcontext
            for part, own in enumerate(rows.tensor_split(pieces) if pieces else [rows]):
                if pieces:
                    drawn = partial(drawn_by_block, model, BLOCKS, (keyed, part))
                else:
                    torch.manual_seed(keyed)
                with drawn():
                    loss = functional.cross_entropy(model(x[own]), y[own], reduction="sum")
                    (loss / count).backward()
                total += float(loss.detach()) / count
        norm = nn.utils.clip_grad_norm_(trained, 0.5)
        if told is not None:
            told.append((total, float(norm)))
        optimizer.step()
    return model.state_dict()


def check_equal(program, wanted, most=1e-10):
    found = load_file(program.run / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) <= most, name


@pytest.mark.tail
@pytest.mark.parametrize(
    ("workers", "mesh"),
    [
        (2, {"shard": 2}),
        slow(2, {"tensor": 2}),
        slow(4, {"tensor": 2}),
        slow(4, {"shard": 2, "tensor": 2}),
        slow(2, {"shard": 2, "zero": 2, "checkpointing": '"blocks"'}),
        slow(4, {"shard": 2}),
        slow(2, {"shard": 2, "offload": '"optimizer"'}),
        slow(3, {"shard": 3}),
        slow(4, {"shard": 4}),
        slow(2, {"stages": 2, "pipeline_batches": 2}),
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
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(pieces=mesh.get("pipeline_batches", 0)))
    says = program.summary["same_as_one_machine"]
    assert says.startswith("no: with mesh.stages each block" if "stages" in mesh else "yes"), says
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    (checked,) = program.events("mesh_checked")
    assert checked["tensors"] == 16


@pytest.mark.parametrize(
    "mesh", [slow({"tensor": 2}), slow({"stages": 2, "pipeline_batches": 2})], ids=str
)
def test_processes_with_one_micro_batch_leave_out_what_one_of_them_cannot_read(
    run: Start, tmp_path, mesh
):
    lost = Order(splits.SAMPLES, 0).indices(0, 39, 41).tolist()  # of the second step
    keys = [f"mesh.{name}={value}" for name, value in mesh.items()]
    keys += [f'arguments.file="{tmp_path / "mine"}"', f"arguments.lost={lost}"]
    program = run("splits.py:frail", *QUICK, *keys, "data.loaders=0", 'data.unreadable="skip"')
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(pieces=mesh.get("pipeline_batches", 0), lost=lost))
    skipped = program.events("sample_skipped")
    assert sorted({e["index"] for e in skipped}) == sorted(lost)
    assert all("is gone" in e["cause"] and "(on worker " in e["cause"] for e in skipped)
    assert program.summary["skipped_samples"] == len(skipped) == 16  # eight epochs


@pytest.mark.tail
@pytest.mark.parametrize("axis", ["tensor", slow("shard")])
def test_a_sample_of_the_first_batch_that_some_cannot_read_is_named(run: Start, tmp_path, axis):
    lost, other = Order(splits.SAMPLES, 0).indices(0, 12, 14).tolist()  # of rank 1 of the shards
    keys = [f'arguments.file="{tmp_path / "mine"}"', f"arguments.lost=[{lost}]"]
    keys += [f"arguments.others=[{other}]", f"mesh.{axis}=2"]
    program = run("splits.py:frail", *QUICK, *keys, "data.loaders=0", 'data.unreadable="skip"')
    assert program.end() == 4, program.stderr
    assert "can be read by some processes only: OSError: sector" in program.stderr
    assert "Make the sample readable for each process, or leave it out" in program.stderr
    assert "another model" not in program.stderr


@pytest.mark.tail
@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("tensor", "workers 0, 1 compute a micro-batch together ([mesh] tensor = 2)"),
        slow("shard", "the processes of a replica ([mesh] shard = 2) cannot be compared with one"),
    ],
)
def test_a_dataset_that_gives_each_process_something_else_is_refused(run: Start, mesh, says):
    program = run("splits.py:frail", *QUICK, f"mesh.{mesh}=2", "arguments.draws=1.0")
    assert program.end() == 4
    assert says in program.stderr
    assert "draws random numbers that do not follow from the job's seed" in program.stderr


@pytest.mark.slow
def test_a_mesh_that_computes_other_gradients_is_refused_before_its_first_step(run: Start):
    program = run("splits.py:sabotaged", *QUICK, "workers=2", "mesh.shard=2")
    assert program.end() == 3
    assert "[mesh] shard = 2 would train another model than one process does" in program.stderr
    assert "its gradient of 'scale' is off by" in program.stderr


PLAIN = {"shard": 1, "tensor": 1, "stages": 1, "zero": 3, "offload": "'none'"}
PLAIN |= {"schedule": "'1f1b'", "pipeline_batches": 8}
SHARDED = {"shard": 2, "zero": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "meshes"),
    [
        (
            {},
            [
                (6, 2, {"shard": 2}),
                (9, 1, {}),
                (11, 3, {"shard": 3, "zero": 2, "offload": "'optimizer'"}),
                (13, 4, SHARDED),
                (15, 4, {**SHARDED, "tensor": 2}),
                (17, 2, {"stages": 2}),
                (19, 2, {"tensor": 2}),
                (21, 4, {**SHARDED, "stages": 2}),
                (STEPS, 2, SHARDED),
            ],
        ),
        (
            {"optimizer": "adamw", "tied": True, "blocks": 4},
            [
                (6, 2, {"stages": 2, "pipeline_batches": 2}),
                (12, 1, {}),
                (18, 2, {"stages": 2, "schedule": "'interleaved'", "pipeline_batches": 2}),
                (STEPS, 2, {"tensor": 2}),
            ],
        ),
    ],
    ids=["every axis", "a tied weight and AdamW"],
)
def test_a_run_that_is_resumed_on_other_meshes_trains_what_a_plain_loop_does(
    run: Start, start: Start, arguments, meshes
):
    first = None
    given = {f"arguments.{name}": json.dumps(value) for name, value in arguments.items()}
    for steps, workers, mesh in meshes:
        keys = {"workers": workers, "train.stop_after_steps": steps}
        keys |= {f"mesh.{name}": value for name, value in {**PLAIN, **mesh}.items()}
        sets = [f"{key}={value}" for key, value in keys.items()]
        if first is None:
            also = (f"{key}={value}" for key, value in given.items())
            first = program = run("splits.py:recipe", *QUICK, *sets, "arguments.drop=0.0", *also)
        else:
            options = [part for each in sets for part in ("--set", each)]
            program = start("-m", "instep", "resume", first.run, *options)
        assert program.end() == 0, program.stderr
    told = []
    wanted = plain_loop(drop=0.0, told=told, **arguments)
    if "tied" in arguments:
        wanted.pop("blocks.3.inner.weight")  # the file has it under its first name
    check_equal(first, wanted)
    assert first.summary["repeated_samples"] == first.summary["missing_samples"] == 0
    steps = events.read_records(first.run / "steps.bin", events.STEPS)
    losses = dict(zip(steps["step"].tolist(), steps["loss"].tolist(), strict=True))
    assert [losses[n] for n in sorted(losses)] == pytest.approx(
        [loss for loss, _ in told], rel=1e-5
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "mesh"),
    [
        (2, {"shard": 2}),
        (2, {"tensor": 2}),
        (2, {"stages": 2}),
        (4, {"shard": 2, "tensor": 2}),
    ],
    ids=str,
)
def test_a_small_gradient_of_a_mesh_ends_its_run_where_it_is_small(run: Start, workers, mesh):
    told = []
    plain_loop(drop=0.0, told=told)
    norms = [norm for _, norm in told]
    small = sorted(norms)[5] * 1.001
    keys = [f"mesh.{name}={value}" for name, value in mesh.items()]
    keys += [f"stop.gradient_norm={small}", "arguments.drop=0.0", f"workers={workers}"]
    program = run("splits.py:recipe", *QUICK, *keys)
    assert program.end() == 0, program.stderr
    (asked,) = program.events("stop_requested")
    step = next(number for number, norm in enumerate(norms, 1) if norm < small)
    assert (asked["rule"], asked["step"]) == ("gradient_norm", step)
    assert program.ledger["step"].max() == step + 1
    steps = events.read_records(program.run / "steps.bin", events.STEPS)
    found = dict(zip(steps["step"].tolist(), steps["gradient_norm"].tolist(), strict=True))
    wanted = dict(enumerate(norms[: step + 1], 1))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
def test_compiled_blocks_train_what_a_plain_loop_does(run: Start):
    keys = ("workers=2", "mesh.shard=2", 'mesh.compile="blocks"', 'mesh.checkpointing="blocks"')
    program = run("splits.py:recipe", *QUICK, *keys)
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop())
    assert len(program.events("mesh_checked")) == 1


@pytest.mark.slow
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
    again = program.summary["replica_restarts"]
    assert again["host_memory" if workers == 2 else "other_replicas"] == sum(again.values()) == 1


@pytest.mark.slow
def test_a_replica_that_is_the_only_one_left_has_a_copy_before_its_next_commit(
    run: Start, tmp_path
):
    passes, mark = tmp_path / "passes", tmp_path / "late"
    keys = ("mesh.shard=2", "workers=4", "train.steps=12", "arguments.pause_s=0.2")
    keys = (*keys, f'arguments.tells="{passes}"', f'arguments.mark="{mark}"')
    program = run("splits.py:late_again", *QUICK, *keys, 'checkpoint.every="never"')
    program.until(program.is_training, "training")
    mark.touch()
    members = newest_pids(program)

    def passed():
        return passes.read_text().split().count(str(members[0]))

    assert kill(members[2])
    program.until(
        lambda: program.events("generation_started")[-1]["members"] == [0, 1], "one replica"
    )
    before = passed()
    program.until(lambda: passed() > before, "a pass of its next step")
    committed = program.ledger["step"].max()
    assert kill(members[0])
    assert program.ledger["step"].max() == committed, "it was to be lost before its next commit"
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(12))
    (taken,) = program.events("taken_from_host")
    assert taken["step"] == committed
    assert not program.events("went_back")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 1])
def test_without_room_for_copies_of_its_commits_a_single_replica_goes_on(run: Start, kills):
    steps = 24 + 36 * kills
    keys = ("mesh.shard=2", "checkpoint.every=5", "arguments.pause_s=0.02", f"train.steps={steps}")
    program = run("splits.py:without_host_memory", *QUICK, *keys)
    for _ in range(kills):
        program.until(program.is_training, "training")
        program.until(lambda: bool(program.events("checkpoint_saved")), "saved")
        kill_members(program, 1, random.Random(0))
    assert program.end() == 0, program.stderr
    check_equal(program, plain_loop(steps))
    texts = [e["text"] for e in program.events("warning") if "copies" in e["text"]]
    assert len(texts) == 1 + kills  # its processes are others then
    assert texts[0].startswith("no memory for copies of the last commit: 2 of 2 processes need ")
    assert "it goes on from the last checkpoint" in texts[0]
    assert program.summary["replica_restarts"]["checkpoint"] == kills
    assert not program.events("taken_from_host")


@pytest.mark.slow
def test_a_rank_lost_while_all_normalise_together_restarts_its_own_replica_alone(run: Start):
    keys = (*QUICK, "workers=4", "mesh.shard=2", 'train.batch_norm="global"', "train.steps=60")
    keys = (*keys, "arguments.drop=0.0", "arguments.norm=true", "arguments.pause_s=0.02")
    program = run("splits.py:recipe", *keys)
    program.until(program.is_training, "training")
    pids = {each["worker"]: each["pid"] for each in program.events("worker_joined")}
    os.kill(pids[3], signal.SIGKILL)
    assert program.end() == 0, program.stderr
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
def test_a_tensor_axis_that_cuts_no_layer_is_warned_of(run: Start):
    program = run("splits.py:filters", *QUICK, "workers=2", "mesh.tensor=2")
    assert program.end() == 0, program.stderr
    (warning,) = program.events("warning")
    assert warning["text"].startswith("mesh.tensor = 2 cuts no layer of this model")


@pytest.mark.slow
def test_processes_that_wait_for_each_other_before_the_first_step_are_named(run: Start):
    program = run("splits.py:uneven", *QUICK, "workers=2", "mesh.tensor=2")
    program.until(lambda: any(program.work.glob("runs/*/events.jsonl")), "begun")
    program.until(lambda: len(program.events("worker_joined")) == 2, "both have joined")
    program.until(lambda: bool(program.events("worker_hung")), "one is found to hang")
    (hung,) = program.events("worker_hung")
    assert hung["phase"] == "meeting"
    assert "splits.py" in hung["where"]
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130, program.stderr
    program.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["shard", "tensor"])
def test_a_slow_replica_gets_fewer_participants_and_the_bits_stay(run: Start, tmp_path, axis):
    keys = ["workers=4", f"mesh.{axis}=2", 'train.determinism="bits"', "sync.name=averaging"]
    keys += [
        "sync.participants=8",
        "sync.options.local_steps=2",
        'sync.options.local_optimizers="kept"',
    ]
    hashes = set()
    for deal in ("even", "speed"):
        mark = f"arguments.mark={tmp_path / deal}"
        quick = [key for key in QUICK if "micro_batches" not in key and "grad_norm" not in key]
        program = run("splits.py:one_is_slow", *quick, *keys, mark, f"train.deal={deal}")
        assert program.end() == 0, program.stderr
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
    assert program.end() == 0, program.stderr
    assert killed == kills
    assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    program.check_nothing_is_left()
    lost = program.events("worker_lost")
    assert any(each.get("restarted") for each in lost)
    for generation in program.events("generation_started"):
        members = generation["members"]
        assert {n // 2 for n in members} == {n // 2 for n in members if n % 2}


@pytest.mark.tail
@pytest.mark.parametrize(
    ("mesh", "step"),
    [({"shard": 2}, 9), ({"stages": 2, "pipeline_batches": 2}, STEPS), slow({"tensor": 2}, 9)],
    ids=str,
)
def test_a_step_is_in_the_ledger_whose_writer_dies_before_it_is(run: Start, tmp_path, mesh, step):
    """Whoever takes its place has its memory, and writes what it had not."""
    keys = [f"mesh.{name}={value}" for name, value in mesh.items()]
    keys += [f'arguments.file="{tmp_path / "died"}"', f"arguments.step={step}"]
    program = run("dies_unwritten.py:recipe", *QUICK, "workers=2", *keys)
    assert program.end() == 0, program.stderr
    assert len(program.events("worker_lost")) == 1
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    check_equal(program, plain_loop(pieces=2 if "stages" in mesh else 0))
