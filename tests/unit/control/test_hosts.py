"""Where workers start, whom the master gives up, and whom it waits for: told by the clock."""

import signal
from functools import cache

import pytest

from instep.comm.protocol import messages as m
from instep.control.hosts.hosts import (
    BACK_S,
    BALANCE_S,
    FIRST_HEARTBEAT_S,
    Hosts,
    RemoteProcess,
)
from instep.control.hosts.worker_starts import GATHER_S, WorkerStarts
from instep.job.mesh import MeshSpec
from instep.system.limits import FLOOR_S


@cache
def peer(number):
    """A host's connection: the same object for the same number."""
    return f"peer {number}"


class Table:
    """Hosts by number, and what was said to each; a host is its own connection."""

    def __init__(self, count, **mesh):
        self.said = []
        self.hosts = Hosts(count, lambda peer, message: self.said.append((peer, message)))
        self.starting = WorkerStarts(self.hosts, mesh=MeshSpec(**mesh))
        self.now = 100.0
        self.hosts.turn(self.now)

    def come(self, *numbers):
        for number in numbers:
            self.hosts.joins(peer(number), number, 1000 + number, self.now)

    def wait(self, seconds, *speaking):
        """Let time pass, in which these hosts show that they live; who was silent for too long."""
        silent = set()
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            for number in speaking:
                self.hosts.heartbeat(number, peer(number), self.now)
            for each in self.hosts.turn(self.now):
                silent.add(each)
                self.hosts.leaves(int(each.split()[1]), each)
        return silent

    def starts(self):
        """Worker to the host that was told to start it."""
        told = [(peer, each) for peer, each in self.said if isinstance(each, m.StartWorker)]
        self.said.clear()
        return {each.number: int(peer.split()[1]) for peer, each in told}

    def start(self, workers, placed=(), of=0):
        """Have workers started; `placed` are the hosts of those that are there, by number."""
        for worker in workers:
            self.starting.start(worker, "log", dict(enumerate(placed)), of=of)


@pytest.fixture
def three():
    table = Table(3)
    table.come(0, 1, 2)
    table.wait(BACK_S + 0.2, 0, 1, 2)
    return table


def test_the_first_workers_wait_for_all_hosts_but_not_for_ever():
    table = Table(3)
    table.come(0, 1)
    table.start(range(4))
    assert table.starts() == {}
    table.wait(GATHER_S - 1, 0, 1)
    assert not table.starting.ready(table.now)
    table.wait(1.2, 0, 1)
    assert table.starting.ready(table.now)
    table.start(range(4))
    assert table.starts() == {0: 0, 1: 1, 2: 0, 3: 1}


def test_workers_start_where_the_fewest_are_and_only_once(three):
    three.start(range(5))
    assert three.starts() == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1}
    three.start(range(5))
    assert three.starts() == {}
    assert three.starting.started(4, 1)
    three.start([5], placed=[0, 1, 2, 0, 1])
    assert three.starts() == {5: 2}


def test_hosts_that_come_get_workers_and_those_that_retire_lose_them(three):
    three.hosts.numbers.add([3])
    assert three.hosts.missing == [3]
    three.come(3)
    three.wait(BALANCE_S + 0.2, 0, 1, 2, 3)
    assert three.hosts.missing == []
    three.start([4], placed=[0, 1, 2, 0])
    assert three.starts() == {4: 3}
    assert three.starting.hosts == {3}
    assert three.starting.started(4, 3)
    three.hosts.numbers.retire([3])
    three.start([5], placed=[0, 1, 2, 0])
    assert three.starts() == {5: 1}
    assert not three.hosts.numbers.has_left(3)
    assert three.hosts.remove([3]) == [peer(3)]
    assert three.hosts.numbers.has_left(3)
    assert not three.hosts.leaves(3, peer(3))
    assert three.hosts.missing == []
    assert three.starting.crowded({0: 0, 1: 1, 2: 2}) is None


def test_a_process_with_memory_starts_on_the_host_that_has_it_while_that_one_lives(three):
    placed = {0: 0, 1: 1, 2: 1, 5: 1}
    three.starting.start(3, "log", placed, "server", home=1)
    three.starting.start(4, "log", placed)
    assert three.starts() == {3: 1, 4: 2}
    three.starting.started(3, 1)
    three.wait(FLOOR_S + 0.2, 0, 2)
    three.starting.start(3, "log", {0: 0, 1: 2}, "server", home=1)
    assert three.starts()[3] == 0


