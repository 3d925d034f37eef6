"""Shares cover a step exactly, at any number of workers and any deal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.order import Position
from instep.engine.assignment import Finished, Lockstep
from instep.engine.passes import parts_of, ranges_of, share_of
from instep.job.mesh import MeshSpec
from instep.job.train import TrainSpec

SPEEDS = st.lists(st.sampled_from([0.01, 0.2, 1.0, 1.1, 3.0]), min_size=9, max_size=9)


@given(
    first=st.integers(0, 1000),
    size=st.integers(1, 60),
    micro_batches=st.integers(1, 20),
    workers=st.integers(1, 9),
    merge=st.booleans(),
    speeds=st.none() | SPEEDS,
)
def test_the_shares_of_all_workers_cover_the_positions_of_a_step_exactly(
    first, size, micro_batches, workers, merge, speeds
):
    where = Position(3, first, first + size)
    known = {"merge": merge, "speeds": speeds and speeds[:workers]}
    shares = [share_of(where, micro_batches, workers, n, **known) for n in range(workers)]
    covered = [i for s in shares for p in s.passes for i in range(p.samples.first, p.samples.stop)]
    assert covered == list(range(first, first + size))
    for share in shares:
        assert sum(one.size for one in share.passes) == share.stop - share.first
        assert all(one.size > 0 and one.samples.epoch == 3 for one in share.passes)
        assert not merge or speeds or len(share.passes) <= 1
    ranges = ranges_of(where, micro_batches, workers, known["speeds"])
    assert ranges == [(share.first, share.stop) for share in shares]


@given(micro_batches=st.integers(1, 40), workers=st.integers(1, 9), speeds=SPEEDS)
def test_no_merged_pass_is_larger_than_the_even_deal_makes_it(micro_batches, workers, speeds):
    where, most = Position(0, 0, 3 * micro_batches), 3 * -(-micro_batches // workers)
    for rank in range(workers):
        share = share_of(where, micro_batches, workers, rank, merge=True, speeds=speeds[:workers])
        sizes = [part.size for part in share.passes]
        assert max(sizes, default=0) <= most
        assert len(sizes) == -(-sum(sizes) // most)


@given(
    micro_batches=st.integers(1, 12),
    size=st.integers(1, 40),
    workers=st.integers(1, 6),
    speeds=SPEEDS,
)
def test_a_micro_batch_holds_the_same_samples_whoever_computes_it(
    micro_batches, size, workers, speeds
):
    where = Position(0, 0, size)

    def cut(number_of_workers, speeds=None):
        shares = [
            share_of(where, micro_batches, number_of_workers, n, merge=False, speeds=speeds)
            for n in range(number_of_workers)
        ]
        return {one.number: one.samples for share in shares for one in share.passes}

    assert cut(workers) == cut(1) == cut(workers, speeds[:workers])


def test_a_worker_may_have_no_pass_in_a_short_step():
    share = share_of(Position(0, 60, 61), 8, 4, 0, merge=True)
    assert share.passes == []
    assert share.first == share.stop == 60


def test_a_plan_goes_through_epochs_without_a_gap():
    form = Form(generation=1, rank=0, members=[0])
    assignment = Lockstep(form, TrainSpec(global_batch=16), Batches(37, 16), by_speed=False)
    steps = list(assignment.plan(1, 6, merge=True))
    assert [where for where, _ in steps] == [
        Position(epoch, first, min(first + 16, 37)) for epoch in (0, 1) for first in (0, 16, 32)
    ]
    later = list(assignment.plan(4, 6, merge=True))
    assert later == steps[3:]


def test_servers_are_dealt_nothing_and_stand_in_no_record():
    train, shares, records = TrainSpec(global_batch=16, micro_batches=4), [], []
    for rank in range(4):
        form = Form(generation=1, rank=rank, members=[0, 4, 2, 3], servers=(2, 3))
        lockstep = Lockstep(form, train, Batches(32, train.global_batch), by_speed=True)
        ((where, share),) = lockstep.plan(1, 1, merge=False)
        shares.append([part.number for part in share.passes])
        lockstep.prepared(0, 1, where)
        records.append(lockstep.records())
        assert lockstep.measured(where, [1.0, 1.0, 0.0, 0.0]) == ""
        assert lockstep.workers == [0, 4]
    assert shares == [[0, 1], [2, 3], [], []]
    assert {worker for _, _, _, _, worker, *_ in records[0]} == {0, 4}
    assert all(each == records[0] for each in records)


def test_one_of_those_that_are_dealt_most_is_the_fastest_once_work_is_dealt_by_speed():
    train, members = TrainSpec(global_batch=32, micro_batches=8), [0, 1, 2]
    forms = [Form(generation=1, rank=rank, members=members) for rank in members]
    ranks = [Lockstep(form, train, Batches(32, 32), by_speed=True) for form in forms]
    assert [rank.is_fastest for rank in ranks] == [None] * 3
    for step in range(1, 30):
        counts = []
        for rank in ranks:
            ((where, share),) = rank.plan(step, step, merge=False)
            rank.prepared(0, step, where)
            counts.append(len(share.passes))
        seconds = [n * each for n, each in zip(counts, [0.3, 0.05, 0.05], strict=True)]
        assert len({rank.measured(where, seconds) for rank in ranks}) == 1
    assert counts[1] > counts[0]
    assert [rank.is_fastest for rank in ranks] == [False, True, False]


@given(holders=st.dictionaries(st.integers(0, 7), st.integers(0, 2)), draining=st.booleans())
def test_what_somebody_holds_stays_with_its_holder_and_the_rest_is_dealt_evenly(holders, draining):
    """But nothing with one that leaves: it has handed over already what others do not have."""
    stay = {n: rank for n, rank in holders.items() if not (draining and rank == 2)}
    train, where = TrainSpec(global_batch=64, micro_batches=8), Position(0, 64, 127)
    shares, records = [], []
    for rank in range(3):
        form = Form(generation=2, rank=rank, members=[5, 6, 9], draining=(9,) if draining else ())
        finished = Finished(2, holders)
        lockstep = Lockstep(
            form, train, Batches(1000, train.global_batch), by_speed=False, finished=finished
        )
        (_, share), (_, later) = lockstep.plan(2, 3, merge=False)
        shares.append([part.number for part in share.passes])
        assert {n for n, rank_ in stay.items() if rank_ == rank} <= set(shares[rank])
        assert draining or 2 <= len(later.passes) <= 3
        lockstep.prepared(0, 2, where)
        records.append(lockstep.records())
    assert sorted(number for share in shares for number in share) == list(range(8))
    assert not (draining and shares[2])
    missing = [sum(number not in stay for number in share) for share in shares]
    working = missing[:2] if draining else missing
    assert max(working) - min(working) <= 1
    assert sum(working) == 8 - len(stay)
    assert records[0] == records[1] == records[2]
    ranges = sorted((first, stop) for *_, first, stop in records[0] if stop > first)
    assert [stop for _, stop in ranges] == [*(first for first, _ in ranges[1:]), 127]
    assert ranges[0][0] == 64
    assert {worker for _, _, _, _, worker, *_ in records[0]} == {5, 6, 9}


@pytest.mark.parametrize("samples", range(1, 65))
def test_a_smaller_last_batch_is_cut_into_fewer_parts_of_about_the_same_size(samples):
    train = TrainSpec(global_batch=64, micro_batches=8)
    where = Position(0, 0, samples)
    passes = share_of(where, parts_of(where, train), 1, 0, merge=False).passes
    assert sum(part.size for part in passes) == samples
    assert all(min(samples, 4) <= part.size <= 8 for part in passes)


@given(
    size=st.integers(1, 40),
    micro_batches=st.integers(1, 16),
    shard=st.integers(1, 4),
    replicas=st.integers(1, 3),
    merge=st.booleans(),
    whole=st.booleans(),
)
def test_the_ranks_that_split_a_replica_s_samples_run_in_lockstep_and_cover_each_once(
    size, micro_batches, shard, replicas, merge, whole
):
    train = TrainSpec(global_batch=40, micro_batches=micro_batches)
    mesh, workers = MeshSpec(shard=shard), list(range(replicas * shard))
    covered, ledger, counts = [], [], []
    for rank in workers:
        form = Form(generation=1, rank=rank, members=workers)
        lockstep = Lockstep(
            form, train, Batches(size, train.global_batch), by_speed=True, mesh=mesh
        )
        ((where, share),) = lockstep.plan(1, 1, merge=merge, whole=whole)
        counts.append(len(share.passes))
        for part in share.passes:
            if part.repeats:
                assert part.size == 1
                assert share.first <= part.samples.first < share.stop
            else:
                covered += range(part.samples.first, part.samples.stop)
        lockstep.prepared(0, 1, where)
        ledger = lockstep.records()
    assert sorted(covered) == list(range(size))
    for replica in range(replicas):
        assert len(set(counts[replica * shard : (replica + 1) * shard])) == 1
    assert sorted(i for row in ledger for i in range(*row[-2:])) == list(range(size))
    assert [row[4] for row in ledger] == workers


@given(micro_batches=st.integers(1, 16), shard=st.integers(1, 4), size=st.integers(1, 40))
def test_a_unit_of_a_mesh_is_cut_alike_at_any_number_of_replicas(micro_batches, shard, size):
    train = TrainSpec(global_batch=40, micro_batches=micro_batches)

    def passes(replicas):
        found = []
        for rank in range(replicas * shard):
            form = Form(generation=1, rank=rank, members=list(range(replicas * shard)))
            lockstep = Lockstep(
                form,
                train,
                Batches(size, train.global_batch),
                by_speed=False,
                mesh=MeshSpec(shard=shard),
            )
            ((_, share),) = lockstep.plan(1, 1, merge=False)
            found += [(rank % shard, part) for part in share.passes]
        return sorted(found)

    assert passes(1) == passes(2) == passes(3)


@pytest.mark.parametrize(
    ("mesh", "now"),
    [
        ({}, [7, 1]),
        ({"shard": 2}, [4, 4, 0, 0]),  # a unit is two of eight micro-batches
        ({"tensor": 2}, [7, 7, 1, 1]),
        ({"stages": 2}, [7, 7, 1, 1]),
        ({"shard": 2, "tensor": 2}, [4, 4, 4, 4, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_replica_is_dealt_by_the_speed_of_its_slowest_rank(mesh, now):
    train, mesh = TrainSpec(global_batch=32, micro_batches=8), MeshSpec(**mesh)
    workers = list(range(2 * mesh.ranks))
    forms = [Form(generation=1, rank=rank, members=workers) for rank in workers]
    ranks = [
        Lockstep(form, train, Batches(32, train.global_batch), by_speed=True, mesh=mesh)
        for form in forms
    ]
    of_a_pass_s = [0.05 for _ in workers[1:]] + [0.3]
    for step in range(1, 30):
        covered, counts = [], []
        for rank in ranks:
            ((where, share),) = rank.plan(step, step, merge=False)
            rank.prepared(0, step, where)
            counts.append(len(share.passes))
            covered += [n for each in share.passes for n in range(*each.samples[1:])]
        assert sorted(covered) == sorted([*range(32)] * mesh.same_batch)
        seconds = [n * each for n, each in zip(counts, of_a_pass_s, strict=True)]
        assert len({rank.measured(where, seconds) for rank in ranks}) == 1
    assert counts == now
    for rank in ranks:
        micro_batches, speeds = rank.dealt()
        assert micro_batches == now
        assert len(set(speeds[: mesh.ranks])) == len(set(speeds[mesh.ranks :])) == 1
        assert speeds[0] > speeds[-1]
