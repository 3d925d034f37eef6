"""Every group of ranks keeps the promises of `comm/base.py`: threads, processes, and one alone."""

import itertools
import os
import threading
from functools import partial

import pytest
import torch

from helpers import run_processes
from instep.comm.alone import AloneComm
from instep.comm.memory import MemoryComm, _Room, run_ranks
from instep.comm.over_hosts import over_hosts
from instep.comm.staged import StagedComm
from instep.comm.torch_comm import LOOPBACK, TorchComm
from instep.errors import PeerError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
GROUPS = [
    ("alone", 1),
    *(("threads", 1), ("threads", 3), ("threads of two hosts", 4)),
    *(("processes", 2), ("processes", 3), ("processes of two hosts", 4)),
    *(("processes apart", 3), ("threads with GPUs", 3), ("processes of which one has a GPU", 3)),
]


def what_a_rank_sees(comm):
    """One rank's view of every promise, as plain numbers."""
    seen = {"rank": comm.rank, "size": comm.size}
    for dtype in DTYPES:
        tensor = torch.arange(5, dtype=dtype) + comm.rank
        comm.all_reduce(tensor).wait()
        seen[f"sum of {dtype}"] = tensor.to(torch.float64).tolist()
    own = torch.randn(1000, generator=torch.Generator().manual_seed(comm.rank))
    comm.all_reduce(own).wait()
    seen["bits"] = own.numpy().tobytes()
    several = [torch.full((3,), float(10 * n + comm.rank)) for n in range(6)]
    works = [comm.all_reduce(tensor) for tensor in several]
    for work in reversed(works):
        work.wait()
        work.wait()
    seen["several"] = [tensor.tolist() for tensor in several]
    whole = torch.ones(6)
    comm.all_reduce(whole[2:4]).wait()
    seen["slice"] = whole.tolist()
    seen["told"] = []
    for root in range(comm.size):
        word = torch.full((2, 2), float(comm.rank))
        comm.broadcast(word, root)
        seen["told"].append(word.tolist())
    seen |= what_it_collects(comm) | what_it_is_sent(comm)
    comm.close()
    comm.close()
    return seen


MOVED = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool]
LENGTHS = [0, 1, 7, 5000, 20_000]


def part_of(rank, to, n, dtype):
    """What rank `rank` has for rank `to`: [n] that no other pair has, as far as the type allows."""
    return ((torch.arange(n) * 7 + 31 * rank + 3 * to) % 120).to(dtype)


def parts_of(rank, size, n, dtype):
    return torch.cat([part_of(rank, to, n, dtype) for to in range(size)])


def what_it_collects(comm):
    """Whether each of these calls, several under way, gave what was wanted and read only."""
    seen, under_way = {}, []
    for n in LENGTHS:
        for dtype in MOVED:
            size, rank = comm.size, comm.rank
            for name, out, own in (
                ("all_gather", size * n, part_of(rank, 0, n, dtype)),
                ("all_to_all", size * n, parts_of(rank, size, n, dtype)),
                ("reduce_scatter", n, parts_of(rank, size, n, dtype)),
            ):
                if name == "reduce_scatter" and dtype in (torch.bool, torch.uint8):
                    continue
                out = torch.full((out,), 1).to(dtype)
                work = getattr(comm, name)(out, own)
                under_way.append((f"{name} {n} {dtype}", work, out, own, own.clone()))
    for key, work, out, own, before in reversed(under_way):
        work.wait()
        work.wait()
        seen[key] = out.to(torch.float64).tolist(), torch.equal(own, before)
    parts = torch.randn(comm.size, 1000, generator=torch.Generator().manual_seed(comm.rank))
    out = torch.empty(1000)
    comm.reduce_scatter(out, parts.view(-1)).wait()
    seen["order"] = out.numpy().tobytes()
    return seen


def what_it_is_sent(comm):
    """Each pair by itself, both ways at once, two messages each; nobody else takes part."""
    seen = {}
    for one in range(comm.size):
        for other in range(one + 1, comm.size):
            if comm.rank not in (one, other):
                continue
            peer = one + other - comm.rank
            got = [torch.zeros(n, dtype=torch.int64) for n in (3, 5000)]
            coming = [comm.receive(tensor, peer) for tensor in got]
            going = [
                comm.send(part_of(comm.rank, peer, n, torch.int64) + n, peer) for n in (3, 5000)
            ]
            for work in (*reversed(coming), *going):
                work.wait()
                work.wait()
            seen[f"from {peer}"] = [tensor.tolist() for tensor in got]
    return seen


class Rooms:
    """Makes groups of some of the threads of a group."""

    def __init__(self):
        self._lock, self._rooms = threading.Lock(), {}

    def __call__(self, comm, ranks, name):
        with self._lock:
            room = self._rooms.setdefault(name, _Room(len(ranks)))
        return MemoryComm(room, ranks.index(comm.rank))


