"""Rounds of averaging whose participants are replicas of several processes."""

import copy
import random
import time
from contextlib import nullcontext

import pytest
import splits
import torch
from safetensors.torch import load_file
from started import Start, kill, kill_members, kill_with_its_memory, newest_pids
from torch import nn
from torch.nn import functional

from instep.client.running import scale
from instep.data.order import Order, key, micro_batch, position
from instep.events import read_events
from instep.parallel.pipeline.stages import drawn_by_block
from marks import slow

pytestmark = pytest.mark.process

BLOCKS = [f"blocks.{number}" for number in range(3)]
BATCH, PARTICIPANTS, LOCAL_STEPS, ROUNDS, CLIP = 20, 3, 3, 4, 0.5
QUICK = (
    f"train.steps={ROUNDS}",  # the second has 30 samples for 2 participants
    f"train.global_batch={BATCH}",
    f"train.max_grad_norm={CLIP}",
    "train.threads=1",
    'sync.name="averaging"',
    f"sync.participants={PARTICIPANTS}",
    f"sync.options.local_steps={LOCAL_STEPS}",
)
OPTIMIZERS = {"sgd": splits.sgd, "adamw": lambda p: torch.optim.AdamW(p, lr=0.01)}


def federated_averaging(mesh, local, optimizer="adamw", *, mu=0.0, nesterov=False):
    """Each participant by itself, its samples cut into as many parts as ranks split them; `mesh`
    of all rounds, or of each. It may be drawn back with `mu`, and rounds end with DiLoCo's step."""
    torch.manual_seed(0)
    server, order = splits.recipe().model, Order(splits.SAMPLES, 0)
    moments = {participant: {} for participant in range(PARTICIPANTS)}
    outer = torch.optim.SGD(server.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    for step, own in enumerate([mesh] * ROUNDS if isinstance(mesh, dict) else mesh, 1):
        epoch, first, stop = position(step, splits.SAMPLES, BATCH * LOCAL_STEPS)
        parts = -(-(stop - first) * PARTICIPANTS // (BATCH * LOCAL_STEPS))
        mean = {name: torch.zeros_like(t) for name, t in server.state_dict().items()}
        for participant in range(parts):
            low, high = micro_batch(first, stop, participant, parts)
            model = copy.deepcopy(server)
            trained = [p for p in model.parameters() if p.requires_grad]
            moves = OPTIMIZERS[optimizer](trained)
            moves.load_state_dict({**moves.state_dict(), "state": moments[participant]})
            for number in range(LOCAL_STEPS):
                begin, end = micro_batch(low, high, number, LOCAL_STEPS)
                moves.zero_grad()
                for place in range(own.get("shard", 1)):
                    cut = micro_batch(begin, end, place, own.get("shard", 1))
                    keyed = key(0, 1, step, participant, number)
                    keyed = key(0, 1, keyed, place) if own else keyed
                    add_gradients(model, order.indices(epoch, *cut), end - begin, keyed, own)
                for mine, begin in zip(model.parameters(), server.parameters(), strict=True):
                    if mine.grad is not None and mu:
                        mine.grad += mu * (mine.detach() - begin.detach())
                nn.utils.clip_grad_norm_(trained, CLIP)
                moves.step()
            if local == "kept":
                moments[participant] = moves.state_dict()["state"]
            for name, tensor in model.state_dict().items():
                mean[name] += (high - low) / (stop - first) * tensor
        if not nesterov:
            server.load_state_dict(mean)
            continue
        for name, parameter in server.named_parameters():
            if parameter.requires_grad:
                parameter.grad = parameter.detach() - mean[name]
        outer.step()
    return server.state_dict()


def add_gradients(model, indices, count, keyed, mesh):
    """Of one pass; of a pipeline its parts and blocks draw each for itself."""
    x, y = splits.samples(1, splits.SAMPLES).tensors
    rows, pieces = torch.from_numpy(indices), mesh.get("pipeline_batches", 0)
    for part, own in enumerate(rows.tensor_split(pieces) if pieces else [rows]):
        torch.manual_seed(keyed)
        with drawn_by_block(model, BLOCKS, (keyed, part)) if pieces else nullcontext():
            loss = functional.cross_entropy(model(x[own]), y[own], reduction="sum")
            (loss / count).backward()


def check_equal(program, wanted, most=1e-10):
    found = load_file(program.run / "model.safetensors")
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) <= most, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "mesh", "local"),
    [
        (4, {"shard": 2}, "kept"),
        slow(4, {"shard": 2}, "reset"),
        slow(2, {"shard": 2}, "reset"),
        slow(6, {"shard": 2, "zero": 2}, "kept"),
        slow(3, {"shard": 3}, "kept"),
        slow(4, {"tensor": 2}, "kept"),
        slow(4, {"stages": 2, "pipeline_batches": 2}, "kept"),
        slow(4, {"shard": 2, "tensor": 2}, "kept"),
        slow(4, {"stages": 2, "tensor": 2, "pipeline_batches": 1}, "kept"),
        slow(4, {"stages": 2, "shard": 2, "zero": 2, "pipeline_batches": 1}, "kept"),
    ],
    ids=str,
)
def test_a_run_equals_federated_averaging_in_plain_pytorch(run: Start, workers, mesh, local):
    wanted = federated_averaging(mesh, local)
    other = federated_averaging(mesh, "reset" if local == "kept" else "kept")
    assert float((wanted["enter.weight"] - other["enter.weight"]).abs().max()) > 1e-3
    keys = [f"mesh.{name}={value}" for name, value in mesh.items()]
    keys = (*QUICK, *keys, f"workers={workers}", f'sync.options.local_optimizers="{local}"')
    program = run("splits.py:recipe", *keys, 'arguments.optimizer="adamw"')
    assert program.end() == 0, program.stderr
    check_equal(program, wanted)
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "plain"), [("fedprox", {"mu": 0.8}), ("diloco", {"nesterov": True})]
)
def test_other_strategies_with_rounds_are_their_papers_on_a_mesh(run: Start, name, plain):
    """What draws a participant back counts in the norm that is clipped."""
    wanted = federated_averaging({"shard": 2}, "reset", **plain)
    other = federated_averaging({"shard": 2}, "reset")
    assert float((wanted["enter.weight"] - other["enter.weight"]).abs().max()) > 1e-3
    keys = [f'sync.name="{name}"', *QUICK[:4], *QUICK[5:], "mesh.shard=2", "workers=4"]
    keys += ["sync.options.mu=0.8"] if name == "fedprox" else []
    keys += ['sync.options.local_optimizers="reset"', 'arguments.optimizer="adamw"']
    program = run("splits.py:recipe", *keys)
    assert program.end() == 0, program.stderr
    check_equal(program, wanted)
    apart = program.events("participants_apart")
    assert [each["step"] for each in apart] == list(range(1, ROUNDS + 1))
    assert all(each["distance"] > 0 for each in apart)


