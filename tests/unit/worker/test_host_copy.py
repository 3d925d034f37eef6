"""Which commit the processes of a replica find in memory of their host."""

import os

import pytest
import torch

from instep.comm.memory import run_ranks
from instep.records import Attempt
from instep.state.snapshot import Snapshot
from instep.system import host_memory
from instep.worker.step.host_copy import HostCopy

CPU = torch.device("cpu")


def snapshot(step):
    return Snapshot(step=step, tensors={"own": {"a": torch.full((5,), float(step))}}, facts={})


@pytest.fixture
def files():
    """A memory file for each of two ranks, which a fork server keeps."""
    files = [os.memfd_create(f"rank-{rank}") for rank in range(2)]
    yield files
    for file in files:
        os.close(file)


def copies_of(files, monkeypatch):
    """One for each rank, as new processes have them."""
    found = []
    for file in files:
        monkeypatch.setattr(host_memory, "_given", file)
        found.append(HostCopy())
    return found


def left(copies):
    """What each rank finds: the commit, and the values of its tensor."""
    found = run_ranks(2, lambda comm: copies[comm.rank].of_all(comm, CPU))
    return [
        one and (one[0], one[1].step, set(one[1].tensors["own"]["a"].tolist())) for one in found
    ]


def keep(copy, number, generation=1):
    copy.keep(snapshot(number), Attempt(0, number, generation))


def test_all_ranks_take_the_newest_commit_of_which_all_have_a_copy(files, monkeypatch):
    first, second = copies_of(files, monkeypatch)
    for number in (1, 2, 3):
        keep(first, number)
        keep(second, number)
    assert left(copies_of(files, monkeypatch)) == 2 * [(Attempt(0, 3, 1), 3, {3.0})]
    keep(first, 4)  # the second is killed before
    for _ in range(2):  # and again before the next commit
        assert left(copies_of(files, monkeypatch)) == 2 * [(Attempt(0, 3, 1), 3, {3.0})]


def test_a_copy_that_was_forgotten_never_counts_again(files, monkeypatch):
    """Another attempt at its commit may have given other values."""
    first, second = copies_of(files, monkeypatch)
    for number in (1, 2):
        keep(first, number)
        keep(second, number)
    keep(first, 3)
    first, second = copies_of(files, monkeypatch)
    assert left([first, second])[0][1] == 2
    keep(first, 3, generation=2)
    assert left(copies_of(files, monkeypatch))[1][1] == 2
    first, second = copies_of(files, monkeypatch)
    keep(first, 3, generation=3)
    keep(second, 3, generation=3)
    assert left(copies_of(files, monkeypatch)) == 2 * [(Attempt(0, 3, 3), 3, {3.0})]


def test_without_a_common_commit_there_is_none(files, monkeypatch):
    first, second = copies_of(files, monkeypatch)
    assert left([first, second]) == [None, None]
    keep(first, 1)
    assert left(copies_of(files, monkeypatch)) == [None, None]
    keep(second, 2)
    assert left(copies_of(files, monkeypatch)) == [None, None]