@pytest.mark.parametrize(
    ("hosts", "workers", "mesh", "places"),
    [
        (2, 4, {"tensor": 2}, [0, 0, 1, 1]),
        (2, 4, {"shard": 2}, [0, 0, 1, 1]),
        (2, 4, {"stages": 2}, [0, 0, 1, 1]),
        (2, 8, {"tensor": 2, "shard": 2}, [0, 0, 0, 0, 1, 1, 1, 1]),
        (2, 6, {"tensor": 2}, [0, 0, 1, 1, 0, 0]),
        (2, 8, {"tensor": 2}, [0, 0, 1, 1, 0, 0, 1, 1]),
        (3, 4, {"shard": 2}, [0, 0, 1, 1]),
        (2, 4, {"shard": 4}, [0, 0, 1, 1]),  # a replica that is larger than its part of a host
        (2, 4, {"tensor": 2, "shard": 2}, [0, 0, 1, 1]),
        (2, 8, {"tensor": 2, "shard": 4}, [0, 0, 0, 0, 1, 1, 1, 1]),
        (3, 6, {"tensor": 2, "stages": 3}, [0, 0, 1, 1, 2, 2]),
        (2, 6, {"shard": 3, "tensor": 2}, [0, 0, 1, 1, 0, 0]),
        (2, 2, {"shard": 2}, [0, 1]),
        (2, 2, {"tensor": 2}, [0, 0]),
        (4, 4, {"tensor": 2, "stages": 2}, [0, 0, 1, 1]),
    ],
    ids=str,
)
def test_a_replica_starts_on_one_host_or_else_in_parts_that_keep_its_tensor_ranks_together(
    hosts, workers, mesh, places
):
    table = Table(hosts, **mesh)
    table.come(*range(hosts))
    table.start(range(workers), of=workers)
    assert table.starts() == dict(enumerate(places))


def test_a_process_of_a_replica_starts_where_the_others_are_and_with_them_elsewhere():
    table = Table(2, tensor=2)
    table.come(0, 1)
    table.wait(1.0, 0, 1)
    table.starting.start(1, "log", {0: 1, 2: 0, 3: 1}, of=4)
    assert table.starts() == {1: 1}
    table.starting.started(1, 1)
    table.wait(FLOOR_S + 0.2, 0)
    table.start([0, 1], of=4)
    assert table.starts() == {0: 0, 1: 0}


def test_servers_are_spread_over_hosts_as_workers_are(three):
    three.start(range(4))
    for server in (4, 5):
        three.starting.start(server, "log", {}, "server")
    assert three.starts() == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}


def test_a_silent_host_is_reported_once_and_starts_nothing(three):
    assert three.wait(0.7, 0, 1) == set()
    three.start([0, 1, 2])
    assert set(three.starts().values()) == {0, 1}
    assert three.wait(FLOOR_S, 0, 1) == {"peer 2"}
    assert three.hosts.missing == [2]


def test_another_host_starts_what_a_lost_one_was_to_start(three):
    three.start([0, 1, 2])
    assert three.starts()[2] == 2
    three.wait(FLOOR_S + 0.2, 0, 1)
    three.start([0, 1, 2])
    assert three.starts() == {2: 0}
    assert not three.starting.started(2, 2)  # the lost host's word no longer counts
    assert three.starting.started(2, 0)


def test_a_host_that_reconnects_is_asked_again_for_what_it_was_to_start(three):
    placed = [1, 1, 1, 2, 2, 2]
    three.start([6, 7, 8], placed)
    assert three.starts() == dict.fromkeys([6, 7, 8], 0)
    assert three.hosts.joins("peer 0 again", 0, 1000, three.now) == peer(0)
    three.start([6, 7, 8], placed)
    assert three.starts() == dict.fromkeys([6, 7, 8], 0)


def test_a_host_that_has_spoken_is_not_given_time_to_import_on_its_next_connection(three):
    three.wait(FLOOR_S + 0.3, 1, 2)
    assert three.hosts.missing == [0]
    three.come(0)
    assert three.wait(FLOOR_S + 0.3, 1, 2) == {peer(0)}


def test_a_host_that_imports_what_workers_need_may_be_silent_for_long():
    table = Table(2)
    table.come(0, 1)
    assert table.wait(FIRST_HEARTBEAT_S - 1, 0) == set()
    assert table.wait(1.5, 0) == {"peer 1"}


