"""Hosts of another job: when workers start on them and leave, told by the clock."""

import pytest
from test_changes import Story

from instep.comm.protocol import messages as m
from instep.control.decisions.actions import Start
from instep.control.decisions.events import HostJoined, Noticed, Scaled
from instep.control.hosts.hosts import Hosts
from instep.control.hosts.joined_hosts import LEAVE_S, LOST_S, JoinedHosts
from instep.control.hosts.worker_starts import GATHER_S, WorkerStarts
from instep.job.file import build
from instep.job.mesh import MeshSpec

JOB = build({"recipe": "a.py:f", "workers": 2, "train": {"micro_batches": 4}}, source="a test")


class Run(Story):
    """One of two workers, each on a host."""

    def __init__(self, hosts=2):
        super().__init__(2)
        self.said, self.logs, self.kept, self.seen = [], [], {}, []
        self.hosts = Hosts(hosts, self.send)
        self.starts = WorkerStarts(self.hosts, mesh=MeshSpec())
        self.placed = {0: 0, 1: 1}
        self.joined = self.another_master()
        for number in range(hosts):
            self.connect(number)

    def another_master(self):
        return JoinedHosts(
            self.hosts,
            self.starts,
            JOB,
            send=self.send,
            emit=lambda name, fields: self.logs.append((name, fields)),
            keep=self.kept.__setitem__,
        )

    def send(self, peer, message):
        self.said.append((peer, message))

    def connect(self, number):
        self.hosts.joins(f"host {number}", number, 100 + number, self.now)

    def turn(self, seconds=0.0, *, heard=()):
        """Let time pass, in which these clients are heard from; what was observed."""
        self.now += seconds
        for client in heard:
            self.joined.heartbeat(client, f"client {client}", self.now)
        self.seen.clear()
        for event in self.joined.turn(lambda: self.state, self.placed, self.now):
            self.seen.append(event)
            self.happens(event)
        return self.seen

    def add(self, count, workers):
        return self.joined.add(self.state, count, workers, self.now)

    def have(self, count, workers):
        """The same, and they connect; workers start there."""
        group = self.add(count, workers)
        for number in group.numbers:
            self.connect(number)
        (scaled,) = self.turn(0.1, heard=[group.client])
        assert scaled == Scaled(2 + workers, tuple(group.numbers))
        joined = m.HostsJoined(workers=workers, missing=[])
        assert self.said.pop() == (f"client {group.client}", joined)
        for worker, number in zip(range(2, 2 + workers), group.numbers, strict=True):
            self.placed[worker] = number
            self.come(worker)
        self.leave()
        self.form()
        return group


def test_the_run_has_more_workers_once_all_hosts_are_there_or_some_are_late():
    run = Run()
    group = run.add(2, 2)
    assert (group.numbers, group.client) == ([2, 3], 3)
    assert run.turn(0.1, heard=[3]) == []
    run.connect(2)
    for _ in range(round(GATHER_S) - 1):
        assert run.turn(1.0, heard=[3]) == []
    assert run.said == []
    assert run.turn(1.0, heard=[3]) == [Scaled(4, (2, 3))]
    assert run.said == [("client 3", m.HostsJoined(workers=2, missing=[3]))]
    assert run.turn(0.1, heard=[3]) == []
    assert run.new(Start) == [Start(2), Start(3)]


def test_their_client_is_told_once_that_none_has_connected():
    run = Run()
    run.add(2, 2)
    for _ in range(3 * round(GATHER_S)):
        assert run.turn(1.0, heard=[3]) == []
    assert run.said == [("client 3", m.HostsJoined(workers=0, missing=[2, 3]))]
    for number in (2, 3):
        run.connect(number)
    assert run.turn(0.1, heard=[3]) == [Scaled(4, (2, 3))]
    assert run.said[1:] == [("client 3", m.HostsJoined(workers=2, missing=[]))]


def test_their_client_starts_them_again_and_the_runs_own_the_others():
    run = Run()
    run.add(2, 0)
    run.turn(0.1, heard=[3])
    run.joined.ask_for([1, 3], "client 0")
    assert run.said == [
        ("client 3", m.HostWanted(numbers=[3])),
        ("client 0", m.HostWanted(numbers=[1])),
    ]


def test_they_may_go_once_their_workers_have_left():
    run = Run()
    group = run.have(1, 1)
    run.joined.leave(group.client, run.now, "a test")
    scaled, *noticed = run.turn(0.1, heard=[3])
    assert scaled == Scaled(2, (2,), frozenset({2}))
    assert noticed == [Noticed(2)]
    assert run.said == []
    del run.placed[2]
    assert run.turn(0.1, heard=[3]) == [HostJoined()]
    assert [(peer, type(message)) for peer, message in run.said] == [
        ("host 2", m.Refused),
        ("client 3", m.Leave),
    ]
    assert not run.joined.is_client(3)
    assert run.hosts.numbers.has_left(2)
    assert run.add(1, 0).numbers == [3]  # a number is used once


def test_workers_that_do_not_leave_in_time_are_lost_with_them():
    run = Run()
    group = run.have(1, 1)
    run.joined.leave(group.client, run.now, "a test")
    run.turn(LEAVE_S - 1)
    assert run.joined.is_client(3)
    run.turn(1.1)
    assert not run.joined.is_client(3)


def test_a_client_that_is_silent_has_left():
    run = Run()
    run.have(1, 1)
    assert run.turn(LOST_S - 0.1) == []
    run.joined.closed("client 3")
    run.turn(0.2)
    assert [name for name, _ in run.logs] == ["hosts_added", "hosts_leaving"]
    assert run.turn(0.1, heard=[3]) == [Noticed(2)]  # it may be back, and yet they leave


def test_another_master_knows_them():
    run = Run()
    group = run.have(1, 1)
    run.joined.leave(group.client, run.now, "a test")
    joined = run.another_master()
    joined.restore(run.kept["joined-hosts"], run.now)
    assert joined.is_client(3)
    run.joined = joined
    run.turn(0.1, heard=[3])
    del run.placed[2]
    run.turn(0.1, heard=[3])
    last = run.another_master()
    last.restore(run.kept["joined-hosts"], run.now)
    assert not last.is_client(3)


@pytest.mark.parametrize(
    ("hosts", "count", "workers", "says"),
    [
        (0, 1, 1, "this run is on one machine"),
        (2, 1, 3, "3 more than now: workers = 5: a run needs 1 or more, and this one has work"),
        (2, 0, 1, "0 hosts and 1 workers: needs 1 host or more"),
    ],
)
def test_what_cannot_be_is_refused(hosts, count, workers, says):
    run = Run(hosts)
    refusal = run.add(count, workers)
    assert refusal.startswith(says)
    assert (run.logs, run.kept) == ([], {})
