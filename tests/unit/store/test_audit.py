import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.data.batches import Batches
from instep.data.participants import OwnRounds, Sampling
from instep.events import LEDGER
from instep.report.figures.proof import not_their_own
from instep.store.audit import audit, audit_own
from made_up_runs import make_ledger

unhurried = settings(max_examples=60)
shapes = st.tuples(
    st.integers(1, 40),  # samples
    st.integers(1, 12),  # global batch
    st.integers(1, 30),  # steps
)


@st.composite
def dealt_ledgers(draw):
    """A right ledger: each step's range cut anywhere, dealt to anyone, written in any order."""
    samples, batch, steps = draw(shapes)
    whole = make_ledger(1, samples, batch, steps)
    parts = []
    for record in whole:
        inside = st.integers(int(record["first"]), int(record["stop"]))
        cuts = [record["first"], *sorted(draw(st.lists(inside, max_size=3))), record["stop"]]
        for first, stop in pairwise(cuts):
            part = record.copy()
            part["first"], part["stop"] = first, stop
            part["worker"] = draw(st.integers(0, 5))
            parts.append(part)
    order = draw(st.permutations(range(len(parts))))
    return np.array(parts)[list(order)], samples, batch, steps


@unhurried
@given(dealt_ledgers())
def test_any_dealing_of_the_shares_passes_and_has_one_hash(dealt):
    ledger, samples, batch, steps = dealt
    found = audit(ledger, Batches(samples, batch))
    assert found.exact
    assert found.used == sum(epoch.expected for epoch in found.epochs)
    assert (
        found.sha256 == audit(make_ledger(1, samples, batch, steps), Batches(samples, batch)).sha256
    )


@unhurried
@given(dealt_ledgers(), st.data())
def test_a_dropped_record_is_counted_exactly(dealt, data):
    ledger, samples, batch, steps = dealt
    at = data.draw(st.integers(0, len(ledger) - 1))
    size = int(ledger[at]["stop"] - ledger[at]["first"])
    found = audit(np.delete(ledger, at), Batches(samples, batch), last_step=steps)
    assert (found.missing, found.repeated, found.stray) == (size, 0, 0)
    assert found.exact == (size == 0)


@unhurried
@given(dealt_ledgers(), st.data())
def test_a_doubled_record_is_counted_exactly(dealt, data):
    ledger, samples, batch, _ = dealt
    at = data.draw(st.integers(0, len(ledger) - 1))
    size = int(ledger[at]["stop"] - ledger[at]["first"])
    found = audit(np.append(ledger, ledger[at : at + 1]), Batches(samples, batch))
    assert (found.missing, found.repeated, found.stray) == (0, size, 0)
    assert (found.sha256 == audit(ledger, Batches(samples, batch)).sha256) == (size == 0)


@unhurried
@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted), max_size=12),
    st.integers(1, 25),
)
def test_overlapping_ranges_are_counted_as_counting_by_hand_does(ranges, samples):
    ledger = np.zeros(len(ranges), make_ledger(1, 1, 1, 1).dtype)
    for record, (first, stop) in zip(ledger, ranges, strict=True):
        record["step"], record["first"], record["stop"] = 1, first, stop
    found = audit(ledger, Batches(samples, samples), last_step=1)
    uses = np.zeros(31, int)
    for first, stop in ranges:
        uses[first:stop] += 1
    due = uses[:samples]
    assert found.missing == (due == 0).sum()
    assert found.repeated == np.maximum(due - 1, 0).sum()
    assert found.stray == uses[samples:].sum()


def test_the_unfinished_epoch_is_due_up_to_its_last_step():
    found = audit(make_ledger(2, 1000, 64, 21), Batches(1000, 64))
    assert [(e.epoch, e.expected, e.used) for e in found.epochs] == [(0, 1000, 1000), (1, 320, 320)]


def test_samples_trained_before_they_were_due_are_stray():
    ledger = make_ledger(1, 100, 10, 5)
    ledger["epoch"][-1] = 3
    found = audit(ledger, Batches(100, 10))
    assert (found.missing, found.stray, found.exact) == (10, 10, False)


def test_an_epoch_that_was_left_out_is_missing():
    ledger = make_ledger(2, 100, 10, 30)
    found = audit(ledger[ledger["epoch"] != 1], Batches(100, 10))
    assert [epoch.missing for epoch in found.epochs] == [0, 100, 0]


def test_an_empty_ledger_holds_and_has_used_nothing():
    found = audit(make_ledger(2, 100, 10, 0), Batches(100, 10))
    assert (found.epochs, found.used, found.exact) == ((), 0, True)


@pytest.mark.timed
def test_ten_million_records_take_seconds():
    ledger = make_ledger(4, 1_000_000, 4, 2_500_000)
    begin = time.perf_counter()
    assert audit(ledger, Batches(1_000_000, 4)).exact
    assert time.perf_counter() - begin < 30


@unhurried
@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=5),
    st.integers(1, 10),
    st.integers(1, 12),
    st.data(),
)
def test_participants_with_data_of_their_own_are_audited_each_in_its_epochs(
    sizes, portion, steps, data
):
    own = OwnRounds(sizes, portion, Sampling(0, len(sizes), -(-len(sizes) // 2)))
    ledger = np.array(
        [
            (step, part.epoch, 0, 1, 0, 0, unit, part.first, part.stop)
            for step in range(1, steps + 1)
            for unit, part in enumerate(own.of(step))
        ],
        LEDGER,
    )
    found = audit_own(ledger, own, steps)
    assert found.exact
    assert found.used == int((ledger["stop"] - ledger["first"]).sum())
    assert not len(not_their_own(ledger, own, steps))
    at = data.draw(st.integers(0, len(ledger) - 1))
    size, step = int(ledger[at]["stop"] - ledger[at]["first"]), int(ledger[at]["step"])
    fewer = np.delete(ledger, at)
    dropped = audit_own(fewer, own, steps)
    assert (dropped.missing, dropped.repeated, dropped.stray) == (size, 0, 0)
    assert not_their_own(fewer, own, steps).tolist() == [step]
    doubled = audit_own(np.append(ledger, ledger[at]), own, steps)
    assert (doubled.missing, doubled.repeated, doubled.stray) == (0, size, 0)
    later = ledger.copy()
    later["epoch"][at] += 100
    moved = audit_own(later, own, steps)
    assert (moved.missing, moved.repeated, moved.stray) == (size, 0, size)
    assert not_their_own(later, own, steps).tolist() == [step]
    assert len({found.sha256, dropped.sha256, doubled.sha256, moved.sha256}) == 4
