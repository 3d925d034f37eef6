"""Processes that compute one micro-batch together hand out the same batch, or refuse."""

from contextlib import closing

import numpy as np
import pytest
import torch

from instep.comm.memory import run_ranks
from instep.data.loader import Loader, Slice
from instep.errors import DataError
from instep.worker.replica.same_batch import FIRST, ONE_IN, SameBatch

SLICES = [Slice(0, first, first + 10) for first in range(0, 100, 10)]
BAD = {0: {3, 40, 42}, 1: {41, 42}, 2: set()}


class Holes:
    """Some samples cannot be read."""

    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 100

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"sector {index} is gone")
        return torch.full((3,), float(index)), index % 10


class Batches(Holes):
    def batch_of(self, indices):
        rows = [self[index] for index in indices.tolist()]
        return [torch.stack([row for row, _ in rows]), torch.tensor(indices % 10)]


def handed_out(datasets, slices=SLICES, **options):
    """What each rank's loader hands out, of a dataset of its own."""

    def one(comm):
        options_ = {"seed": 5, "shuffle": False, "processes": 0, "unreadable": "skip", **options}
        workers = range(4, 4 + comm.size)
        with closing(Loader(datasets[comm.rank], **options_)) as loader:
            device = torch.device("cpu")
            loader.agree = SameBatch(comm, workers, f"tensor = {comm.size}", loader, device)
            return list(loader.read(slices))

    return run_ranks(len(datasets), one)


@pytest.mark.parametrize("kind", [Holes, Batches])
@pytest.mark.parametrize("shuffle", [False, True])
def test_what_one_cannot_read_all_leave_out(kind, shuffle):
    ranks = handed_out([kind(bad) for bad in BAD.values()], shuffle=shuffle)
    (alone,) = handed_out([kind(set.union(*BAD.values()))], shuffle=shuffle)
    for reads in ranks:
        for read, wanted in zip(reads, alone, strict=True):
            assert read.size == wanted.size
            assert all(map(torch.equal, read.batch, wanted.batch))
            assert {s for s, _ in read.skipped} == {s for s, _ in wanted.skipped}
    causes = dict(skipped for read in ranks[2] for skipped in read.skipped)
    assert causes.keys() == {3, 40, 41, 42}
    assert causes[41].startswith("OSError: sector 41 is gone")
    assert causes[41].endswith("(on worker 5)")
    assert causes[42].endswith("(on workers 4, 5)")


def test_a_batch_of_which_one_can_read_nothing_is_left_out_by_all():
    ranks = handed_out([Holes(set(range(20, 30))), Holes(set())])
    for reads in ranks:
        assert [read.size for read in reads] == [10, 10, 0, *[10] * 7]
        assert reads[2].batch is None


def test_the_next_epoch_tries_a_sample_again_that_another_could_not_read():
    class Flaky(Holes):
        def __getitem__(self, index):
            self.bad = {3} if index < 5 and self.bad else set()
            return super().__getitem__(index)

    ranks = handed_out([Flaky({3}), Holes(set())], [Slice(0, 0, 10), Slice(1, 0, 10)])
    assert [[read.size for read in reads] for reads in ranks] == [[9, 10]] * 2


@pytest.mark.parametrize("slices", [SLICES[:FIRST], [SLICES[7]] * ONE_IN], ids=["first", "later"])
def test_a_dataset_that_gives_each_something_else_is_refused_by_the_sample(slices):
    own = np.random.default_rng()
    last = len(slices) - 1

    class Own(Holes):
        reads = 0

        def __getitem__(self, index):
            self.reads += 1
            if self.reads > 10 * last and index % 10 == 4:
                return torch.full((3,), float(own.random())), 4
            return super().__getitem__(index)

    with pytest.raises(DataError) as refused:
        handed_out([Own(set()), Own(set())], slices, unreadable="stop")
    sample = 10 * last + 4 if last < 10 else 74
    assert str(refused.value).startswith(
        "workers 4, 5 compute a micro-batch together ([mesh] tensor = 2), and each has read "
        f"something else for sample {sample}: "
    )


def test_nothing_is_exchanged_in_batches_that_are_not_compared():
    calls = []

    def one(comm):
        gather = comm.all_gather
        comm.all_gather = lambda *given: calls.append(comm.rank) or gather(*given)
        with closing(Loader(Holes(set()), seed=5, shuffle=False, processes=0)) as loader:
            loader.agree = SameBatch(comm, [0, 1], "tensor = 2", loader, torch.device("cpu"))
            list(loader.read(SLICES * 20))

    run_ranks(2, one)
    assert sorted(calls) == [0] * FIRST + [1] * FIRST
