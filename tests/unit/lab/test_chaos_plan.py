"""Which runs can be broken, and which can be the measure of one that is."""

import fcntl
import json

import pytest

from instep.errors import RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import as_table
from instep.lab.chaos.breaker import Plan
from instep.lab.chaos.chaos import break_again, check_can_be_repeated, check_own
from instep.store.folder import is_running
from instep.store.run_folder import RunFolder


def run_of(folder, *sessions, outcome="completed", recipe="a.py:f", **started):
    """Each session has a first step and a length; the last one ends at step 9."""
    folder.mkdir()
    events = []
    for resumed, steps in sessions:
        train = {"steps": steps} if steps else {}
        job = spec_file.build({"recipe": recipe, "train": train}, source="test")
        events.append({"event": "run_started", "job": as_table(job), **started})
        events[-1] |= {"resumed_step": resumed} if resumed else {}
    if outcome:
        events.append({"event": "run_finished", "outcome": outcome, "step": 9})
    (folder / "job.toml").write_text(spec_file.dump(job))
    (folder / "run.id").write_text("ab\n")
    lines = [json.dumps({"time": float(n), **event}) for n, event in enumerate(events)]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    return RunFolder(folder)


def test_a_run_that_came_to_its_end_is_a_measure(tmp_path):
    check_can_be_repeated(run_of(tmp_path / "a", (0, 9)))
    check_can_be_repeated(run_of(tmp_path / "b", (0, 9), (5, 9)))
    check_can_be_repeated(run_of(tmp_path / "c", (0, 99), outcome="stopped"))


@pytest.mark.parametrize("outcome", ["failed", "interrupted", ""])
def test_a_run_that_did_not_is_none(tmp_path, outcome):
    run = run_of(tmp_path / "run", (0, 9), outcome=outcome)
    with pytest.raises(RunError, match=r"To complete it: instep resume "):
        check_can_be_repeated(run)


def test_a_run_that_was_lengthened_on_the_way_is_none(tmp_path):
    with pytest.raises(SpecError, match="was resumed with another length"):
        check_can_be_repeated(run_of(tmp_path / "run", (0, 5), (5, 9)))


def test_a_run_whose_processes_others_started_is_not_broken(tmp_path):
    with pytest.raises(SpecError, match="they are not replaced"):
        check_own(run_of(tmp_path / "run", (0, 9), started_by="join"))


def test_a_run_on_another_machine_is_not_broken_while_it_goes_on(tmp_path):
    run = run_of(tmp_path / "run", (0, 9), host={"name": "afar"})
    assert not is_running(run.path)
    check_own(run)
    with (run.path / "run.id").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert is_running(run.path)
        with pytest.raises(SpecError, match="is running on afar, and this is "):
            check_own(run)


@pytest.mark.parametrize(
    ("recipe", "steps", "hint"),
    [
        ("a.py:f", 9, "--set train.steps=40"),
        ("a.py:f", 0, "--set train.epochs=40, or more; or ask for fewer."),
        ("a.py:__main__", 0, "--set train.epochs=40, or more where the script loops over session."),
    ],
)
def test_the_hint_for_a_run_that_is_too_short_is_one_that_it_takes(tmp_path, recipe, steps, hint):
    run = run_of(tmp_path / "run", (0, steps), recipe=recipe)
    with pytest.raises(SpecError, match="9 steps are too few") as refused:
        break_again(run, tmp_path, Plan(kills=10, hangs=0, seed=0), print)
    assert hint in str(refused.value)
