"""Curves of any length in few buckets: nothing is lost at their edges, however points come."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.dashboard.fold import Fold
from instep.dashboard.so_far import OPEN, StepsSoFar
from instep.events import STEPS
from instep.store.run_files import step_ends


def bucket_by_bucket(steps, values, times, width):
    """The same, computed for each bucket by itself."""
    found = []
    for number in range(int(steps.max()) // width + 1):
        mine = (steps >= number * width) & (steps < (number + 1) * width)
        known = values[mine & np.isfinite(values)]
        if mine.any():
            some = (known.min(), known.max(), known.mean()) if len(known) else (np.nan,) * 3
            newest = steps[mine].argmax()
            found.append((steps[mine][newest], times[mine][newest], *some))
    return np.array(found).T


@settings(deadline=None, max_examples=60)
@given(data=st.data(), count=st.integers(1, 300), most=st.sampled_from([4, 16, 64]))
def test_least_mean_and_most_are_exact_however_points_are_cut_and_mixed(data, count, most):
    draw = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    steps = draw.choice(np.arange(4 * count), count, replace=False)
    values = draw.normal(size=count)
    values[draw.random(count) < 0.1] = np.nan
    times = draw.random(count) * 100
    fold, at = Fold(most), 0
    while at < count:
        size = int(draw.integers(1, 40))
        fold.add(steps[at : at + size], values[at : at + size], times[at : at + size])
        at += size
    assert int(steps.max()) // fold.width < most
    assert fold.width == 1 or int(steps.max()) // (fold.width // 2) >= most
    step, time, low, high, mean = bucket_by_bucket(steps, values, times, fold.width)
    curve = fold.curve()
    np.testing.assert_array_equal(fold.step, step)
    np.testing.assert_array_equal(fold.time, time)
    np.testing.assert_allclose(curve["mean"], mean)
    if fold.width > 1:
        np.testing.assert_array_equal(curve["low"], low)
        np.testing.assert_array_equal(curve["high"], high)
    else:
        assert set(curve) == {"mean"}


def records(steps, workers=2, begin=1000.0):
    made = np.zeros(steps * workers, STEPS)
    made["step"] = np.repeat(np.arange(1, steps + 1), workers)
    made["worker"] = np.tile(np.arange(workers), steps)
    made["loss"] = 1.0 / made["step"]
    made["begin"] = begin + made["step"]
    made["forward_s"] = 0.25 + 0.25 * made["worker"]
    made["samples"], made["gradient_norm"] = 8, np.nan
    return made


@pytest.mark.parametrize("piece", [1, 7, 5000])
def test_of_a_step_that_was_computed_twice_the_later_one_is_drawn(piece):
    first, again = records(600), records(600)
    again["loss"] += 5.0
    again["begin"] += 2000.0
    mixed = np.concatenate([first[:900], again[700:720], first[900:]])  # steps 351 to 360
    so_far = StepsSoFar()
    for at in range(0, len(mixed), piece):
        so_far.take(mixed[at : at + piece])
    loss, norm = so_far.curves()
    assert loss.width == 2
    wanted = 1.0 / np.arange(1, 601)
    wanted[350:360] += 5.0
    pairs = np.append(0.0, wanted)[:600].reshape(-1, 2)  # buckets begin at even steps
    np.testing.assert_allclose(loss.curve()["low"][1:300], pairs[1:].min(1))
    np.testing.assert_allclose(loss.curve()["high"][1:300], pairs[1:].max(1))
    assert len(norm.step) == 0
    assert so_far.end == pytest.approx(float(step_ends(mixed).max()))


def test_steps_that_were_discarded_when_the_run_went_back_are_left_out():
    first, again = records(100), records(100, begin=5000.0)
    again["loss"] += 5.0
    so_far = StepsSoFar([(5000.0, 60)])
    so_far.take(first)
    so_far.take(again[120:])
    loss, _ = so_far.curves()
    assert loss.step.tolist() == list(range(1, 101))
    mean = loss.curve()["mean"]
    assert mean[59] == pytest.approx(1 / 60)
    assert mean[60] == pytest.approx(1 / 61 + 5.0)


def test_the_memory_of_a_curve_does_not_grow_with_the_run():
    so_far = StepsSoFar()
    for begin in range(0, 40_000, 2_000):
        more = records(2_000)
        more["step"] += begin
        so_far.take(more)
    loss, _ = so_far.curves()
    assert len(loss.step) <= 512
    assert len(so_far._open) == 2 * OPEN
    assert loss.step[-1] == 40_000
