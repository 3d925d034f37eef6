"""Groups whose sums go by way of the hosts: what goes which way, and what a lost rank leaves."""

from threading import Lock

import pytest
import torch

from instep.comm.memory import MemoryComm, _Room, run_ranks
from instep.comm.over_hosts import OverHosts, over_hosts
from instep.errors import PeerError


class Rooms:
    """Makes groups of some ranks of a group of threads; counts what the ranks begin in each."""

    def __init__(self):
        self._lock, self.rooms = Lock(), {}

    def among(self, comm, ranks, name):
        with self._lock:
            room = self.rooms.setdefault(name, _Room(len(ranks)))
        return MemoryComm(room, list(ranks).index(comm.rank))

    def over(self, comm, machine, least=1):
        return over_hosts(comm, machine, lambda ranks, name: self.among(comm, ranks, name), least)


def drawn(rank, length):
    return torch.randint(-9, 9, (length,), generator=torch.Generator().manual_seed(rank + length))


@pytest.mark.parametrize("hosts", ["aabb", "abab", "abcabc", "aaabbb", "abbacc"])
def test_each_rank_gets_the_sum_of_all(hosts):
    rooms, lengths = Rooms(), (1, 2, 7, 100, 1001)

    def body(comm):
        group = rooms.over(comm, hosts[comm.rank])
        assert isinstance(group, OverHosts)
        tensors = [drawn(comm.rank, length) for length in lengths]
        works = [group.all_reduce(tensor) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            work.wait()
        group.close()
        return tensors

    wanted = [sum(drawn(rank, length) for rank in range(len(hosts))) for length in lengths]
    for found in run_ranks(len(hosts), body):
        assert all(torch.equal(*both) for both in zip(found, wanted, strict=True))


def test_every_rank_has_the_same_bits():
    rooms = Rooms()

    def body(comm):
        group = rooms.over(comm, "ab"[comm.rank % 2])
        own = torch.randn(1001, generator=torch.Generator().manual_seed(comm.rank))
        group.all_reduce(own).wait()
        group.close()
        return own.numpy().tobytes()

    assert len(set(run_ranks(6, body))) == 1


@pytest.mark.parametrize("hosts", ["aaaa", "abcd", "aabbb", "aab"], ids=str)
def test_unequal_hosts_single_ranks_and_one_host_keep_their_group(hosts):
    rooms = Rooms()

    def body(comm):
        return rooms.over(comm, hosts[comm.rank]) is comm

    assert all(run_ranks(len(hosts), body))
    assert not rooms.rooms


def test_small_sums_go_straight():
    rooms = Rooms()

    def body(comm):
        group = rooms.over(comm, "ab"[comm.rank % 2], least=400)
        small, large = torch.ones(99), torch.ones(100)
        for tensor in (small, large, small):
            group.all_reduce(tensor).wait()
        group.close()
        return small.tolist(), large.tolist(), group._within._calls

    for small, large, calls in run_ranks(4, body):
        assert small == [16.0] * 99
        assert large == [4.0] * 100
        assert calls == 1


@pytest.mark.parametrize("lost", range(4))
def test_where_a_rank_is_lost_every_other_learns_it_and_none_waits_on(lost):
    rooms = Rooms()

    def body(comm):
        group = rooms.over(comm, "ab"[comm.rank % 2])
        first = torch.ones(8)
        group.all_reduce(first).wait()
        if comm.rank == lost:
            group.close()
            return None
        try:
            works = [group.all_reduce(torch.ones(8)) for _ in range(4)]
            for work in works:
                work.wait()
        except PeerError:
            return first.tolist()
        finally:
            group.close()
        raise AssertionError("a sum without one of its ranks")

    found = run_ranks(4, body)
    assert found == [None if rank == lost else [4.0] * 8 for rank in range(4)]


def test_an_interrupt_ends_what_is_waited_for():
    rooms = Rooms()

    def body(comm):
        group = rooms.over(comm, "ab"[comm.rank % 2])
        if comm.rank == 3:  # it never begins the sum
            group.interrupt()
            group.close()
            return True
        with pytest.raises(PeerError):
            group.all_reduce(torch.ones(8)).wait()
        group.close()
        return True

    assert all(run_ranks(4, body))