class Stores:
    """Makes groups of some of the processes of a group."""

    def __init__(self, folder, address=LOOPBACK):
        self._folder, self._address = folder, address

    def __call__(self, comm, ranks, name):
        store = torch.distributed.FileStore(str(self._folder / name), len(ranks))
        return TorchComm(store, ranks.index(comm.rank), len(ranks), address=self._address)


def over_two_hosts(comm, body, make):
    among = partial(make, comm)
    return body(over_hosts(comm, str(comm.rank % 2), among, least=0))


def at_an_address(comm, body, make):
    """As ranks of several hosts are; this machine has all of 127.0.0.0/8."""
    return body(make(comm, range(comm.size), "apart"))


def by_host_memory(comm, body, ranks):
    """As some ranks with GPUs are among others; here their tensors are in host memory too."""
    return body(StagedComm(comm) if comm.rank in ranks else comm)


def in_group(kind, size, body, folder):
    if kind == "alone":
        return [body(AloneComm())]
    if kind == "threads of two hosts":
        return run_ranks(size, over_two_hosts, body, Rooms())
    if kind == "processes of two hosts":
        return run_processes(size, over_two_hosts, folder, body, Stores(folder))
    if kind == "processes apart":
        return run_processes(size, at_an_address, folder, body, Stores(folder, "127.0.0.2"))
    if kind == "threads with GPUs":
        return run_ranks(size, by_host_memory, body, range(size))
    if kind == "processes of which one has a GPU":
        return run_processes(size, by_host_memory, folder, body, [1])
    return run_ranks(size, body) if kind == "threads" else run_processes(size, body, folder)


@pytest.fixture(scope="module", params=GROUPS, ids=lambda group: f"{group[1]} {group[0]}")
def seen(request, tmp_path_factory):
    return in_group(*request.param, what_a_rank_sees, tmp_path_factory.mktemp("group"))


@pytest.mark.process
def test_ranks_are_numbered_from_zero_and_know_how_many_they_are(seen):
    assert [(one["rank"], one["size"]) for one in seen] == [
        (n, len(seen)) for n in range(len(seen))
    ]


@pytest.mark.process
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_gives_every_rank_the_sum_in_every_type(seen, dtype):
    size = len(seen)
    expected = [float(size * n + sum(range(size))) for n in range(5)]
    assert [one[f"sum of {dtype}"] for one in seen] == [expected] * size


@pytest.mark.process
def test_after_all_reduce_every_rank_holds_the_same_bits(seen):
    assert len({one["bits"] for one in seen}) == 1


@pytest.mark.process
def test_several_sums_may_be_under_way_and_be_waited_for_in_any_order_and_twice(seen):
    size = len(seen)
    expected = [[float(10 * n * size + sum(range(size)))] * 3 for n in range(6)]
    assert all(one["several"] == expected for one in seen)


@pytest.mark.process
def test_a_sum_of_part_of_a_tensor_leaves_the_rest_alone(seen):
    size = float(len(seen))
    assert all(one["slice"] == [1, 1, size, size, 1, 1] for one in seen)


@pytest.mark.process
def test_broadcast_gives_every_rank_the_tensor_of_the_root(seen):
    expected = [[[float(root)] * 2] * 2 for root in range(len(seen))]
    assert all(one["told"] == expected for one in seen)


@pytest.mark.process
@pytest.mark.parametrize("dtype", MOVED, ids=str)
def test_parts_are_gathered_dealt_and_summed_in_every_type_and_only_read(seen, dtype):
    size = len(seen)
    for (rank, one), n in itertools.product(enumerate(seen), LENGTHS):
        gathered = torch.cat([part_of(other, 0, n, dtype) for other in range(size)])
        dealt = [part_of(other, rank, n, dtype) for other in range(size)]
        assert one[f"all_gather {n} {dtype}"] == (gathered.double().tolist(), True)
        assert one[f"all_to_all {n} {dtype}"] == (torch.cat(dealt).double().tolist(), True)
        if dtype not in (torch.bool, torch.uint8):
            total = sum(dealt).double().tolist()
            assert one[f"reduce_scatter {n} {dtype}"] == (total, True)


@pytest.mark.process
def test_reduce_scatter_adds_up_in_rank_order(seen):
    size = len(seen)
    parts = [
        torch.randn(size, 1000, generator=torch.Generator().manual_seed(rank))
        for rank in range(size)
    ]
    for rank, one in enumerate(seen):
        total = parts[0][rank].clone()
        for part in parts[1:]:
            total += part[rank]
        assert one["order"] == total.numpy().tobytes()


