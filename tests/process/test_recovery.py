"""Whoever is killed, whenever: the run goes on, and leaves what an undisturbed one leaves."""

import os
import random
import signal
from pathlib import Path

import pytest
from started import RECIPES, Start, Started, kill, kill_members, newest_pids

import instep
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

STEPS = 300


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train = {"steps": STEPS, "global_batch": 16, "determinism": "bits", "validate_every": 40}
    runs = tmp_path_factory.mktemp("undisturbed")
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    return instep.train(
        recipe, name="w", runs=runs, seed=5, train=train, workers=1, quiet=True
    ).path


def begin(start: Start, folder: Path, workers: int, recipe: str = "slow_tiny.py") -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / recipe}:recipe"\nworkers = {workers}\nseed = 5\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = 16\ndeterminism = "bits"\nvalidate_every = 40\n'
        "[checkpoint]\nevery = 25\n"
        f"[arguments]\npause_s = {0.0013 * workers}\n"
    )
    return start("-m", "instep", "run", job)


def has_saved_twice(program: Started) -> bool:
    made = (program.work / "runs" / "disturbed" / "events.jsonl").is_file()
    return made and len(program.events("checkpoint_saved")) > 1


def check_as_if_nothing_had_been(program: Started, undisturbed: Path) -> None:
    check_same_result(program, undisturbed)
    program.check_nothing_is_left()


def check_same_result(program: Started, undisturbed: Path) -> None:
    run, wanted = RunFolder(program.run), RunFolder(undisturbed)
    assert run.outcome == "completed"
    assert program.summary["steps"] == STEPS
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    assert run.audit.sha256 == wanted.audit.sha256
    sums = [f.last("model_saved")["parameters_sha256"] for f in (run, wanted)]
    assert sums[0] == sums[1]
    metrics = [{e["step"]: e["metrics"] for e in f.validations} for f in (run, wanted)]
    assert metrics[0] == metrics[1]


@pytest.mark.slow
@pytest.mark.parametrize("kills", [8, 60])
def test_workers_that_are_killed_at_random_moments_leave_no_trace(
    start: Start, tmp_path: Path, undisturbed: Path, kills: int
) -> None:
    draw = random.Random(kills)
    program = begin(start, tmp_path, 3)
    program.until(program.is_training, "training")
    killed = kill_members(program, kills, draw).total()
    after = killed < kills  # the last may have hit a worker that was done
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert killed - after <= len(program.events("worker_lost")) <= killed
    assert killed >= 8
    generations = RunFolder(program.run).members.generations
    lost = "was lost: the process was killed by SIGKILL"
    others = [g["reason"] for g in generations[1:] if lost not in g["reason"]]
    # on a slow machine all that have the state may be killed before a newcomer has it
    assert len(others) <= len(program.events("went_back")), others


@pytest.mark.slow
def test_the_others_train_while_a_replacement_gets_ready(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 3, recipe="builds_slowly.py")
    program.until(program.is_training, "training")
    hold = program.work / "hold"
    hold.touch()
    assert kill(newest_pids(program)[1])

    def groups() -> list[list[int]]:
        return [e["members"] for e in program.events("generation_started")]

    program.until(lambda: len(groups()) > 1, "in a group of two")
    before = program.ledger["step"].max()
    program.until(lambda: program.ledger["step"].max() > before + 10, "further by ten steps")
    assert groups() == [[0, 1, 2], [0, 2]]
    hold.unlink()
    assert program.end() == 0, program.stderr
    assert groups() == [[0, 1, 2], [0, 2], [0, 1, 2]]
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.slow
def test_where_workers_share_a_fate_all_start_again_from_the_newest_checkpoint(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 3, recipe="one_fate.py")
    program.until(lambda: has_saved_twice(program), "saved")
    before = newest_pids(program)
    assert kill(before[1])
    program.until(lambda: len(program.events("generation_started")) > 1, "in another group")
    assert set(before.values()).isdisjoint(newest_pids(program).values())
    assert program.end() == 0, program.stderr
    (back,) = program.events("went_back")
    assert back["resumed_step"] > 0
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.tail
@pytest.mark.parametrize("workers", [1, slow(2)])
def test_if_no_worker_is_left_the_run_goes_back_to_its_newest_checkpoint(
    start: Start, tmp_path: Path, undisturbed: Path, workers: int
) -> None:
    program = begin(start, tmp_path, workers)
    program.until(lambda: has_saved_twice(program), "saved")
    pids = newest_pids(program)
    assert [kill(pid) for pid in pids.values()] == [True] * workers
    assert program.end() == 0, program.stderr
    (back,) = program.events("went_back")
    assert back["resumed_step"] % 25 == 0
    assert back["resumed_step"] > 0
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.slow
def test_a_replacement_that_joined_before_the_last_worker_was_lost_goes_back_with_the_others(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 2)
    program.until(lambda: has_saved_twice(program), "saved")
    pids = newest_pids(program)
    os.kill(pids[0], signal.SIGSTOP)  # it lives, and gives its state to nobody
    kill(pids[1])
    program.until(lambda: len(program.events("worker_joined")) == 3, "replaced")
    kill(pids[0])
    assert program.end() == 0, program.stderr
    (back,) = program.events("went_back")
    assert back["resumed_step"] > 0
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.tail
def test_a_run_that_has_lost_a_worker_still_stops_when_it_is_asked_to(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, 2)
    program.until(program.is_training, "training")
    kill(newest_pids(program)[0])
    program.until(lambda: len(program.events("generation_started")) > 1, "formed again")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert program.summary["outcome"] == "interrupted"
    assert program.summary["repeated_samples"] == 0
    assert (program.run / "model.safetensors").is_file()
    program.check_nothing_is_left()
