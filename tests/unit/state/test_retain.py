"""Which checkpoints go, and which never do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from instep.state.retain import to_delete

steps = st.sets(st.integers(0, 60))


def test_the_last_few_stay():
    assert to_delete([10, 40, 20, 30], current=40, keep_last=2) == [10, 20]


def test_milestones_and_the_best_stay_for_good():
    kept = to_delete([10, 15, 20, 25, 30], current=30, keep_last=1, keep_every=20, keep_best=[15])
    assert kept == [10, 25]


def test_what_lies_beyond_the_current_step_goes_as_the_run_went_back():
    assert to_delete([10, 20, 30, 40], current=20, keep_last=2, keep_every=10) == [30, 40]


@given(steps, st.integers(0, 60), st.integers(1, 5), st.integers(0, 7), steps)
def test_the_current_one_and_enough_others_always_stay(known, current, keep, every, best):
    known.add(current)
    gone = to_delete(known, current=current, keep_last=keep, keep_every=every, keep_best=best)
    left = known - set(gone)
    assert max(left) == current
    assert sorted(left)[-keep:] == sorted(s for s in known if s <= current)[-keep:]
    assert set(gone) <= known
    assert gone == sorted(gone)
    assert to_delete(left, current=current, keep_last=keep, keep_every=every, keep_best=best) == []
