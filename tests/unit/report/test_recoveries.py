"""From when on all train again after a blow, and what was computed twice: from records alone."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.events import STEPS
from instep.report.figures.recovery import computed_twice, quantiles, recoveries
from instep.store.run_files import step_ends


def records(*rows):
    """Of (step, worker, begin, end)."""
    steps = np.zeros(len(rows), STEPS)
    for name, values in zip(("step", "worker", "begin"), zip(*rows, strict=True), strict=False):
        steps[name] = values
    steps["forward_s"] = [end - begin for _, _, begin, end in rows]
    return steps


TWO = records(
    (1, 0, 10.0, 11.0), (1, 1, 10.0, 11.25),  # both
    (2, 0, 11.0, 12.0),  # worker 1 was killed before it could tell
    (3, 0, 14.0, 15.0), (3, 1, 14.5, 15.5),
    (4, 0, 15.0, 16.0), (4, 1, 15.5, 16.5),
)  # fmt: skip


@pytest.mark.parametrize(
    ("moment", "workers", "seconds"),
    [
        (9.0, 2, 2.25),
        (11.0, 2, 4.5),  # step 1 was over for one of them
        (11.5, 2, 4.0),
        (15.2, 2, 1.3),  # step 3 was under way, but worker 0 had done with it
        (16.0, 2, math.nan),
        (11.5, 1, 0.5),
        (9.0, 3, math.nan),
    ],
)
def test_recovery_is_until_all_workers_have_ended_a_step_after_the_moment(moment, workers, seconds):
    (found,) = recoveries(TWO, [9.5, 13.0], [moment], workers)
    assert found == pytest.approx(seconds, nan_ok=True)


def test_a_step_of_two_generations_is_no_step_of_all_workers():
    steps = records((1, 0, 10.0, 11.0), (1, 1, 12.0, 13.0), (2, 0, 13.0, 14.0), (2, 1, 13.0, 14.0))
    assert recoveries(steps, [9.0, 11.5], [9.5], 2) == pytest.approx([4.5])
    assert computed_twice(steps, [9.0, 11.5]) == {1}
    assert computed_twice(steps, [9.0]) == set()


def test_without_records_nothing_is_known():
    assert np.isnan(recoveries(np.empty(0, STEPS), [], [1.0, 2.0], 2)).all()
    assert computed_twice(np.empty(0, STEPS), []) == set()
    assert quantiles(np.array([math.nan])) == {}


def test_quantiles_leave_out_what_is_not_known():
    assert quantiles(np.array([3.0, math.nan, 1.0])) == pytest.approx(
        {"median": 2.0, "p90": 2.8, "p99": 2.98, "worst": 3.0}
    )


times = st.floats(0, 50).map(lambda value: round(value, 1))


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 2), times, times), max_size=30),
    st.lists(times, max_size=3),
    st.lists(times, min_size=1, max_size=5),
)
def test_it_is_what_looking_at_every_step_for_itself_gives(rows, formed, moments):
    steps = records(*((s, w, b, b + length) for s, w, b, length in rows)) if rows else TWO[:0]
    found = recoveries(steps, formed, moments, 2)
    ends = step_ends(steps)
    generation = np.searchsorted(sorted(formed), steps["begin"], side="right")
    for moment, seconds in zip(moments, found, strict=True):
        best = math.nan
        for key in set(zip(generation.tolist(), steps["step"].tolist(), strict=True)):
            mine = (generation == key[0]) & (steps["step"] == key[1])
            if len(np.unique(steps["worker"][mine])) >= 2 and ends[mine].min() > moment:
                best = np.fmin(best, ends[mine].max() - moment)
        assert seconds == pytest.approx(best, nan_ok=True)
