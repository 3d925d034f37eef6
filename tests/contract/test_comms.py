"""Every group of ranks keeps the promises of `comm/base.py`: threads, processes, and one alone."""

import os

import pytest
import torch

from helpers import run_processes
from instep.comm.alone import AloneComm
from instep.comm.memory import run_ranks
from instep.errors import PeerError

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64]
GROUPS = [("alone", 1), ("threads", 1), ("threads", 3), ("processes", 2), ("processes", 3)]


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
    comm.close()
    comm.close()
    return seen


def in_group(kind, size, body, folder):
    if kind == "alone":
        return [body(AloneComm())]
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


def survivor_of(comm, die):
    """Rank 1 dies between two sums; what the others see of it, by class and text."""
    first = comm.all_reduce(torch.ones(4))
    if comm.rank == 1:
        first.wait()
        die()
    try:
        first.wait()  # who is slow may find the group broken here already
        for _ in range(3):
            comm.all_reduce(torch.ones(200_000)).wait()
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


def test_a_thread_that_dies_breaks_the_sums_of_the_others_with_peer_error():
    seen = []

    def body(comm):
        word = survivor_of(comm, raise_died)
        seen.append(word)
        return word

    with pytest.raises(Died):
        run_ranks(3, body)
    assert [name for name, _ in seen] == ["PeerError", "PeerError"]


@pytest.mark.process
def test_a_process_that_dies_breaks_the_sums_of_the_others_with_peer_error(tmp_path):
    first, dead, last = run_processes(3, survivor_of, tmp_path, exit_without_a_word)
    assert dead is None
    for name, text in (first, last):
        assert name == "PeerError"
        assert "another worker went away in the middle of a collective" in text


def test_run_ranks_names_the_cause_and_not_its_echo():
    def body(comm):
        if comm.rank == 2:
            raise ValueError("rank 2 cannot")
        comm.all_reduce(torch.ones(1)).wait()

    with pytest.raises(ValueError, match="rank 2 cannot"):
        run_ranks(4, body)


def test_run_ranks_returns_in_rank_order():
    assert run_ranks(5, lambda comm, base: base + comm.rank, 100) == [100, 101, 102, 103, 104]
