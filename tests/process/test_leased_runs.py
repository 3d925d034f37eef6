"""Whoever is killed, no update is lost or made twice, and nobody else is disturbed.

With one worker no gradient is late, so the whole run is a plain loop over the micro-batches.
"""

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adds_up
import counted
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from started import RECIPES, Start, Started, kill, kill_members, newest_pids
from torch import nn

import instep
from instep.data.order import Order
from instep.errors import RecipeError
from instep.recipe.build import call
from instep.report.figures.summary import summarise
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

SAMPLES, STEPS, BATCH, PARTS = 101, 160, 16, 4


def plain_loop(steps: int, start: dict[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
    """What a loop of plain PyTorch makes of the micro-batches of so many steps.

    Args:
        steps: of the job.
        start: what the model begins with; then its first layer is frozen.
    """
    recipe = call(tiny.recipe, {}, 5)
    model, order = copy.deepcopy(recipe.model), Order(SAMPLES, 5)
    assert isinstance(model, nn.Sequential)
    if start is not None:
        model.load_state_dict(start)
        model[0].requires_grad_(False)
    inputs, labels = recipe.train.tensors
    optimizer = recipe.optimizer(model.parameters())
    for chosen in micro_batches(order, steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    return model.state_dict()


def micro_batches(order: Order, steps: int) -> Iterator[Any]:
    """The indices of each micro-batch of the first steps, in their order."""
    per_epoch = -(-SAMPLES // BATCH)
    for step in range(steps):
        epoch, number = divmod(step, per_epoch)
        first, stop = number * BATCH, min((number + 1) * BATCH, SAMPLES)
        parts = -(-(stop - first) * PARTS // BATCH)
        for part in range(parts):
            low = first + (stop - first) * part // parts
            high = first + (stop - first) * (part + 1) // parts
            yield order.indices(epoch, low, high)


def write_job(
    folder: Path,
    workers: int,
    sync: str,
    pause_s: float,
    steps: int = STEPS,
    recipe: str = "slow_tiny.py:recipe",
) -> Path:
    job = folder / "job.toml"
    job.write_text(
        f'name = "leased"\nrecipe = "{RECIPES / recipe}"\nworkers = {workers}\n'
        f"seed = 5\n[train]\nsteps = {steps}\nglobal_batch = {BATCH}\nmicro_batches = {PARTS}\n"
        f"validate_every = 40\n[sync]\n{sync}\n[checkpoint]\nevery = 25\n"
        f"[arguments]\npause_s = {pause_s}\n"
    )
    return job


def begin(start: Start, folder: Path, *given: Any) -> Started:
    return start("-m", "instep", "run", write_job(folder, *given))


def check_exact(run: RunFolder, steps: int = STEPS) -> None:
    """Every micro-batch is in the ledger, once."""
    assert run.outcome == "completed"
    assert run.audit.exact
    ledger = run.ledger
    units = Counter(zip(ledger["step"].tolist(), ledger["unit"].tolist(), strict=True))
    assert set(units.values()) == {1}
    assert set(ledger["step"].tolist()) == set(range(1, steps + 1))
    lag = summarise(run)["lag"]
    assert lag is not None
    assert lag["updates"] == len(ledger)
    assert 0 <= lag["mean"] <= lag["largest"] <= len(ledger)
    assert (lag["largest"] > 0) == (len({*ledger["worker"].tolist()}) > 1)


def check_equal(run: RunFolder, wanted: dict[str, torch.Tensor]) -> None:
    found = load_file(run.path / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("kills", "steps"), [slow(2, 50), slow(25, STEPS)])
def test_one_worker_is_a_plain_loop_whoever_is_killed(
    start: Start, tmp_path: Path, kills: int, steps: int
) -> None:
    sync = 'name = "bounded_stale"\noptions = { staleness = 0 }'
    program = begin(start, tmp_path, 1, sync, 0.002 if kills < 10 else 0.012, steps)
    program.until(program.is_training, "training")
    kill(newest_pids(program)[1])
    kill_members(program, kills - 1, random.Random(kills))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run, steps)
    check_equal(run, plain_loop(steps))
    units = [(row["step"], row["unit"]) for row in run.ledger]
    assert units == sorted(units)
    assert not program.events("went_back")
    program.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "kills", "sync"),
    [(3, 20, 'name = "bounded_stale"'), (4, 20, 'name = "server_async"')],
)
def test_whoever_is_killed_each_micro_batch_is_committed_once(
    start: Start, tmp_path: Path, workers: int, kills: int, sync: str
) -> None:
    program = begin(start, tmp_path, workers, sync, 0.012 * workers)
    program.until(program.is_training, "training")
    kill_members(program, kills, random.Random(kills))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    if "bounded" in sync:
        farthest = 0
        for step in run.ledger["step"].tolist():
            assert step >= farthest - 2
            farthest = max(farthest, step)
    assert program.summary["metrics"]["accuracy"] > 0.8
    assert [event["step"] for event in run.validations] == [40, 80, 120, 160]
    program.check_nothing_is_left()


def kill_servers(program: Started, numbers: list[int], kills: int, draw: random.Random) -> None:
    """Kill one of these workers after the other, each once the run goes on after the last."""
    for number in range(kills):
        reached = int(program.ledger["step"].max(initial=0))
        program.until(lambda: program.ledger["step"].max(initial=0) > reached, "going on")  # noqa: B023
        time.sleep(draw.uniform(0.0, 0.3))  # the moment is what is drawn
        assert kill(newest_pids(program)[draw.choice(numbers)])
        program.until(lambda: len(program.events("worker_lost")) > number, "noticed")  # noqa: B023


@pytest.mark.slow
@pytest.mark.parametrize("name", ["server_async", "bounded_stale"])
def test_a_server_that_is_killed_loses_no_update_and_no_worker_starts_again(
    start: Start, tmp_path: Path, name: str
) -> None:
    """The parameters are a sum of whole numbers: no order of updates shows in it, and each does."""
    given = (3, f'name = "{name}"', 0.02, STEPS, "adds_up.py:in_whole_numbers")
    program = begin(start, tmp_path, *given)
    program.until(program.is_training, "training")
    before, kills = newest_pids(program), 8
    kill_servers(program, [3], kills, random.Random(name))
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    after = newest_pids(program)
    assert [n for n in before if before[n] != after[n]] == [3]
    assert [event["worker"] for event in program.events("worker_lost")] == [3] * kills
    order, rows = Order(adds_up.EVEN, 5), adds_up.whole_numbers(adds_up.EVEN).double()
    wanted = torch.zeros(adds_up.WIDTH, dtype=torch.float64)
    for row in run.ledger:
        indices = order.indices(int(row["epoch"]), int(row["first"]), int(row["stop"]))
        wanted -= rows[indices].mean(0)
    assert torch.equal(load_file(run.path / "model.safetensors")["weight"].double(), wanted)


@pytest.mark.slow
def test_a_worker_that_is_lost_disturbs_no_other(start: Start, tmp_path: Path) -> None:
    program = begin(start, tmp_path, 3, 'name = "server_async"', 0.02)
    program.until(program.is_training, "training")
    before = newest_pids(program)
    assert kill(before[1])
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    after = newest_pids(program)
    assert [n for n in before if before[n] != after[n]] == [1]
    (lost,) = program.events("worker_lost")
    begins = run.steps_of(0)["begin"]
    pauses = begins[1:] - begins[:-1]
    assert lost["worker"] == 1
    assert pauses.max() < 1.0  # a group that forms again takes longer than that


@pytest.mark.slow
def test_buffers_that_passes_change_are_those_of_a_plain_loop(tmp_path: Path) -> None:
    """Also of a run that was resumed, and one that checkpoints alone remember."""
    train = {"steps": 6, "global_batch": 16, "micro_batches": PARTS, "stop_after_steps": 3}
    halted = instep.train(
        f"{RECIPES / 'counted.py'}:recipe",
        name="counted",
        runs=tmp_path,
        seed=5,
        quiet=True,
        workers=1,
        train=train,
        sync={"name": "bounded_stale", "options": {"staleness": 0}},
    )
    again = instep.resume(halted.path, quiet=True, train={"stop_after_steps": None})
    recipe = call(counted.recipe, {}, 5)
    model, order = recipe.model, Order(SAMPLES, 5)
    assert isinstance(model, nn.Module)
    inputs, labels = recipe.train.tensors
    optimizer = recipe.optimizer(model.parameters())
    for first in range(0, 96, 4):
        chosen = order.indices(0, first, first + 4)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen]).backward()
        optimizer.step()
    check_equal(RunFolder(again.path), dict(model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize("then", [1, 3])
def test_a_run_is_stopped_and_resumed(tmp_path: Path, then: int) -> None:
    given: dict[str, Any] = {
        "name": "leased",
        "runs": tmp_path,
        "seed": 5,
        "quiet": True,
        "workers": 1 if then == 1 else 2,
        "sync": {"name": "bounded_stale", "options": {"staleness": 0 if then == 1 else 3}},
    }
    train = {"steps": STEPS, "global_batch": BATCH, "micro_batches": PARTS, "stop_after_steps": 33}
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    halted = RunFolder(instep.train(recipe, train=train, **given).path)
    assert set(halted.ledger["step"].tolist()) == set(range(1, 34))
    assert halted.audit.exact
    again = instep.resume(halted.path, quiet=True, workers=then, train={"stop_after_steps": None})
    run = RunFolder(again.path)
    check_exact(run)
    if then == 1:
        check_equal(run, plain_loop(STEPS))


@pytest.mark.slow
def test_workers_of_a_resumed_run_have_the_frozen_parameters_of_its_checkpoint(
    tmp_path: Path,
) -> None:
    model = call(tiny.recipe, {}, 9).model
    assert isinstance(model, nn.Module)
    save_file(model.state_dict(), tmp_path / "start.safetensors")
    halted = instep.train(
        f"{RECIPES / 'tiny.py'}:recipe",
        name="frozen",
        runs=tmp_path,
        seed=5,
        quiet=True,
        workers=1,
        start={"model": str(tmp_path / "start.safetensors"), "freeze": ["0.*"]},
        sync={"name": "bounded_stale", "options": {"staleness": 0}},
        train={
            "steps": 20,
            "global_batch": BATCH,
            "micro_batches": PARTS,
            "stop_after_steps": 9,
        },
    )
    again = instep.resume(halted.path, quiet=True, train={"stop_after_steps": None})
    check_equal(RunFolder(again.path), plain_loop(20, model.state_dict()))


@pytest.mark.slow
@pytest.mark.parametrize(("by", "named"), [("function", "'table'"), ("layer", "'words'")])
def test_sparse_gradients_are_refused_before_anything_counts(
    tmp_path: Path, by: str, named: str
) -> None:
    with pytest.raises(RecipeError, match=rf"{named}.*'bounded_stale'.* Use .*'server_sync'"):
        instep.train(
            f"{RECIPES / 'by_rows.py'}:recipe", workers=1, runs=tmp_path, quiet=True,
            sync={"name": "bounded_stale"}, train={"steps": 4}, arguments={"by": by},
        )  # fmt: skip
    assert not [*tmp_path.glob("*/model.safetensors")]


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "int8"])
def test_a_run_gets_more_workers_and_fewer_while_it_trains(
    start: Start, tmp_path: Path, codec: str
) -> None:
    program = begin(start, tmp_path, 2, f'name = "server_async"\ncodec = "{codec}"', 0.02)
    program.until(program.is_training, "training")
    for workers in (4, 1):
        before = len(program.events("generation_started"))
        scaled = start("-m", "instep", "scale", program.run, "--workers", workers)
        assert scaled.end() == 0, scaled.stderr
        program.until(
            lambda n=workers: len(program.events("generation_started")[-1]["members"]) == n + 1,
            f"{workers} workers",
        )
    assert program.end() == 0, program.stderr
    check_exact(RunFolder(program.run))
    assert len(program.events("generation_started")) == before + 1, "who leaves hands nothing over"
    program.check_nothing_is_left()


