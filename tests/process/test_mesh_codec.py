"""Gradients in 8 bits between replicas that are meshes: each rank carries over what it dropped."""

import os
import random
import signal
import time
from pathlib import Path

import adds_up
import pytest
import splits
import torch
from safetensors.torch import load_file
from started import RECIPES, Start, Started, kill, newest_pids

from instep.client.running import scale
from instep.comm.codecs.int8 import Int8
from instep.comm.memory import run_ranks
from instep.data.order import Order, position
from instep.records import Attempt
from instep.state.files.manifest import published
from instep.state.open_pieces import open_pieces
from instep.state.pieces import Pieces
from instep.sync.all_reduce import AllReduce
from instep.sync.generation import Generation

pytestmark = pytest.mark.process

BATCH = 16


def begin(
    start: Start, folder: Path, name: str, *settings: str, recipe: str = "adds_up.py:recipe"
) -> Started:
    """By default on two replicas of two processes."""
    job = folder / f"{name}.toml"
    job.write_text(
        f'name = "{name}"\nrecipe = "{RECIPES / recipe}"\nworkers = 4\nseed = 5\n'
        f"[train]\nsteps = 12\nglobal_batch = {BATCH}\nthreads = 1\n"
        '[mesh]\nshard = 2\n[sync]\ncodec = "int8"\noptions = { encode_vectors = true }\n'
        "[checkpoint]\nevery = 5\nkeep_last = 99\n"
    )
    sets = [part for setting in settings for part in ("--set", setting)]
    return start("-m", "instep", "run", job, *sets)