def test_no_host_is_blamed_if_the_master_itself_did_not_run(three):
    three.now += 5.0
    assert three.hosts.turn(three.now) == []
    assert not three.hosts.is_quiet(1)


def test_on_one_machine_no_host_is_silent():
    table = Table(0)
    table.come(0)
    assert table.wait(100.0) == set()
    table.start([0, 1, 0])
    assert table.starts() == {0: 0, 1: 0}


def test_on_one_machine_a_worker_is_started_though_the_host_is_slow():
    """Nobody would ask for it again."""
    table = Table(0)
    table.come(0)
    table.wait(1.0, 0)
    assert table.wait(5.0) == set()
    assert table.hosts.is_quiet(0)
    table.start([0])
    assert table.starts() == {0: 0}


def test_a_process_of_a_silent_host_is_lost_once_its_lease_has_run_out(three):
    process = RemoteProcess(three.hosts, 2, 77)
    three.wait(FLOOR_S - 0.2, 0, 1)
    process.signal(signal.SIGKILL)
    assert not process.is_lost(three.now, FLOOR_S - 0.1)
    assert process.is_lost(three.now, FLOOR_S + 0.1)


def test_a_process_of_a_living_host_is_lost_when_the_host_says_so_or_cannot(three):
    process = RemoteProcess(three.hosts, 2, 77)
    process.signal(signal.SIGKILL)
    assert three.said == [("peer 2", m.Signal(pid=77, signals=[signal.SIGKILL]))]
    three.wait(FLOOR_S - 0.1, 0, 1, 2)
    assert not process.is_lost(three.now, 60.0)
    three.wait(0.3, 0, 1, 2)
    assert process.is_lost(three.now, 60.0)


def test_a_remote_process_counts_as_stopped_only_if_its_host_reports_it(three):
    far = RemoteProcess(three.hosts, 1, 77)
    three.hosts.heartbeat(1, peer(1), three.now, stopped=(77,))
    assert far.stopped
    assert not RemoteProcess(three.hosts, 2, 77).stopped
    three.hosts.heartbeat(1, peer(1), three.now)
    assert not far.stopped


def test_no_process_counts_as_lost_without_a_host_that_has_been_connected_for_a_while(three):
    process = RemoteProcess(three.hosts, 2, 77)
    three.wait(20.0)
    assert three.hosts.all_quiet
    process.signal(signal.SIGKILL)
    assert not process.is_lost(three.now, 20.0)
    three.come(0)
    three.wait(BACK_S - 0.2, 0)
    assert not process.is_lost(three.now, 22.0)
    three.wait(0.4, 0)
    assert process.is_lost(three.now, 22.4)


def test_an_abandoned_process_is_killed_when_its_host_reconnects(three):
    three.wait(FLOOR_S + 0.2, 0, 1)
    three.hosts.abandon(2, 77)
    assert three.said == []
    assert three.hosts.is_abandoned(2, 77)
    assert not three.hosts.is_abandoned(1, 77)
    three.come(2)
    assert three.said == [("peer 2", m.Signal(pid=77, signals=[signal.SIGKILL]))]


def test_a_worker_moves_only_where_hosts_are_uneven_and_have_been_there_for_a_while(three):
    uneven = {0: 0, 1: 0, 4: 0, 2: 1}
    assert three.starting.crowded(uneven) is None
    three.wait(BALANCE_S, 0, 1, 2)
    assert three.starting.crowded(uneven) == 4
    assert three.starting.crowded(uneven, stay={4}) == 1
    assert three.starting.crowded(uneven, stay={0, 1, 4}) is None
    assert three.starting.crowded({0: 0, 1: 0, 2: 1, 3: 2}) is None
    three.wait(0.7, 0, 1)
    assert three.starting.crowded(uneven) is None


def test_the_run_ends_with_its_hosts_only_when_all_have_ended_by_themselves(three):
    assert not three.hosts.fails(0)
    assert not three.hosts.fails(1)
    three.come(0)
    assert not three.hosts.fails(2)
    assert three.hosts.fails(0)
    assert Table(0).hosts.fails(0)


def test_a_host_process_that_reconnects_replaces_its_former_connection(three):
    hosts = three.hosts
    assert hosts.joins("peer 1 again", 1, 1001, three.now) == "peer 1"
    assert hosts.joins("its spare", 1, 5, three.now) is None
    assert not hosts.leaves(1, "peer 1 again")
    assert hosts.leaves(1, "its spare")