@pytest.mark.slow
def test_where_nobody_is_left_a_run_goes_back_to_its_newest_checkpoint(
    start: Start, tmp_path: Path
) -> None:
    sync = 'name = "bounded_stale"\noptions = { staleness = 0 }'
    program = begin(start, tmp_path, 1, sync, 0.006)
    program.until(program.is_training, "training")
    program.until(lambda: len(program.events("checkpoint_saved")) > 1, "saved")
    for pid in newest_pids(program).values():
        kill(pid)
    assert program.end() == 0, program.stderr
    run = RunFolder(program.run)
    check_exact(run)
    check_equal(run, plain_loop(STEPS))


@pytest.mark.slow
def test_whoever_is_killed_or_stopped_chaos_finds_no_fault(start: Start, tmp_path: Path) -> None:
    job = write_job(tmp_path, 3, 'name = "server_async"', 0.02)
    faults = ("--kills", 4, "--hangs", 3, "--roles", "worker,server,master")
    program = start("-m", "instep", "chaos", job, *faults, "--json")
    assert program.end() == 0, program.stdout
    verdict = json.loads(program.stdout.splitlines()[-1])
    assert verdict["holds"]
    assert verdict["injected"] == 7
    assert verdict["losses_compared"] == 0
    program.check_no_process_is_left()
