"""Micro-batches come from parts of a dataset, by a rule that knows nothing of hosts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch import arange
from torch.utils.data import Dataset, Subset, TensorDataset

from instep import spec_file
from instep.data.loader import Loader
from instep.data.order import micro_batch, position, steps_in_epoch
from instep.data.parts.cut import cut, part_bounds, parts_order
from instep.data.parts.order import PartsOrder
from instep.data.torch_loader import LoaderParts
from instep.errors import DataError, SpecError

few = settings(max_examples=40, deadline=None)
SIZES = some.lists(some.integers(0, 40), min_size=1, max_size=12).filter(sum)


class Sharded(Dataset):
    """Samples are their own numbers."""

    def __init__(self, shard_sizes):
        self.shard_sizes = shard_sizes

    def __len__(self):
        return sum(self.shard_sizes)

    def __getitem__(self, index):
        return index


def job(**data):
    table = {"recipe": "a.py:f", "train": {"global_batch": 12, "micro_batches": 4}}
    return spec_file.build({**table, "data": {"order": "windowed", **data}}, source="a test")


@few
@given(
    sizes=SIZES,
    parts=some.integers(1, 6),
    window=some.integers(1, 100),
    batch=some.integers(1, 30),
    lanes=some.integers(1, 9),
    data=some.data(),
)
def test_an_epoch_has_every_sample_once_and_each_micro_batch_is_of_one_part(
    sizes, parts, window, batch, lanes, data
):
    assume(parts <= len(sizes) and lanes <= batch)
    bounds, samples = cut(np.array(sizes), parts), sum(sizes)
    order = PartsOrder(sizes, bounds, window, 7, batch=batch, lanes=lanes)
    whole = order.indices(3, 0, samples)
    assert sorted(whole.tolist()) == list(range(samples))
    cuts = sorted(data.draw(some.sets(some.integers(1, samples), max_size=4)))
    again = [order.indices(3, *pair) for pair in pairwise([0, *cuts, samples])]
    assert np.array_equal(np.concatenate(again), whole)
    ends = np.cumsum(sizes)[np.array(bounds[1:]) - 1]
    part_of = np.searchsorted(ends, whole, side="right")
    assert np.array_equal(order.parts_at(np.arange(samples)), part_of)
    crossing = 0
    for step in range(1, samples // batch + 1):  # whole ones: the last has other micro-batches
        where = position(step, samples, batch)
        for number in range(lanes):
            first, stop = micro_batch(where.first, where.stop, number, lanes)
            crossing += len(set(part_of[first:stop])) > 1
    assert crossing < parts  # at each border once in an epoch


def test_each_epoch_mixes_a_part_otherwise_and_seeds_differ():
    order = PartsOrder([50] * 8, [0, 4, 8], 80, 1, batch=20, lanes=4)
    other = PartsOrder([50] * 8, [0, 4, 8], 80, 2, batch=20, lanes=4)
    taken = [tuple(each.indices(epoch, 0, 400)) for each in (order, other) for epoch in (0, 1)]
    assert len(set(taken)) == 4
    firsts = {tuple(order.indices(epoch, 0, 20) // 50) for epoch in range(20)}
    assert len(firsts) > 10  # of shards
    assert order.digest != PartsOrder([50] * 8, [0, 3, 8], 80, 1, batch=20, lanes=4).digest


@few
@given(sizes=SIZES, parts=some.integers(1, 6))
def test_parts_are_neighbouring_shards_and_as_even_as_these_allow(sizes, parts):
    assume(parts <= len(sizes))
    bounds = cut(np.array(sizes), parts)
    assert len(bounds) == parts + 1
    assert (bounds[0], bounds[-1]) == (0, len(sizes))
    assert all(first < stop for first, stop in pairwise(bounds))


def test_even_shards_are_cut_evenly_and_sides_have_the_parts_of_the_whole():
    dataset = Sharded([10] * 12)
    assert part_bounds(dataset, 4) == [0, 3, 6, 9, 12]
    side = Subset(dataset, [*range(5), *range(40, 120)])
    assert part_bounds(side, 4) == [0, 3, 6, 9, 12]
    order = parts_order(job(parts=4), side)
    assert order.part_sizes.tolist() == [5, 20, 30, 30]
    taken = order.indices(0, 0, 85)
    assert sorted(taken.tolist()) == list(range(85))
    assert steps_in_epoch(85, 12) == 8


def test_a_loader_of_a_job_with_parts_takes_their_order():
    dataset = Sharded([10] * 12)
    parts = LoaderParts.of(dataset) if hasattr(LoaderParts, "of") else LoaderParts(dataset)
    loader = Loader.of_job(job(parts=3), parts, "training", processes=0, say=print)
    expected = PartsOrder([10] * 12, [0, 4, 8, 12], 16384, 0, batch=12, lanes=4)
    assert loader.order.digest == expected.digest
    assert np.array_equal(loader.order.indices(2, 0, 120), expected.indices(2, 0, 120))
    loader.close()


def test_what_cannot_be_cut_into_parts_is_refused():
    with pytest.raises(DataError, match=r"data.parts = 4.* \(TensorDataset\) does not say which"):
        part_bounds(TensorDataset(arange(9)), 4)
    with pytest.raises(DataError, match="has 3 shards.* Set data.parts to at most 3"):
        part_bounds(Sharded([3, 3, 3]), 4)
    with pytest.raises(SpecError, match="parts = 4 .* Set order = 'windowed'"):
        spec_file.build({"recipe": "a.py:f", "data": {"parts": 4}}, source="a test")