def on_parts(steps: int) -> torch.Tensor:
    """The same by the definition: the codec between two ranks, for each part of the parameter."""
    order, rows = Order(adds_up.EVEN, 5), adds_up.whole_numbers(adds_up.EVEN)
    halves = [slice(0, adds_up.WIDTH // 2), slice(adds_up.WIDTH // 2, adds_up.WIDTH)]

    def replica(comm, half):
        weight = torch.nn.Parameter(torch.zeros(adds_up.WIDTH // 2))
        strategy = AllReduce(codec=Int8(), encode_vectors=True)
        strategy.start([weight], comm, Generation(notes=0))
        for step in range(1, steps + 1):
            indices = order.indices(*position(step, adds_up.EVEN, BATCH))
            own = torch.from_numpy(indices).view(2, -1)[comm.rank]
            strategy.begin_step(Attempt(0, step, 0))
            strategy.begin_pass(1.0, last=True)
            strategy.gradient(0, rows[own].sum(0)[half] / BATCH)
            strategy.exchange(torch.zeros(0, dtype=torch.float64))
            strategy.hand_out()
            strategy.apply(lambda: weight.data.sub_(weight.grad))
        return weight.detach()

    return torch.cat(
        [run_ranks(2, lambda comm, half=half: replica(comm, half))[0] for half in halves]
    )


@pytest.mark.slow
def test_each_part_of_a_replica_is_sent_as_the_codec_says(start: Start, tmp_path: Path):
    program = begin(start, tmp_path, "parts", recipe="adds_up.py:in_whole_numbers")
    assert program.end() == 0, program.stderr
    found = load_file(program.run / "model.safetensors")["weight"]
    assert torch.equal(found, on_parts(12))
    assert not torch.equal(found, on_parts(11))


def kill_some_of(program: Started, members: range, kills: int) -> None:
    """Kill some, at moments that are drawn; each once the run has gone on since the last."""
    draw = random.Random(len(members))
    for _ in range(kills):
        farthest = newest_step(program)
        program.until(lambda: newest_step(program) > farthest, "gone on")  # noqa: B023
        time.sleep(draw.uniform(0.0, 0.3))  # the moment is what is drawn
        assert kill(newest_pids(program)[draw.choice(members)])


def newest_step(program: Started) -> int:
    return int(program.ledger["step"].max(initial=0))


def all_gradients(steps: int) -> torch.Tensor:
    order, rows = Order(adds_up.SAMPLES, 5), adds_up.rows().double()
    total = torch.zeros(adds_up.WIDTH, dtype=torch.float64)
    for step in range(1, steps + 1):
        where = position(step, adds_up.SAMPLES, BATCH)
        total += rows[torch.from_numpy(order.indices(*where))].mean(0)
    return total


def pieces_of(program: Started, step: int) -> Pieces:
    pieces = open_pieces(dict(published(program.run / "checkpoints"))[step], {}).pieces
    assert pieces is not None
    return pieces


def saved(program: Started, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a checkpoint: what was applied of the gradients, and what is carried over."""
    pieces = pieces_of(program, step)
    return -pieces.read("model/weight").double(), pieces.read("own/residual/weight").double()


def check_nothing_is_lost(program: Started, steps: int) -> None:
    applied, carried = saved(program, steps)
    torch.testing.assert_close(applied + carried, all_gradients(steps), rtol=0.0, atol=1e-4)
    assert float(carried.abs().max()) > 1e-3  # so a part of it that was lost would be seen


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 2])
def test_after_kills_the_result_is_that_of_an_undisturbed_run(
    start: Start, tmp_path: Path, workers: int
):
    """Of a single replica what each rank carried over lies beside the copy of its last commit."""
    keys = ("train.steps=150", f"workers={workers}", "checkpoint.every=50")
    calm = begin(start, tmp_path, "calm", *keys)
    assert calm.end() == 0, calm.stderr
    program = begin(start, tmp_path, "killed", *keys, "arguments.pause_s=0.02")
    program.until(program.is_training, "training")
    kill_some_of(program, range(workers - 2, workers), 3)
    assert program.end() == 0, program.stderr
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    if workers == 4 or not program.events("went_back"):  # a checkpoint has only the sum
        assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
        for own, other in zip(saved(program, 150), saved(calm, 150), strict=True):
            assert torch.equal(own, other)
    assert not program.events("warning")
    program.check_nothing_is_left()
    check_nothing_is_lost(program, 150)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    [
        {"tensor": 2},
        {"stages": 2, "pipeline_batches": 2},
        {"shard": 2, "tensor": 2},
        {"stages": 2, "shard": 2, "zero": 2, "pipeline_batches": 1},
    ],
    ids=str,
)
def test_any_mesh_stays_close_to_a_plain_loop_and_survives_kills(
    start: Start, tmp_path: Path, mesh: dict[str, int]
):
    ranks = mesh.get("shard", 1) * mesh.get("tensor", 1) * mesh.get("stages", 1)
    keys = [f"workers={2 * ranks}", "train.steps=100", "checkpoint.every=12", "mesh.shard=1"]
    keys += [f"mesh.{name}={value}" for name, value in mesh.items()]
    keys += ["arguments.drop=0.0", "arguments.dtype='float32'"]
    calm = begin(start, tmp_path, "calm", *keys, recipe="splits.py:recipe")
    assert calm.end() == 0, calm.stderr
    pieces = pieces_of(calm, 12)
    apart = [(pieces.read(f"model/{n}") - tensor).abs().max() for n, tensor in plain_loop(12)]
    assert 1e-6 < max(map(float, apart)) < 5e-3  # 0.0008 without a mesh; it moves by 0.1
    keys.append("arguments.pause_s=0.02")
    program = begin(start, tmp_path, "killed", *keys, recipe="splits.py:recipe")
    program.until(program.is_training, "training")
    kill_some_of(program, range(ranks, 2 * ranks), 3)
    assert program.end() == 0, program.stderr
    assert program.summary["parameters_sha256"] == calm.summary["parameters_sha256"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    assert not program.events("warning")


def plain_loop(steps: int) -> list[tuple[str, torch.Tensor]]:
    torch.manual_seed(5)
    model = splits.recipe(drop=0.0, dtype="float32").model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimizer = splits.sgd([p for p in model.parameters() if p.requires_grad])
    order, (x, y) = Order(splits.SAMPLES, 5), splits.samples(1, splits.SAMPLES, "float32").tensors
    for step in range(1, steps + 1):
        rows = torch.from_numpy(order.indices(*position(step, splits.SAMPLES, BATCH)))
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    moved = max(float((t - before[name]).abs().max()) for name, t in model.state_dict().items())
    assert moved > 0.1
    return list(model.state_dict().items())


@pytest.mark.slow
def test_a_replica_hands_over_before_it_leaves(start: Start, tmp_path: Path):
    program = begin(start, tmp_path, "fewer", "train.steps=200", "arguments.pause_s=0.01")
    program.until(program.is_training, "training")
    pid = newest_pids(program)[3]
    os.kill(pid, signal.SIGSTOP)  # so that it cannot hand over before it is killed
    scale(program.run, 2)
    os.kill(pid, signal.SIGKILL)
    program.until(
        lambda: program.events("generation_started")[-1]["members"] == [0, 1], "of one replica"
    )
    scale(program.run, 4)
    assert program.end() == 0, program.stderr
    members = program.events("generation_started")[-1]["members"]
    assert members in ([0, 1, 2, 3], [0, 1, 4, 5])  # others where the first are not yet gone
    check_nothing_is_lost(program, 200)


@pytest.mark.slow
def test_what_is_carried_over_is_in_a_checkpoint_for_any_mesh(start: Start, tmp_path: Path):
    program = begin(start, tmp_path, "resumed", "train.stop_after_steps=5")
    assert program.end() == 0, program.stderr
    for stop, workers, shard in ((10, 2, 1), (15, 3, 3), (20, 2, 2), (25, 1, 1), (30, 4, 2)):
        check_nothing_is_lost(program, stop - 5)
        keys = (f"workers={workers}", f"mesh.shard={shard}", f"train.stop_after_steps={stop}")
        sets = [part for key in ("train.steps=40", *keys) for part in ("--set", key)]
        resumed = start("-m", "instep", "resume", program.run, *sets)
        assert resumed.end() == 0, resumed.stderr
    check_nothing_is_lost(program, 30)
