"""Each restart of a replica is told, with where its state came from."""

import json

import pytest

from instep.events import read_events
from instep.report.figures.restarts import Restart, restarts
from instep.report.figures.summary import summarise
from instep.report.page.sections import changes_and_failures
from instep.report.terminal.closing import closing_lines
from instep.report.terminal.screen import notice
from instep.store.run_folder import RunFolder
from made_up_runs import BEGIN_S, make_run, write_events


def event(name, **fields):
    return {"time": BEGIN_S + 3.0, "event": name, **fields}


def formed(*members):
    return event("generation_started", generation=2, members=members, reason="lost", seconds=0.1)


def lost(worker):
    return event("worker_lost", worker=worker, step=7, cause="SIGKILL")


START = [event("run_started", job={}), formed(0, 1, 2, 3)]
TAKEN = event("taken_from_host", replica=0, step=31)
BACK = event("went_back", resumed_step=20, path="checkpoints/step-20")


@pytest.mark.parametrize(
    ("events", "source", "words"),
    [
        (
            [formed(2, 3), formed(0, 1, 2, 3)],
            "other_replicas",
            "the state that other replicas hold",
        ),
        ([formed(0, 1, 2, 3)], "other_replicas", "the state that other replicas hold"),
        ([TAKEN, formed(0, 1)], "host_memory", "memory of its host, which had step 31"),
        ([BACK, formed(0, 1)], "checkpoint", "the checkpoint of step 20"),
        ([TAKEN, lost(0), BACK, formed(0, 1)], "checkpoint", "the checkpoint of step 20"),
        ([formed(0, 1)], "checkpoint", "the beginning"),
    ],
)
def test_a_replica_that_was_started_again_says_from_where_it_continued(events, source, words):
    (found,) = restarts([*START, lost(1), *events], 2)
    assert (found.replica, found.source, found.words()) == (0, source, words)
    assert found.lost[0] == 1


def test_replicas_are_told_apart_and_those_that_never_came_back_are_left_out():
    events = [*START, lost(1), lost(2), lost(3), BACK, formed(0, 1, 2, 3), lost(0), formed(2, 3)]
    one, other = restarts(events, 2)
    assert (one.replica, one.lost, one.step) == (0, [1], 20)
    assert (other.replica, other.lost, other.step) == (1, [2, 3], 20)
    assert restarts(events, 1) == []
    again = event("run_started", job={}, resumed_step=20)
    assert (
        len(restarts([*events, again, formed(0, 1, 2, 3)], 2)) == 2
    )  # a new session is no restart
    *_, resumed = restarts([*events, again, formed(0, 1), lost(0), formed(0, 1)], 2)
    assert resumed == Restart(0, [0], BEGIN_S + 3.0, "checkpoint", 20)


def test_page_summary_and_terminal_say_all_three(tmp_path):
    path = make_run(tmp_path / "digits", workers=4, mesh={"tensor": 2})
    events = list(read_events(path / "events.jsonl"))
    more = [lost(1), formed(2, 3), formed(0, 1, 2, 3), lost(2), TAKEN | {"replica": 1}]
    more += [formed(2, 3), lost(0), BACK, formed(0, 1, 2, 3)]
    write_events(path, [*events[:-1], *more, events[-1]])
    folder = RunFolder(path)
    summary = summarise(folder)
    counts = {"other_replicas": 1, "host_memory": 1, "checkpoint": 1}
    assert json.loads(json.dumps(summary["replica_restarts"])) == counts
    page = changes_and_failures(folder)
    assert "Replicas that were started again" in page
    for words in ("the state that other replicas hold", "memory of its host, which had step 31"):
        assert words in page
    assert "the checkpoint of step 20" in page
    assert (
        "again   3 replicas started again: 1 from the state that other replicas hold, "
        "1 from memory of its host, 1 from a checkpoint"
    ) in closing_lines(summary, folder)


def test_a_run_without_restarts_says_nothing_of_them(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits", workers=4, mesh={"tensor": 2}))
    summary = summarise(folder)
    assert set(summary["replica_restarts"].values()) == {0}
    assert "started again" not in changes_and_failures(folder)
    assert not any("started again" in line for line in closing_lines(summary, folder))


def test_a_running_job_says_that_a_replica_continues_from_memory_of_its_host():
    assert notice(TAKEN) == "replica 0 continues from memory of its host, which had step 31"
