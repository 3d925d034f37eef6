"""Stories of a run in which anything may be killed, cut off or late: every promise holds in each.

`run.py` tells ten thousand of them, and one again by its seed.
"""

import pytest

from .engine import Violation
from .mutants import MUTANTS, mutated
from .run import main
from .world import tell

IN_THE_SUITE, IN_ALL = (9, 22, 31, 36, 42, 43, 106, 107, 114, 118, 127, 134, 140, 316, 790), 10_000
"""Seeds whose stories have together what they are to be about; `make simulate` tells all others."""


QUICK = [
    "no record says who holds the state",
    "a lost worker stays ready",
    "a group is formed before all are built",
    "the run never goes back",
    "a group that broke is not formed again",
    "a worker that has left its group is inside again",
    "a worker that leaves does not drain",
    "finished parts of a round are dealt out once more",
    "a part of a round that nobody has finished is left out",
    "a lost server is not replaced",
    "a fellow of a lost process is not killed",
    "restarts are counted for each process",
    "the lowest rank gives its state",
    "the ledger is not mended",
]
"""Faults that a few stories are enough for."""


def first_broken(seeds):
    """The first seed of these whose story breaks a promise, and what is said of it."""
    for seed in seeds:
        try:
            tell(seed)
        except Violation as broken:
            return seed, str(broken)
    return None


@pytest.fixture(scope="module")
def stories():
    """The lines of a few stories; each promise was looked after while they were told."""
    return [tell(seed, verbose=True).engine.story for seed in IN_THE_SUITE]


def test_whatever_happens_every_promise_holds(stories):
    assert len(stories) == len(IN_THE_SUITE)


def test_a_seed_tells_the_same_story_again():
    first, second = (tell(2, verbose=True) for _ in range(2))
    assert first.engine.story == second.engine.story
    assert len(first.engine.story) > 50


def test_the_stories_have_what_they_are_to_be_about(stories):
    lines = "\n".join(line for story in stories for line in story)
    for happened in (
        "the master is killed",
        "the host is killed",
        "workers are cut off",
        "decides on Stuck",
        "decides on Hung",
        "decides on Noticed",
        "decides on Scaled",
        "Regroup",
        "a server is killed",
        "draining=(1,)",
        "has handed over what it owns",
        "knows of finished parts of round",
        "was started by another program",
        "'restarted': [",
        "has met the others of replica 0, start 2",
        "has lost its replica",
        "fellows are killed",
        "'fellows': [",
        "is killed at 'handed over'",
        "is killed at 'taken over'",
        "which was in doubt",
        "goes back to step",
        "is killed at 'committed'",
        "'outcome': 'completed'",
        "'outcome': 'stopped'",
    ):
        assert happened in lines, f"no story has: {happened}"


@pytest.mark.grid(2)
@pytest.mark.parametrize("name", QUICK)
def test_a_fault_put_into_the_control_plane_breaks_a_promise(name):
    with mutated(name):
        assert first_broken(range(100)) is not None


@pytest.mark.tail
def test_a_seed_that_fails_is_printed_and_fails_again(capsys):
    with mutated("the lowest rank gives its state"):
        assert main(["--seeds", "50", "--jobs", "1"]) == 1
        said = capsys.readouterr().out
        seed = said.split("--seed ")[1].split()[0]
        assert f"seed {seed}: " in said
        assert main(["--seed", seed, "--verbose"]) == 1
    again = capsys.readouterr().out
    assert "commits step" in again
    assert said.split(f"seed {seed}: ")[1].split("\n")[0][:100] in again


@pytest.mark.long
def test_in_ten_thousand_stories_every_promise_holds():
    assert main(["--seeds", str(IN_ALL), "--jobs", "2"]) == 0


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(set(MUTANTS) - set(QUICK)))
def test_each_other_fault_breaks_a_promise_too(name):
    with mutated(name):
        assert first_broken(range(30_000)) is not None
