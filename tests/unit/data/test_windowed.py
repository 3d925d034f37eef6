"""The windowed order is a permutation that goes through shards one after the other."""

import itertools
import pickle
import tracemalloc
from contextlib import closing
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.data.dealing import deal
from instep.data.loader import Loader, Slice
from instep.data.order import position, steps_in_epoch
from instep.data.partition.regions import Regions
from instep.data.shard_sizes import (
    MOST_BLOCKS,
    blocks,
    shard_sizes,
    shards_or_blocks,
    sizes_within,
)
from instep.data.torch_loader import LoaderParts
from instep.data.windowed import Windowed
from instep.engine.passes import positions_of
from instep.errors import DataError
from instep.job.data import DataSpec
from instep.job.spec import JobSpec
from instep.worker.rounds.own_data import _windowed

few = settings(max_examples=40, deadline=None)
SIZES = some.lists(some.integers(0, 40), min_size=1, max_size=12).filter(sum)


class Sharded(Dataset):
    """Samples are their own numbers."""

    def __init__(self, shard_sizes):
        self.shard_sizes = shard_sizes

    def __len__(self):
        return int(np.sum(self.shard_sizes))

    def __getitem__(self, index):
        return index


@few
@given(
    sizes=SIZES, window=some.integers(1, 500), epoch=some.integers(0, 9), seed=some.integers(0, 99)
)
def test_an_epoch_has_every_sample_once_and_takes_shards_one_after_the_other(
    sizes, window, epoch, seed
):
    order = Windowed(sizes, window, seed)
    samples = order.indices(epoch, 0, sum(sizes))
    assert samples.dtype == np.int64
    assert sorted(samples.tolist()) == list(range(sum(sizes)))
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    begins = np.cumsum(sizes) - sizes
    for stop in range(window, len(samples), window):  # what the windows up to there have taken
        taken = samples[:stop]
        counts = np.bincount(shard_of[taken], minlength=len(sizes))
        assert ((counts > 0) & (counts < sizes)).sum() <= 1
        first_ones = np.concatenate(
            [begin + np.arange(n) for begin, n in zip(begins, counts, strict=True)]
        )
        assert sorted(taken.tolist()) == first_ones.tolist()


@few
@given(
    sizes=SIZES,
    window=some.integers(1, 100),
    batch=some.integers(1, 40),
    lanes=some.integers(1, 9),
    data=some.data(),
)
def test_a_position_has_the_same_sample_whatever_it_is_asked_with(
    sizes, window, batch, lanes, data
):
    cuts = sorted(data.draw(some.sets(some.integers(1, sum(sizes)), max_size=5)))
    bounds = [0, *cuts, sum(sizes)]
    order = Windowed(sizes, window, 3, batch=batch, lanes=lanes)
    other = pickle.loads(pickle.dumps(order))
    for epoch in (1, 0):
        parts = [order.indices(epoch, *pair) for pair in pairwise(bounds)]
        whole = other.indices(epoch, 0, sum(sizes))
        assert np.array_equal(np.concatenate(parts), whole)
        assert sorted(whole.tolist()) == list(range(sum(sizes)))


@pytest.mark.parametrize(
    ("sizes", "window", "lanes", "possible"),
    [
        ([2, 2, 1], 5, 2, 120),  # a window as long as the epoch: every order
        ([1, 1, 1, 1], 1, 1, 24),  # no mixing: every sequence of the shards
        ([1, 1, 1, 1], 2, 2, 24),
        ([2, 2], 2, 1, 8),  # two sequences, two orders in each window
        ([4], 2, 1, 4),
    ],
)
def test_every_order_that_there_may_be_is_as_likely_as_another(sizes, window, lanes, possible):
    draws, order = 10 * possible, Windowed(sizes, window, 9, batch=2, lanes=lanes)
    orders = [order.indices(epoch, 0, sum(sizes)) for epoch in range(draws)]
    counts = np.unique(np.array(orders), axis=0, return_counts=True)[1]
    assert len(counts) == possible
    degrees = possible - 1
    spread = ((counts - draws / possible) ** 2).sum() / (draws / possible)
    assert abs(spread - degrees) <= 5 * (2 * degrees) ** 0.5