@pytest.mark.slow
@pytest.mark.parametrize("local", ["reset", "kept"])
def test_with_bits_the_hash_is_the_same_on_any_number_of_replicas(run: Start, local):
    hashes = set()
    for workers in (2, 4, 6):
        keys = (*QUICK, 'train.determinism="bits"', f'sync.options.local_optimizers="{local}"')
        keys = (*keys, f"workers={workers}", "mesh.shard=2", 'arguments.optimizer="adamw"')
        program = run("splits.py:recipe", *keys)
        assert program.end() == 0, program.stderr
        hashes.add(program.summary["parameters_sha256"])
    assert len(hashes) == 1
    check_equal(program, federated_averaging({"shard": 2}, local), 1e-6)


@pytest.mark.parametrize(("workers", "kills"), [slow(4, 12), slow(2, 5)])
def test_ranks_that_are_killed_leave_no_trace(run: Start, workers, kills):
    """The others keep what they have computed of the round, and a replica that is alone continues
    from its host's memory, or from a checkpoint."""
    keys = (
        *QUICK,
        'sync.options.local_optimizers="kept"',
        "mesh.shard=2",
        'train.determinism="bits"',
    )
    keys = (*keys, f"train.steps={12 * kills}", "checkpoint.every=5")
    calm = run("splits.py:recipe", *keys, "workers=2")
    assert calm.end() == 0, calm.stderr
    program = run("splits.py:recipe", *keys, f"workers={workers}", "arguments.pause_s=0.01")
    program.until(program.is_training, "training")
    killed = kill_members(program, kills, random.Random(workers)).total()
    assert program.end() == 0, program.stderr
    assert killed == kills
    assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "event"), [(kill, "taken_from_host"), (kill_with_its_memory, "went_back")]
)
def test_a_replica_that_is_alone_continues_with_what_its_optimizers_kept(run: Start, end, event):
    kills, draw = 5, random.Random(event)
    keys = (
        *QUICK,
        'sync.options.local_optimizers="kept"',
        "mesh.shard=2",
        'train.determinism="bits"',
    )
    keys = (*keys, f"train.steps={15 * kills}", "checkpoint.every=5", "workers=2")
    calm = run("splits.py:recipe", *keys)
    assert calm.end() == 0, calm.stderr
    program = run("splits.py:recipe", *keys, "arguments.pause_s=0.01")
    program.until(program.is_training, "training")

    def happens(event, times):
        program.until(lambda: len(program.events(event)) >= times, f"{event} {times}")

    for number in range(1, kills + 1):
        happens("checkpoint_saved", len(program.events("checkpoint_saved")) + 1)
        time.sleep(draw.uniform(0.0, 0.3))  # the moment is what is drawn
        end(newest_pids(program)[draw.randrange(2)])
        happens(event, number)
    assert program.end() == 0, program.stderr
    ways = [each["event"] for each in read_events(program.run / "events.jsonl")]
    assert ways.count("taken_from_host") + ways.count("went_back") == kills
    assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0


