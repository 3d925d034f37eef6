"""Gradients in 8 bits: what a killed worker still had to send is sent, to the bit."""

import os
import random
import signal
import time
from pathlib import Path

import adds_up
import pytest
import torch
from started import RECIPES, Start, Started, kill_with_its_memory

from instep.client.running import scale
from instep.data.order import Order, position
from instep.state.load import load
from instep.state.manifest import published
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

STEPS = 200


def begin(
    start: Start,
    folder: Path,
    name: str,
    pause_s: float,
    workers: int = 3,
    recipe: str = "slow_tiny",
) -> Started:
    job = folder / f"{name}.toml"
    job.write_text(
        f'name = "{name}"\nrecipe = "{RECIPES / recipe}.py:recipe"\nworkers = {workers}\n'
        f'seed = 5\n[train]\nsteps = {STEPS}\nglobal_batch = 16\ndeal = "even"\n'
        '[sync]\ncodec = "int8"\noptions = { encode_vectors = true }\n'
        "[checkpoint]\nevery = 50\nkeep_last = 9\n"
        f"[arguments]\npause_s = {pause_s}\n"
    )
    return start("-m", "instep", "run", job)


@pytest.mark.slow
def test_after_kills_the_result_is_that_of_an_undisturbed_run(start: Start, tmp_path: Path) -> None:
    undisturbed = begin(start, tmp_path, "undisturbed", 0.0)
    assert undisturbed.end() == 0, undisturbed.stderr
    draw = random.Random(7)
    program = begin(start, tmp_path, "killed", 0.008)
    program.until(program.is_training, "training")
    for _ in range(3):
        time.sleep(draw.uniform(0.1, 0.5))  # the moment is what is drawn
        pids = {int(e["worker"]): int(e["pid"]) for e in program.events("worker_joined")}
        try:
            os.kill(draw.choice(list(pids.values())), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it is being replaced already
    assert program.end() == 0, program.stderr
    program.check_nothing_is_left()
    assert not program.events("warning")
    runs = [RunFolder(each.run) for each in (undisturbed, program)]
    assert program.summary["generations"] > 1
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    sums = [run.last("model_saved")["parameters_sha256"] for run in runs]
    assert sums[0] == sums[1]
    saved = [dict(published(each.run / "checkpoints")) for each in (undisturbed, program)]
    common = saved[0].keys() & saved[1].keys()  # one may be left out while another is written
    assert STEPS in common
    for step in common:  # what is carried over is the same too
        own = [load(each[step]).tensors["own"] for each in saved]
        assert own[0].keys() == own[1].keys()
        assert any(bool(residual.any()) for residual in own[0].values())
        assert all(own[0][name].equal(own[1][name]) for name in own[0])


@pytest.mark.slow
def test_from_4_workers_to_3_and_back_every_sample_counts_once(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, "scaled", 0.03, workers=4)
    program.until(program.is_training, "training")
    for workers in (3, 4):
        scale(program.run, workers)
        program.until(
            lambda: len(program.events("generation_started")[-1]["members"]) == workers,  # noqa: B023
            f"of {workers} workers",
        )
    assert program.end() == 0, program.stderr
    program.check_nothing_is_left()
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    sizes = [len(event["members"]) for event in program.events("generation_started")]
    assert sizes == [4, 4, 3, 4]  # a worker that leaves hands over first


@pytest.mark.slow
def test_what_a_worker_still_had_to_send_is_sent_if_it_is_killed_before_it_could_leave(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, "fewer", 0.01, recipe="adds_up")
    program.until(program.is_training, "training")
    (pid,) = (int(e["pid"]) for e in program.events("worker_joined") if e["worker"] == 2)
    os.kill(pid, signal.SIGSTOP)  # so that it cannot hand over before it is killed
    scale(program.run, 2)
    os.kill(pid, signal.SIGKILL)
    assert program.end() == 0, program.stderr
    assert program.events("generation_started")[-1]["members"] == [0, 1]
    checkpoint = load(dict(published(program.run / "checkpoints"))[STEPS])
    applied = -checkpoint.tensors["model"]["weight"].double()
    carried = checkpoint.tensors["own"]["residual/weight"].double()
    torch.testing.assert_close(applied + carried, all_gradients(), rtol=0.0, atol=1e-4)
    assert float(carried.abs().max()) > 1e-3  # so a part of it that was lost would be seen


def all_gradients() -> torch.Tensor:
    order, rows, total = Order(adds_up.SAMPLES, 5), adds_up.rows().double(), torch.zeros(700)
    for step in range(1, STEPS + 1):
        where = position(step, adds_up.SAMPLES, 16)
        total = total + rows[torch.from_numpy(order.indices(*where))].mean(0)
    return total


@pytest.mark.slow
def test_it_is_said_where_the_memory_of_a_killed_worker_is_gone(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, "gone", 0.01)
    program.until(program.is_training, "training")
    (pid,) = (int(e["pid"]) for e in program.events("worker_joined") if e["worker"] == 1)
    kill_with_its_memory(pid)
    assert program.end() == 0, program.stderr
    (warning,) = program.events("warning")
    assert warning["text"].startswith("worker 1: the memory that its last process left")
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
