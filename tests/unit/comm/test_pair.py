"""Sums of two ranks over a connection of their own: what `test_comms.py` cannot reach."""

import socket
import struct
import threading

import pytest
import torch

from helpers import run_processes
from instep.comm.pair import LARGEST, Pair, connected
from instep.errors import PeerError


def connection(buffer_bytes=None):
    """Both ends of one, in this process; with little room on the way, if asked."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        if buffer_bytes:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    for end in (near, far):
        if buffer_bytes:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
    return near, far


@pytest.fixture
def ends():
    near, far = connection()
    yield near, far
    near.close()
    far.close()


@pytest.fixture
def pairs(ends):
    both = [Pair(end, rank) for rank, end in enumerate(ends)]
    yield both
    for pair in both:
        pair.close()


def on_both(body):
    """Run it for ranks 0 and 1 at once; what each returned."""
    found = {}
    threads = [
        threading.Thread(target=lambda rank=rank: found.update({rank: body(rank)}))
        for rank in (0, 1)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found[0], found[1]


def draws(rank, count):
    return torch.randn(count, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("room", [None, 4096])
def test_sums_of_any_size_under_way_together_are_those_of_one_machine(room):
    counts = [1, 0, 100, LARGEST // 4, 3, LARGEST // 4, LARGEST // 8]
    pairs = [Pair(end, rank) for rank, end in enumerate(connection(room))]

    def body(rank):
        tensors = [draws(rank, count) for count in counts]
        works = [pairs[rank].all_reduce(tensor) for tensor in tensors]
        for work in reversed(works):
            work.wait()
            work.wait()
        return tensors

    for summed in on_both(body):
        for count, tensor in zip(counts, summed, strict=True):
            assert torch.equal(tensor, draws(0, count) + draws(1, count))
    for pair in pairs:
        pair.close()


def test_both_ranks_have_the_same_bits_where_neither_value_is_a_number(pairs):
    payloads = [0x7FC00001, 0x7FC0BEEF]

    def body(rank):
        tensor = torch.tensor([payloads[rank]] * 9, dtype=torch.int32).view(torch.float32)
        pairs[rank].all_reduce(tensor).wait()
        return tensor.view(torch.int32).tolist()

    first, second = on_both(body)
    assert first == second


@pytest.mark.parametrize(
    "made",
    [
        lambda numbers: numbers.view(4, 6).t(),
        lambda numbers: numbers.view(4, 6)[:, ::2],
        lambda numbers: numbers.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda numbers: torch.view_as_complex(numbers.double().view(12, 2)),
        lambda numbers: numbers.to(torch.bfloat16)[3:],
        lambda numbers: numbers[0],
    ],
)
def test_tensors_may_lie_in_any_order_and_be_of_any_type(pairs, made):
    def body(rank):
        tensor = made(draws(rank, 24))
        for _ in range(2):
            pairs[rank].all_reduce(tensor).wait()
        return tensor

    wanted = made(draws(0, 24)) + made(draws(1, 24))
    for summed in on_both(body):
        assert torch.equal(summed, wanted + wanted)


def test_what_is_sent_is_no_sum_though_the_other_rank_has_sent_all_of_its_own():
    """The other rank reads only after it has sent; there is little room on the way."""
    near, far = connection(4096)
    pair, count = Pair(near, 0), LARGEST // 4
    own, other = draws(0, count), draws(1, count)
    begun = []
    thread = threading.Thread(target=lambda: begun.append(pair.all_reduce(own.clone())))
    thread.start()
    far.sendall(struct.pack("=Q", other.nbytes) + other.numpy().tobytes())
    with far.makefile("rb") as file:
        got = file.read(8 + own.nbytes)
    thread.join()
    begun[0].wait()
    assert got[8:] == own.numpy().tobytes()
    assert torch.equal(begun[0].own, own + other)
    pair.close()
    far.close()


@pytest.mark.parametrize("sent", [0, 4, 8, 20])
def test_a_rank_that_is_gone_in_the_middle_of_a_sum_raises_peer_error(ends, sent):
    pair = Pair(ends[0], 0)
    work = pair.all_reduce(torch.ones(5))
    later = pair.all_reduce(torch.ones(5))
    ends[1].sendall((struct.pack("=Q", 20) + bytes(20))[:sent])
    ends[1].close()
    for each in (work, later):
        with pytest.raises(PeerError, match="another worker went away in the middle"):
            each.wait()
    with pytest.raises(PeerError):
        pair.all_reduce(torch.ones(LARGEST // 4)).wait()
    pair.close()
    pair.close()


@pytest.mark.parametrize("count", [3, LARGEST // 4])
def test_an_interrupt_from_another_thread_ends_a_wait(count):
    near, far = connection(4096)  # of the large one not all can be sent
    pair = Pair(near, 0)
    threading.Timer(0.05, pair.interrupt).start()
    with pytest.raises(PeerError, match="was interrupted"):
        pair.all_reduce(torch.ones(count)).wait()
    pair.close()
    far.close()


def greeted_by_strangers(comm):
    """Connect as in a group, while others call rank 0 first."""
    strangers = []

    def tell(tensor, root):
        comm.broadcast(tensor, root)
        if comm.rank == 1 and root == 0:
            strangers.extend(socket.create_connection(("127.0.0.1", int(tensor))) for _ in range(3))

    pair = connected("127.0.0.1", comm.rank, tell)
    own = torch.full((3,), 1.0 + comm.rank)
    pair.all_reduce(own).wait()
    hung_up = []
    for stranger in strangers:
        stranger.settimeout(10)
        hung_up.append(stranger.recv(1) == b"")
        stranger.close()
    pair.close()
    return own.tolist(), hung_up


@pytest.mark.process
def test_strangers_that_call_first_are_hung_up_on(tmp_path):
    first, second = run_processes(2, greeted_by_strangers, tmp_path)
    assert (first[0], second[0]) == ([3.0] * 3, [3.0] * 3)
    assert second[1] == [True] * 3


def test_two_threads_may_wait_at_once(pairs):
    first, second = pairs
    begun = [first.all_reduce(torch.ones(count)) for count in (3, 4)]
    looks, both = [], threading.Event()
    look = first._look

    def told(events):
        looks.append(threading.get_ident())
        if len(set(looks)) == 2:
            both.set()
        look(events)

    first._look = told
    failed = []

    def wait(one):
        try:
            one.wait()
        except BaseException as error:
            failed.append(error)
            both.set()

    threads = [threading.Thread(target=wait, args=(one,)) for one in begun]
    for thread in threads:
        thread.start()
    assert both.wait(60)
    for count in (3, 4):
        second.all_reduce(torch.ones(count)).wait()
    for thread in threads:
        thread.join()
    assert not failed
    assert [one.own.tolist() for one in begun] == [[2.0] * 3, [2.0] * 4]