@pytest.mark.slow
def test_members_change_in_the_middle_of_a_round(run: Start):
    keys = (
        *QUICK,
        'sync.options.local_optimizers="kept"',
        "mesh.shard=2",
        'train.determinism="bits"',
    )
    keys = (*keys, "train.steps=40")
    calm = run("splits.py:recipe", *keys, "workers=2")
    assert calm.end() == 0, calm.stderr
    program = run("splits.py:recipe", *keys, "workers=4", "arguments.pause_s=0.03")
    program.until(program.is_training, "training")
    for workers in (6, 2, 4):
        scale(program.run, workers)
        program.until(
            lambda: len(program.events("generation_started")[-1]["members"]) == workers,  # noqa: B023
            f"of {workers} workers",
        )
    assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0


@pytest.mark.slow
def test_a_run_is_resumed_on_another_mesh_unless_optimizers_are_kept(run: Start, start: Start):
    stops = ((2, 3, 3), (3, 1, 1), (ROUNDS, 4, 2))
    meshes = [{"shard": 2}, {"shard": 3}, {}, {"shard": 2}]
    program = run(
        "splits.py:recipe", *QUICK, "workers=2", "mesh.shard=2", "train.stop_after_steps=1"
    )
    assert program.end() == 0, program.stderr
    for steps, workers, shard in stops:
        keys = (f"workers={workers}", f"mesh.shard={shard}", f"train.stop_after_steps={steps}")
        sets = [part for key in keys for part in ("--set", key)]
        resumed = start("-m", "instep", "resume", program.run, *sets)
        assert resumed.end() == 0, resumed.stderr
    check_equal(program, federated_averaging(meshes, "reset", "sgd"))


@pytest.mark.slow
def test_kept_optimizers_stay_on_their_mesh(run: Start, start: Start):
    keys = (
        "workers=2",
        "mesh.shard=2",
        'sync.options.local_optimizers="kept"',
        "train.stop_after_steps=1",
    )
    program = run("splits.py:recipe", *QUICK, *keys)
    assert program.end() == 0, program.stderr
    refused = start("-m", "instep", "resume", program.run, "--set", "mesh.shard=1")
    assert refused.end() == 2
    assert (
        "each of its ranks keeps a part of what participants or voters remember" in refused.stderr
    )
    resumed = start("-m", "instep", "resume", program.run, "--workers", "4")
    assert resumed.end() == 0, resumed.stderr
    check_equal(program, federated_averaging({"shard": 2}, "kept", "sgd"))