@few
@given(
    samples=some.integers(1, 3_000),
    window=some.integers(1, 400),
    batch=some.integers(1, 64),
    parts=some.integers(1, 8),
    workers=some.integers(1, 4),
    data=some.data(),
)
def test_a_worker_needs_few_shards_in_a_stretch_of_steps(
    samples, window, batch, parts, workers, data
):
    """Those of its own samples, and of the windows in which they stand."""
    assume(window < samples)  # one that holds all mixes all
    size, parts = data.draw(some.integers(1, 50)), min(parts, batch)
    sizes = [size] * (samples // size) + [samples % size]
    order = Windowed(sizes, window, 1, batch=batch, lanes=parts)
    every = steps_in_epoch(samples, batch)
    first = data.draw(some.integers(1, every))
    steps = range(first, data.draw(some.integers(first, every)) + 1)
    for share in deal(parts, workers):
        mine = [positions_of(position(s, samples, batch), share, parts) for s in steps]
        read = [order.indices(0, *part) for part in mine]
        touched = {int(sample) // size for each in read for sample in each}
        places = sum(map(len, read)) + len(share) * 2 * -(-window // parts)
        assert len(touched) <= places // size + 2 * len(share) + 1  # a lane may cut two


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_hosts_together_read_each_shard_once(hosts):
    """But those that lie in lanes of two hosts."""
    size, shards, batch, parts = 500, 80, 64, 8
    samples = size * shards
    order = Windowed([size] * shards, 4_000, 5, batch=batch, lanes=parts)
    read = 0
    for share in deal(parts, hosts):
        held, uses = {}, itertools.count()
        for step in range(1, steps_in_epoch(samples, batch) + 1):
            part = positions_of(position(step, samples, batch), share, parts)
            for shard in set((order.indices(0, *part) // size).tolist()):
                read += shard not in held
                held[shard] = next(uses)
            while len(held) > 3 * len(share):  # of each lane the present window, and the next
                del held[min(held, key=held.get)]
    assert shards <= read < shards + hosts


def test_a_billion_samples_in_ten_thousand_shards_cost_memory_for_the_shards():
    sizes = np.random.default_rng(0).integers(90_000, 110_000, 10_000)
    tracemalloc.start()
    try:
        order = Windowed(sizes, 16384, 1, batch=256, lanes=16)
        for first in (0, 10**6, 9 * 10**8):
            part = order.indices(2, first, first + 64)
            assert part.min() >= 0
            assert part.max() < sizes.sum()
            assert len(np.unique(part)) == 64
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
    assert len(blocks(10**9, 0)) <= MOST_BLOCKS


@few
@given(sizes=SIZES, data=some.data())
def test_the_shards_of_a_subset_have_what_is_chosen_of_them(sizes, data):
    samples = sum(sizes)
    chosen = sorted(data.draw(some.sets(some.integers(0, samples - 1), min_size=1)))
    shard_of = np.repeat(np.arange(len(sizes)), sizes)
    expected = [int((shard_of[chosen] == shard).sum()) for shard in range(len(sizes))]
    subset = Subset(Sharded(sizes), chosen)
    assert shard_sizes(subset).tolist() == expected
    assert shard_sizes(Subset(subset, range(len(chosen)))).tolist() == expected
    step = range(data.draw(some.integers(0, 9)), samples, data.draw(some.integers(1, 7)))
    counts = [int((shard_of[list(step)] == shard).sum()) for shard in range(len(sizes))]
    assert sizes_within(np.array(sizes), step).tolist() == counts


def test_a_dataset_without_shards_and_a_subset_in_another_order_have_none():
    assert shard_sizes(TensorDataset(torch.arange(9))) is None
    assert shard_sizes(Subset(TensorDataset(torch.arange(9)), [0, 1])) is None
    assert shard_sizes(Subset(Sharded([3, 3]), [4, 1])) is None
    assert blocks(10, 4).tolist() == [4, 4, 2]


@pytest.mark.parametrize(
    ("sizes", "lanes", "expected"),
    [
        ([5, 5], 2, [5, 5]),
        ([5, 5, 0], 3, [2, 2, 2, 2, 2]),  # fewer shards than lanes: nothing to go through in turn
        ([10], 1, [6, 4]),
    ],
)
def test_few_shards_are_cut_into_blocks(sizes, lanes, expected):
    assert shards_or_blocks(Sharded(sizes), 10, 6, lanes).tolist() == expected


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([3, 3], "has 6 samples together, and the dataset has 7"),
        ([8, -1], "a list of whole numbers is wanted"),
        (7, "a list of whole numbers is wanted"),
        (["a"], "a list of whole numbers is wanted"),
    ],
)
def test_shard_sizes_that_are_none_of_the_dataset_are_refused(said, words):
    class Wrong(Sharded):
        def __len__(self):
            return 7

    with pytest.raises(DataError, match=words):
        shard_sizes(Wrong(said))


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize(
    "dataset", [Sharded([12] * 8 + [4]), Subset(Sharded([10] * 99), range(100))]
)
def test_a_job_with_the_windowed_order_trains_in_it(dataset, processes):
    job = JobSpec(recipe="a.py:f", seed=4, data=DataSpec(order="windowed", window=16))
    sizes = shard_sizes(dataset)
    places = [Slice(epoch, first, first + 25) for epoch in (0, 1) for first in (0, 25, 50, 75)]
    parts = LoaderParts(dataset, loaders=processes)
    for name in ("training", "validation"):
        with closing(Loader.of_job(job, parts, name, say=print)) as loader:
            read = [each.batch.tolist() for each in loader.read(places)]
        if name == "training":
            order = Windowed(sizes, 16, 4, batch=64, lanes=8)
            assert read == [order.indices(*each).tolist() for each in places]
        else:
            assert list(itertools.chain(*read)) == 2 * list(range(100))


def test_a_participants_own_samples_stand_in_the_shards_of_the_whole_set():
    sizes = np.array([10, 0, 30, 5, 15])
    owners = np.random.default_rng(1).integers(0, 3, 60)
    shares = [np.flatnonzero(owners == participant) for participant in range(3)]
    regions = Regions(shares, 5, order_of=lambda share, own: _windowed(sizes, 1, share, own))
    shard_of = np.repeat(np.arange(5), sizes)
    for epoch in (0, 1):
        every = regions.indices(epoch, 0, 60)
        for number, share in enumerate(shares):
            own = every[regions.offsets[number] : regions.offsets[number + 1]]
            assert sorted(own.tolist()) == share.tolist()
            changes = (np.diff(shard_of[own]) != 0).sum()
            assert changes == len(np.unique(shard_of[share])) - 1  # one shard after the other
