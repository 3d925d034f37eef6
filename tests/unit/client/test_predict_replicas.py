"""What a master of predictions knows of a replica: its turns, and for whom its processes wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from instep.client.predict.batches import START, PredictBatches
from instep.client.predict.pace import FIRST_S, Pace
from instep.client.predict.replicas import PredictProcess, PredictReplica
from instep.comm.protocol.hub import Peer
from instep.comm.protocol.messages import READING
from instep.job.mesh import MeshSpec
from instep.system.lease import Lease
from instep.system.limits import UNKNOWN_S
from instep.system.processes import Watched


@pytest.fixture
def made() -> Iterator[PredictReplica]:
    """The second replica of three processes, all of them there and ready."""
    made = PredictReplica(1, MeshSpec(shard=3))
    for own in made.numbers:
        made.processes[own] = PredictProcess(
            own,
            Peer(socket.socket(), 1),
            Watched(os.getpid()),
            Lease(os.getpid(), 0.0),
            marks=own,
            since=0.0,
            ready=True,
        )
    every = list(made.processes.values())
    yield made
    for process in every:
        process.peer.socket.close()
        process.system.close()


def test_it_is_ready_with_all_of_its_processes(made: PredictReplica):
    assert made.ready
    assert made.marks == 3
    made.processes[4].killed = "it hung"
    assert not made.ready
    del made.processes[4]
    assert not made.ready


def test_a_turn_is_there_until_all_of_its_batches_have_a_part(made: PredictReplica):
    made.give([[0, 1, 2], [3, 4]])
    for batch in (1, 2, 3):
        made.finish(batch)
    assert list(made.turns) == [[0, 1, 2], [3, 4]]
    made.finish(0)
    assert list(made.turns) == [[3, 4]]
    assert made.drop() == [4]
    assert not made.turns


def test_a_process_is_at_the_batch_at_its_place(made: PredictReplica):
    first, second, third = made.processes.values()
    assert made.batch_of(first) == START
    made.give([[5, 6, 7], [8, 9]])
    assert [made.batch_of(process) for process in (first, second, third)] == [5, 6, 7]
    made.finish(6)
    assert made.batch_of(second) == 9
    for batch in (5, 7):
        made.finish(batch)
    assert [made.batch_of(process) for process in (first, second, third)] == [8, 9, 8]
    third.ready = False
    assert made.batch_of(third) == START


def test_all_wait_for_one_that_reads_and_for_none_that_has_nothing_to_do(made: PredictReplica):
    first, second, third = made.processes.values()
    assert made.slowest() is None
    made.give([[0, 1, 2]])
    first.since, second.since, third.since = 3.0, 4.0, 5.0
    assert made.slowest() is first
    assert made.since == 5.0
    third.at = (READING, 1)
    assert made.slowest() is third
    second.killed = "it was stopped"
    assert made.slowest() is None


@pytest.mark.parametrize(("reads", "waits_for"), [(True, 4), (False, None)])
def test_one_that_builds_may_take_any_time_but_not_a_read(
    made: PredictReplica, reads: bool, waits_for: int | None
):
    made.processes[4].ready = False
    made.processes[4].at = (READING, 0) if reads else ("building", 0)
    slowest = made.slowest()
    assert (slowest.number if slowest else None) == waits_for


def test_a_process_that_compiles_is_given_as_long_as_for_the_first_batch(made: PredictReplica):
    pace, process = Pace(PredictBatches((), 4, skip=False), 0.0), made.processes[3]
    process.at = "predicting", 1
    assert pace.limit_s(process, 0) == FIRST_S
    made.give([[0, 1, 2]])
    pace.predicts(1.0)
    process.since = 1.0
    pace.moves(made, process, 1.5)
    assert pace.limit_s(process, 1) == UNKNOWN_S
    process.at = "compiling", 1  # the last batch has another size, or a worker was replaced
    assert pace.limit_s(process, 1) == FIRST_S