def test_workers_move_from_a_host_that_is_about_to_go_and_none_starts_there(three):
    placed = {0: 0, 1: 1, 2: 2, 3: 2}
    three.hosts.numbers.drain([2])
    assert three.starting.to_move(placed, stay=()) == [2, 3]
    assert three.starting.to_move(placed, stay={3}) == [2]
    three.start([4, 5], placed=[0, 0, 1, 1])
    assert three.starts() == {4: 0, 5: 1}
    three.hosts.numbers.drain([])
    assert three.starting.to_move(placed, stay=()) == []


def test_workers_stay_on_a_host_that_is_about_to_go_if_no_other_can_take_them(three):
    assert three.starting.ready(three.now)
    three.hosts.numbers.drain([0, 1, 2])
    assert three.starting.to_move({0: 0, 1: 1}, stay=()) == []
    three.hosts.numbers.drain([0])
    three.wait(FLOOR_S + 0.2, 0)
    assert three.starting.to_move({0: 0}, stay=()) == []
    three.start([1])
    assert three.starts() == {1: 0}


def test_a_host_that_is_about_to_go_is_given_back_once_it_is_empty_and_wanted_elsewhere(three):
    three.hosts.numbers.drain([2])
    assert three.hosts.give_back([0, 1, 2], workers=3) is None
    assert three.hosts.give_back([0, 1], workers=3) == 2
    assert not three.hosts.leaves(2, peer(2))  # its end is no loss
    assert three.hosts.missing == []
    three.hosts.numbers.take_again(3)
    assert three.hosts.missing == [2]
    assert three.hosts.give_back([0, 1], workers=3) is None


def test_all_hosts_have_failed_once_those_have_that_were_not_given_back(three):
    three.hosts.numbers.drain([2])
    assert three.hosts.give_back([0, 1], workers=3) == 2
    assert not three.hosts.fails(0)
    assert three.hosts.fails(1)


def test_hosts_that_are_too_many_are_given_back_after_a_while_and_taken_again(three):
    assert three.hosts.give_back([1], workers=1) is None
    three.wait(BALANCE_S, 0, 1, 2)
    assert three.hosts.give_back([0, 1], workers=3) is None
    assert three.hosts.give_back([1], workers=1) == 2
    assert three.hosts.give_back([1], workers=1) == 0
    assert three.hosts.give_back([1], workers=1) is None
    three.hosts.numbers.take_again(1)
    assert three.hosts.missing == []
    three.hosts.numbers.take_again(2)
    assert three.hosts.missing == [0]
    three.come(0)
    three.hosts.numbers.take_again(4)
    assert three.hosts.missing == [2]


def test_a_host_that_was_asked_to_start_a_worker_is_not_given_back(three):
    three.wait(BALANCE_S, 0, 1, 2)
    three.start([1], placed=[0])
    assert three.starts() == {1: 1}
    used = {0, *three.starting.hosts}
    assert three.hosts.give_back(used, workers=1) == 2
    assert three.hosts.give_back(used, workers=1) is None


def test_workers_start_where_they_have_places_and_nobody_waits_for_other_hosts():
    table = Table(3)
    table.hosts.numbers.place({0: 1, 2: 2})
    table.come(0, 2)  # nobody waits for host 1
    table.start(range(4))
    assert table.starts() == {0: 0, 1: 2, 2: 2}  # there is no room for the fourth
    table.hosts.numbers.place({0: 2, 2: 2})
    table.start([3], [0, 2, 2])
    assert table.starts() == {3: 0}


def test_workers_beyond_the_places_of_their_host_move_as_far_as_others_have_room(three):
    placed = dict(enumerate([0, 0, 1, 1]))
    three.hosts.numbers.place({0: 2, 1: 2})
    assert three.starting.to_move(placed, stay=()) == []
    assert three.starting.crowded({0: 0, 1: 0, 2: 0}) is None, "places say how many, not balance"
    three.hosts.numbers.place({0: 1, 2: 2})
    assert three.starting.beyond(placed) == [1, 2, 3]
    assert three.starting.to_move(placed, stay=()) == [1, 2]
    assert three.hosts.give_back(used={0, 2}, workers=4) == 1
    assert three.hosts.missing == []
    three.hosts.numbers.place({0: 2, 1: 2})
    assert three.hosts.missing == [1], "a host that was given back is wanted again"
