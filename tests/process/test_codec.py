"""Gradients in few bits: what a killed worker still had to send is sent, to the bit."""

import os
import random
import signal
import time
from pathlib import Path

import adds_up
import pytest
import torch
from started import RECIPES, Start, Started, kill, kill_with_its_memory, newest_pids

import instep
from instep.client.running import scale
from instep.data.order import Order, position
from instep.state.files.manifest import published
from instep.state.load import load
from instep.store.run_folder import RunFolder
from instep.sync.generation import SERVED

pytestmark = pytest.mark.process

STEPS = 200


def begin(
    start: Start,
    folder: Path,
    name: str,
    pause_s: float,
    workers: int = 3,
    recipe: str = "slow_tiny.py:recipe",
    *,
    sync: str = 'codec = "int8"',
    more: str = "",
) -> Started:
    job = folder / f"{name}.toml"
    job.write_text(
        f'name = "{name}"\nrecipe = "{RECIPES / recipe}"\nworkers = {workers}\n'
        f'seed = 5\n[train]\nsteps = {STEPS}\nglobal_batch = 16\ndeal = "even"\n{more}'
        f"[sync]\n{sync}\noptions = {{ encode_vectors = true }}\n"
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
@pytest.mark.parametrize(
    ("codec", "servers"), [("int8", 0), ("int8", 2), ("sign", 2)], ids=lambda each: str(each)
)
def test_from_4_workers_to_3_and_back_every_sample_counts_once_and_nothing_is_lost(
    start: Start, tmp_path: Path, codec: str, servers: int
) -> None:
    """With kills, and once more in a run that is resumed; each checkpoint has all gradients."""
    sync = f'codec = "{codec}"'
    sync += f'\nname = "server_sync"\nservers = {servers}' if servers else ""
    how = {"recipe": "adds_up.py:in_many_whole_numbers", "sync": sync}
    how["more"] = "stop_after_steps = 150\n"
    program = begin(start, tmp_path, "scaled", 0.03, 4, **how)
    program.until(program.is_training, "training")
    for number in (1, *range(4, 4 + servers)):  # workers have the first numbers, servers follow
        before = len(program.events("generation_started"))
        kill(newest_pids(program)[number])
        program.until(
            lambda: len(program.events("generation_started")) > before,  # noqa: B023
            f"without trace of the death of {number}",
        )
    killed = len(program.events("generation_started"))
    for workers in (3, 4):
        scale(program.run, workers)
        program.until(
            lambda: len(program.events("generation_started")[-1]["members"]) == workers + servers,  # noqa: B023
            f"of {workers} workers",
        )
    assert program.end() == 0, program.stderr
    program.check_nothing_is_left()
    sizes = [len(event["members"]) - servers for event in program.events("generation_started")]
    assert sizes[killed:] == [4, 3, 4]  # a worker that leaves hands over first
    again = instep.resume(
        program.run, workers=3, quiet=True, train={"stop_after_steps": None}
    ).summary
    assert again["repeated_samples"] == again["missing_samples"] == 0
    assert not program.events("warning")
    saved = dict(published(program.run / "checkpoints"))
    assert {150, STEPS} <= saved.keys()
    for step, checkpoint in saved.items():
        applied, carried = taken_and_left(checkpoint)
        given = all_gradients(adds_up.many_whole_numbers(), step)
        assert (applied + carried - given).norm() <= 1e-6 * given.norm()
        assert carried.norm() > 3e-5 * given.norm()  # so a part of it that was lost would be seen


def taken_and_left(checkpoint: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What the optimizer has taken of all gradients, and what workers are still to send."""
    groups = load(checkpoint).tensors
    weight = groups["model"]["weight"].double()
    for group, named in groups.items():
        for name, part in named.items() if group.startswith("shard-") else ():
            _, kind, place = name.split("/")
            assert kind == SERVED
            begin, end = map(int, place.split(":"))
            weight[begin:end] = part.double()
    return -weight, groups["own"]["residual/weight"].double()


@pytest.mark.slow
def test_what_a_worker_still_had_to_send_is_sent_if_it_is_killed_before_it_could_leave(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, "fewer", 0.01, recipe="adds_up.py:recipe")
    program.until(program.is_training, "training")
    (pid,) = (int(e["pid"]) for e in program.events("worker_joined") if e["worker"] == 2)
    os.kill(pid, signal.SIGSTOP)  # so that it cannot hand over before it is killed
    scale(program.run, 2)
    os.kill(pid, signal.SIGKILL)
    assert program.end() == 0, program.stderr
    assert program.events("generation_started")[-1]["members"] == [0, 1]
    applied, carried = taken_and_left(dict(published(program.run / "checkpoints"))[STEPS])
    given = all_gradients(adds_up.rows(), STEPS)
    torch.testing.assert_close(applied + carried, given, rtol=0.0, atol=1e-4)
    assert float(carried.abs().max()) > 1e-3  # so a part of it that was lost would be seen


def all_gradients(rows: torch.Tensor, steps: int) -> torch.Tensor:
    order, total = Order(len(rows), 5), torch.zeros(rows.shape[1], dtype=torch.float64)
    for step in range(1, steps + 1):
        where = position(step, len(rows), 16)
        total += rows[torch.from_numpy(order.indices(*where))].double().mean(0)
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
