"""Micro-batches come from parts of a dataset, by a rule that knows nothing of hosts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as some
from torch import arange
from torch.utils.data import Dataset, Subset, TensorDataset

from instep.client.job_checks import check_job
from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.data.order import micro_batch, position, steps_in_epoch
from instep.data.participants import OwnRounds, Sampling
from instep.data.partition.regions import Regions
from instep.data.parts.cut import cut, in_parts, parts_order
from instep.data.parts.near import deal_near, holders
from instep.data.parts.order import PartsOrder
from instep.data.torch_loader import LoaderParts
from instep.engine.assignment import Lockstep
from instep.engine.passes import Near
from instep.errors import DataError, SpecError
from instep.job import file as spec_file

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
    assert in_parts(dataset, 4)[1] == [0, 3, 6, 9, 12]
    side = Subset(dataset, [*range(5), *range(40, 120)])
    assert in_parts(side, 4)[1] == [0, 3, 6, 9, 12]
    order = parts_order(job(parts=4), side)
    assert order.part_sizes.tolist() == [5, 20, 30, 30]
    taken = order.indices(0, 0, 85)
    assert sorted(taken.tolist()) == list(range(85))
    assert steps_in_epoch(85, 12) == 8


def test_a_loader_of_a_job_with_parts_takes_their_order():
    dataset = Sharded([10] * 12)
    parts = LoaderParts(dataset)
    loader = Loader.of_job(job(parts=3), parts, "training", processes=0, say=print)
    expected = PartsOrder([10] * 12, [0, 4, 8, 12], 16384, 0, batch=12, lanes=4)
    assert loader.order.digest == expected.digest
    assert np.array_equal(loader.order.indices(2, 0, 120), expected.indices(2, 0, 120))
    loader.close()


def test_what_cannot_be_cut_into_parts_is_refused():
    with pytest.raises(DataError, match=r"data.parts = 4.* \(TensorDataset\) does not say which"):
        in_parts(TensorDataset(arange(9)), 4)
    with pytest.raises(DataError, match=r"has 3 shards.* Set data.parts to at most 3"):
        in_parts(Sharded([3, 3, 3]), 4)
    with pytest.raises(SpecError, match=r"data.parts = 4 .* Set data.order = 'windowed'"):
        check_job(spec_file.build({"recipe": "a.py:f", "data": {"parts": 4}}, source="a test"))


@few
@given(
    parts=some.lists(some.integers(0, 3), min_size=1, max_size=12),
    held=some.lists(
        some.lists(some.sampled_from([0, 5, 10]), min_size=4, max_size=4), min_size=1, max_size=4
    ),
    speeds=some.none() | some.lists(some.sampled_from([0.5, 1.0, 3.0]), min_size=4, max_size=4),
)
def test_each_micro_batch_is_dealt_once_and_stays_with_its_part_unless_lending_saves(
    parts, held, speeds
):
    given_speeds = speeds and speeds[: len(held)]
    dealt = deal_near(parts, held, given_speeds)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(len(parts)))
    at_home = deal_near(parts, held)
    for worker, numbers in enumerate(at_home):
        assert all(worker in holders(held, parts[number]) for number in numbers)
    if given_speeds:

        def seconds(each):
            return max(len(n) / speed for n, speed in zip(each, given_speeds, strict=True))

        assert seconds(dealt) <= seconds(at_home) + 1e-9 or len(set(map(tuple, held))) < len(held)


@pytest.mark.parametrize(
    ("held", "speeds", "counts"),
    [
        ([[9, 9, 0, 0], [0, 0, 9, 9]], None, [4, 4]),
        ([[9, 9, 9, 0], [0, 0, 0, 9]], None, [6, 2]),  # nobody has been measured: nobody lends
        ([[9, 9, 0, 0], [0, 0, 9, 9]], (1.0, 3.0), [2, 6]),  # a slow holder lends
        ([[9, 9, 0, 0], [0, 0, 9, 9]], (1.0, 1.2), [4, 4]),  # one less would save too little
        ([[9, 9, 0, 0], [9, 9, 9, 9]], None, [4, 4]),  # a copy is as good
        ([[0, 0, 0, 0], [0, 0, 0, 0]], None, [4, 4]),  # all lies elsewhere
    ],
)
def test_how_many_micro_batches_each_worker_gets(held, speeds, counts):
    dealt = deal_near([0, 0, 1, 1, 2, 2, 3, 3], held, speeds)
    assert [len(numbers) for numbers in dealt] == counts


@pytest.mark.parametrize("speeds", [None, (1.0, 4.0, 1.0)])
def test_members_in_lockstep_take_each_sample_of_a_step_once_and_the_ledger_says_who(speeds):
    spec = job(parts=3).train
    order = PartsOrder([11, 9, 10, 14], [0, 1, 2, 4], 8, 3, batch=12, lanes=4)
    held = [[0, 9, 0], [11, 0, 0], [0, 0, 24]]
    batches = Batches(order.samples, 12)
    members = [
        Lockstep(
            Form(generation=2, rank=rank, members=[5, 6, 7]),
            spec,
            batches,
            by_speed=True,
            near=Near(order, held),
        )
        for rank in range(3)
    ]
    for member in members:
        member.dealing.speeds = speeds
    for step in range(1, 9):
        where = batches.of(step)
        taken, recorded = [], []
        for rank, member in enumerate(members):
            ((position_, share),) = member.plan(step, step, merge=step % 2 == 0)
            assert position_ == where
            for part in share.passes:
                taken += range(part.samples.first, part.samples.stop)
            member.prepared(0, step, where)
            own = [r for r in member.records() if r[4] == 5 + rank]
            recorded += [n for r in own for n in range(*r[-2:])]
            if speeds is None:
                middles = [(p.samples.first + p.samples.stop - 1) // 2 for p in share.passes]
                parts = order.parts_at(np.array(middles, np.int64)).tolist()
                assert step % 2 == 0 or all(held[rank][part] for part in parts)
        assert sorted(taken) == sorted(recorded) == list(range(where.first, where.stop))
    members[0].dealing.speeds = None
    for step in (9, 10):  # the first does not count
        members[0].prepared(0, step, batches.of(step))
        assert members[0].measured(batches.of(step), [1.0, 1.0, 1.0]) == ""
    assert sum(members[0].dealt()[0]) == 4


def test_participants_are_dealt_to_whoever_has_their_samples():
    """Those of a round that draws some of them, too; a slow holder lends."""
    sizes = np.array([10] * 12)
    owners = np.arange(120) // 5 % 6  # each has samples in two of three shards
    shares = [np.flatnonzero(owners == number) for number in range(6)]
    lots = Regions(shares, 0).lots(sizes)
    for number, (shards, samples) in enumerate(lots):
        counts = np.bincount(shares[number] // 10, minlength=12)
        assert dict(zip(shards, samples, strict=True)) == {
            n: c for n, c in enumerate(counts.tolist()) if c
        }
    held = [[20, 20, 0, 0, 0, 0], [0, 0, 20, 20, 20, 0]]
    own = OwnRounds([20] * 6, 5, Sampling(seed=3, participants=6, count=4))
    members = [
        Lockstep(
            Form(generation=2, rank=rank, members=[5, 6]),
            job(parts=3).train,
            Batches(120, 20),
            by_speed=True,
            own=own,
            near=Near(own, held),
        )
        for rank in range(2)
    ]
    for step in range(1, 12):
        who, computed = own.who(step), []
        for rank, member in enumerate(members):
            ((where, share),) = member.plan(step, step, merge=False)
            mine = [who[part.number] for part in share.passes]
            assert all(held[rank][each] or each == 5 for each in mine)
            computed += mine
            member.prepared(0, step, where)
        assert sorted(computed) == who
        for member in members:  # of all that were dealt, by all
            assert sorted(r[6] for r in member.records() if r[-1] > r[-2]) == list(range(4))
    members[0].dealing.speeds = members[1].dealing.speeds = (1.0, 9.0)
    dealt = [len(next(m.plan(1, 1, merge=False))[1].passes) for m in members]
    assert sum(dealt) == 4
    assert dealt[0] < dealt[1]


def test_a_participant_for_each_part_is_wanted_where_parts_are_theirs():
    table = {
        "recipe": "a.py:f",
        "data": {"parts": 3, "order": "windowed"},
        "sync": {"name": "averaging", "participants": 4, "options": {"partition": "parts"}},
    }
    with pytest.raises(SpecError, match=r"gives each participant a part.* Set both to one number"):
        check_job(spec_file.build(table, source="a test"))
