"""An unreadable sample is skipped or ends the run, as set, however samples are read."""

import time
from contextlib import closing

import numpy as np
import pytest
import torch
from datasets import Drawing, Many, Plain, augment, same

from instep.data.loader import Loader, Read, Skipped, Slice
from instep.data.order import Order
from instep.errors import DataError

BAD = (3, 40, 41, 42, 70)
SLICES = [Slice(0, first, first + 10) for first in range(0, 100, 10)]
LEFT_OUT = {0: [3], 4: [40, 41, 42], 7: [70]}


def holes(kind, bad=BAD):
    """A dataset of this kind that cannot read some of its samples, alone or among others."""

    class Holes(kind):
        def __getitem__(self, index):
            if index in bad:
                raise OSError(f"sector {index} is gone")
            return super().__getitem__(index)

    return Holes()


class Batches(Plain):
    """Gives whole batches."""

    def batch_of(self, indices):
        samples = [self[index] for index in indices.tolist()]
        return [torch.stack([inputs for inputs, _ in samples]), torch.tensor(indices % 10)]


class OnlyMany:
    """Cannot be asked for one sample."""

    def __len__(self):
        return 100

    def __getitems__(self, indices):
        if set(indices) & set(BAD):
            raise OSError(f"sector {min(set(indices) & set(BAD))} is gone")
        return [Plain()[index] for index in indices]


class Waiting(Plain):
    """Too slow to be read inside the step."""

    def __getitem__(self, index):
        time.sleep(0.001)
        return super().__getitem__(index)


KINDS = {
    "one by one": holes(Plain),
    "slow": holes(Waiting),
    "many at once": holes(Many),
    "only many": OnlyMany(),
    "whole batches": holes(Batches),
    "drawing": holes(Drawing),
}


def reads(dataset, slices=SLICES, **options):
    options = {"seed": 5, "shuffle": False, "unreadable": "skip", **options}
    with closing(Loader(dataset, **options)) as loader:
        return list(loader.read(slices))


@pytest.mark.grid
@pytest.mark.parametrize("processes", [0, 2, "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_each_way_of_reading_leaves_out_the_same_samples_and_names_them(kind, processes):
    got = reads(KINDS[kind], processes=processes)
    for number, read in enumerate(got):
        missing = LEFT_OUT.get(number, [])
        assert [sample for sample, _ in read.skipped] == missing
        assert read.size == 10 - len(missing) == len(read.batch[0])
        kept = [n for n in range(10 * number, 10 * number + 10) if n not in missing]
        assert read.batch[1].tolist() == [index % 10 for index in kept]
        if kind != "drawing":
            assert read.batch[0][:, 0].tolist() == kept
        for _, cause in read.skipped:
            assert "OSError: sector" in cause
            assert "test_unreadable.py:" in cause


@pytest.mark.grid
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slice_is_read_without_samples_that_could_be_read(kind, processes):
    options = {"seed": 5, "shuffle": False, "unreadable": "skip", "processes": processes}
    with closing(Loader(KINDS[kind], **options)) as loader:
        reads = loader.read(SLICES)
        first = [next(reads), next(reads)]
        less = loader.read_without(SLICES[2], [Skipped(25, "cause"), Skipped(28, "cause")])
        rest = list(reads)
        again = list(loader.read(SLICES[2:3]))
    assert less.skipped == (Skipped(25, "cause"), Skipped(28, "cause"))
    assert less.batch[1].tolist() == [0, 1, 2, 3, 4, 6, 7, 9]
    assert [read.size for read in [*first, *rest, *again]] == [
        9,
        10,
        10,
        10,
        7,
        10,
        10,
        9,
        *[10] * 3,
    ]


@pytest.mark.parametrize("kind", [Plain, Many, Drawing])
def test_the_others_have_the_values_that_they_have_without_a_fault(kind):
    options = {"shuffle": True, "augment": augment, "processes": 0}
    order = Order(100, 5)
    full, got = reads(kind(), **options), reads(holes(kind), **options)
    for part, whole, read in zip(SLICES, full, got, strict=True):
        kept = ~np.isin(order.indices(*part), BAD)
        assert torch.equal(read.batch[0], whole.batch[0][torch.from_numpy(kept)])


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_by_default_the_first_sample_that_cannot_be_read_is_an_error_with_the_remedy(
    kind, processes
):
    message = r"sample 3 cannot be read: OSError: sector 3 .* set data.unreadable = 'skip'"
    with pytest.raises(DataError, match=message):
        reads(KINDS[kind], SLICES[:1], processes=processes, unreadable="stop")


class Flaky(Plain):
    """A store that fails now and then: `fails` times for each sample, in each process."""

    def __init__(self, fails):
        super().__init__()
        self.fails, self.reads = fails, {}

    def __getitem__(self, index):
        self.reads[index] = self.reads.get(index, 0) + 1
        if self.reads[index] <= self.fails:
            raise TimeoutError("the store is busy")
        return super().__getitem__(index)


class FlakyMany(Flaky, Many):
    pass


@pytest.mark.grid(3)
@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("kind", [Flaky, FlakyMany])
@pytest.mark.parametrize("unreadable", ["stop", "skip"])
def test_a_store_that_fails_twice_for_every_sample_costs_nothing_but_time(
    unreadable, kind, processes
):
    got = reads(kind(2), SLICES[:3], processes=processes, unreadable=unreadable)
    assert not any(read.skipped for read in got)
    assert same([read.batch for read in got], [read.batch for read in reads(Plain(), SLICES[:3])])


def test_a_sample_that_fails_at_the_third_attempt_too_cannot_be_read():
    with closing(Loader(Plain(), seed=5, shuffle=False, processes=0, unreadable="skip")) as loader:
        loader._fetch.dataset = dataset = Flaky(10**9)
        (read,) = loader.read(SLICES[:1])
    assert read.size == 0
    assert set(dataset.reads.values()) == {3}


@pytest.mark.grid(3)
@pytest.mark.parametrize("processes", [0, 2, "auto"])
@pytest.mark.parametrize("kind", [Plain, Many, Batches, Waiting])
def test_a_slice_of_which_nothing_can_be_read_has_no_batch(kind, processes):
    first, second = reads(holes(kind, bad=range(10)), SLICES[:2], processes=processes)
    assert first[:2] == (None, 0)
    assert [sample for sample, _ in first.skipped] == list(range(10))
    assert (second.size, second.skipped) == (10, ())
    assert reads(Plain(), [Slice(0, 7, 7)]) == [Read(None, 0)]


def test_many_that_can_be_read_alone_but_not_together_are_an_error_and_not_left_out():
    class Together(Plain):
        def __getitems__(self, indices):
            if len(indices) > 1:
                raise MemoryError("too many at once")
            return [self[indices[0]]]

    with pytest.raises(DataError, match=r"samples 0, 1, 2, 3, 4, 5 and 4 more cannot be read tog"):
        reads(Together(), SLICES[:1], processes=0)


def test_samples_are_left_out_of_a_shuffled_order_by_their_index_not_their_position():
    got = reads(holes(Plain), shuffle=True, processes=0)
    assert sorted(sample for read in got for sample, _ in read.skipped) == sorted(BAD)
    kept = np.concatenate([read.batch[0][:, 0].numpy() for read in got])
    assert sorted(kept) == [index for index in range(100) if index not in BAD]