@pytest.mark.process
def test_messages_between_two_ranks_arrive_in_order_and_need_no_third(seen):
    for rank, one in enumerate(seen):
        for other in range(len(seen)):
            if other != rank:
                wanted = [(part_of(other, rank, n, torch.int64) + n).tolist() for n in (3, 5000)]
                assert one[f"from {other}"] == wanted


def calls(comm, n):
    """Each call by name, as this rank makes it: rank 1 is in all of them."""
    many, few = torch.ones(comm.size * n), torch.ones(n)
    return {
        "all_reduce": lambda: comm.all_reduce(few),
        "reduce_scatter": lambda: comm.reduce_scatter(few, many),
        "all_gather": lambda: comm.all_gather(many, few),
        "all_to_all": lambda: comm.all_to_all(torch.empty_like(many), many),
        "send": lambda: comm.receive(few, 0) if comm.rank == 1 else comm.send(few, 1),
        "receive": lambda: comm.send(few, 0) if comm.rank == 1 else comm.receive(few, 1),
    }


CALLS = list(calls(AloneComm(), 1))


def survivor_of(comm, name, die):
    """Rank 1 dies within a call; what the others see of it, by class and text."""
    if comm.rank == 2 and name == "receive":
        return None  # rank 1 sends to rank 0 alone
    calls(comm, 4)[name]().wait()
    call = calls(comm, 200_000)[name]
    if comm.rank == 1:
        call()
        die()
    try:
        for _ in range(100):  # a message may leave before it is known that nobody will read it
            call().wait()
    except PeerError as error:
        comm.close()  # as workers do: whoever waits for this rank and not for rank 1 is woken by it
        return type(error).__name__, str(error)
    return "nothing", ""


class Died(Exception):
    """What a thread can do in place of dying."""


def raise_died():
    raise Died


def exit_without_a_word():
    os._exit(9)


@pytest.mark.parametrize("name", CALLS)
def test_a_thread_that_dies_breaks_the_calls_of_the_others_with_peer_error(name):
    seen = []

    def body(comm):
        word = survivor_of(comm, name, raise_died)
        seen.append(word)
        return word

    ranks = 2 if name in ("send", "receive") else 3
    with pytest.raises(Died):
        run_ranks(ranks, body)
    assert [word[0] for word in seen] == ["PeerError"] * (ranks - 1)


@pytest.mark.process
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *itertools.product(["processes"], CALLS),
        *itertools.product(["processes apart"], ["reduce_scatter", "all_gather", "all_to_all"]),
    ],
)
def test_a_process_that_dies_breaks_the_calls_of_the_others_with_peer_error(tmp_path, kind, name):
    ranks = 2 if name in ("send", "receive") else 3
    body = partial(survivor_of, name=name, die=exit_without_a_word)
    first, dead, *others = in_group(kind, ranks, body, tmp_path)
    assert dead is None
    for word, text in (first, *others):
        assert word == "PeerError"
        assert "another worker went away in the middle of a collective" in text


def left_by(comm, way):
    """Ranks 0 and 2 wait for rank 1, which leaves without a word and stays alive."""
    ready = torch.zeros(1)
    if comm.rank == 1:
        for other in (0, 2):
            comm.receive(ready, other).wait()
        pending = comm.receive(ready, 2)  # which holds on to the group in gloo
        getattr(comm, way)()
        return "left" if pending else "nothing"
    comm.send(ready, 1).wait()
    try:
        comm.receive(ready, 1).wait()
    except PeerError:
        return "PeerError"
    return "nothing"


@pytest.mark.process
@pytest.mark.parametrize("way", ["close", "interrupt"])
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_message_from_a_rank_that_leaves_raises_peer_error(kind, way, tmp_path):
    seen = in_group(kind, 3, partial(left_by, way=way), tmp_path)
    assert (seen[0], seen[2]) == ("PeerError", "PeerError")


def woken(comm):
    """A rank that waits for a message interrupts its own end from another thread."""
    if comm.rank == 0:
        work = comm.receive(torch.zeros(3), 1)
        threading.Timer(0.05, comm.interrupt).start()
        try:
            work.wait()
        except PeerError:
            return "PeerError"
    return "nothing"


@pytest.mark.process
@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_whoever_waits_for_a_message_can_be_interrupted(kind, tmp_path):
    assert in_group(kind, 2, woken, tmp_path)[0] == "PeerError"


def test_run_ranks_names_the_cause_and_not_its_echo():
    def body(comm):
        if comm.rank == 2:
            raise ValueError("rank 2 cannot")
        comm.all_reduce(torch.ones(1)).wait()

    with pytest.raises(ValueError, match="rank 2 cannot"):
        run_ranks(4, body)


def test_run_ranks_returns_in_rank_order():
    assert run_ranks(5, lambda comm, base: base + comm.rank, 100) == [100, 101, 102, 103, 104]
