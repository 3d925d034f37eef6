"""Which alternative pays: ratios with their certainty, and the time to the same loss."""

import math
from statistics import NormalDist

import numpy as np
import pytest

from instep.report.figures.outcomes import Judged, Outcome, conclusion, judge, outcome_of
from instep.report.figures.ratios import Ratio, quantile_of_student, ratio_of
from instep.store.run_folder import RunFolder
from made_up_runs import START_UP_S, make_run


@pytest.mark.parametrize(
    ("share", "freedom", "value"),
    [(0.975, 1, 12.7062), (0.975, 2, 4.3027), (0.95, 4, 2.1318), (0.995, 7, 3.4995)],
)
def test_quantiles_are_those_of_the_table(share, freedom, value):
    assert quantile_of_student(share, freedom) == pytest.approx(value, rel=1e-4)


def test_of_many_turns_the_quantile_is_that_of_the_normal_distribution():
    assert quantile_of_student(0.975, 20_000) == pytest.approx(
        NormalDist().inv_cdf(0.975), rel=1e-3
    )


def test_an_interval_holds_what_is_true_as_often_as_it_says():
    random = np.random.default_rng(5)
    held = 0
    for _ in range(400):
        machine = random.lognormal(0.0, 0.5, 4)  # the same for both, so it cancels
        theirs, mine = (machine * random.lognormal(0.0, 0.1, 4) for _ in range(2))
        found = ratio_of(list(0.8 * mine), list(theirs))
        held += found.low <= 0.8 <= found.high
    assert 0.92 < held / 400 < 0.98


def test_a_ratio_of_one_turn_is_not_certain_and_of_nothing_is_none():
    assert not ratio_of([2.0], [4.0]).known
    assert ratio_of([2.0], [4.0]).value == 0.5
    assert ratio_of([2.0, None], [4.0, 4.0]) is None
    assert ratio_of([2.0, 0.0], [4.0, 4.0]) is None
    assert ratio_of([math.inf], [4.0]) is None
    assert ratio_of([], []) is None


def test_more_comparisons_have_wider_intervals():
    one, three = (ratio_of([1.0, 1.1, 1.3], [2.0, 2.0, 2.0], among=n) for n in (1, 3))
    assert three.value == one.value
    assert three.high / three.low > one.high / one.low


@pytest.mark.parametrize(
    ("low", "value", "high", "settled"),
    [
        (0.96, 1.0, 1.04, True),
        (0.9, 1.0, 1.1, False),
        (0.4, 0.5, 0.6, False),
        (0.4, 0.45, 0.5, True),
    ],
)
def test_turns_are_enough_where_an_interval_is_narrow_or_far_from_one(low, value, high, settled):
    assert Ratio(value, low, high).settled == settled


def outcome(speed, losses, sent=100, samples=640):
    """A run that takes `speed` seconds to each validation."""
    curve = tuple((speed * (number + 1), loss) for number, loss in enumerate(losses))
    return Outcome(speed * len(losses), sent, samples, losses[-1], curve)


def test_the_time_to_a_loss_lies_between_two_validations():
    run = outcome(10.0, [4.0, 2.0, 3.0, 1.0])
    assert run.time_to(4.5) == 10.0
    assert run.time_to(3.0) == 15.0
    assert run.time_to(2.0) == 20.0
    assert run.time_to(1.5) == 30.0  # half way from the 2 at 20 s, the lowest yet, to the 1 at 40 s
    assert run.time_to(0.5) is None


def judged(*alternatives):
    """Each a list of outcomes by turn."""
    names = ["unchanged", *"abcdef"[: len(alternatives) - 1]]
    return judge(names, list(zip(*alternatives, strict=True)), [""] * len(names))


BASE = [outcome(10.0, [4.0, 2.0, 1.0]), outcome(11.0, [4.0, 2.0, 1.0]), outcome(9.0, [4, 2, 1.0])]


def test_what_is_faster_to_the_same_loss_pays_and_the_best_is_named():
    half = [outcome(o.seconds / 6, [4.0, 2.0, 1.0], sent=25) for o in BASE]
    third = [outcome(o.seconds / 9, [4.0, 2.0, 1.0]) for o in BASE]
    plain, a, b = found = judged(BASE, half, third)
    assert plain.to_loss is None
    assert (a.to_loss.value, b.to_loss.value) == (pytest.approx(0.5), pytest.approx(1 / 3))
    assert a.pays
    assert b.pays
    assert not a.ends_worse
    assert a.verdict.startswith("a pays: 0.50 (0.50 to 0.50) of the time to the same")
    assert a.verdict.endswith("0.25 of the bytes")
    assert conclusion(found) == "b pays most: 3 times as fast"


def test_the_same_loss_is_the_lowest_that_both_reach_and_a_worse_end_is_told():
    fast_but_worse = [outcome(o.seconds / 30, [4.0, 2.0, 2.0]) for o in BASE]
    _, a = found = judged(BASE, fast_but_worse)
    assert a.to_loss.value == pytest.approx(0.1)  # to a loss of 2: two of three validations
    assert a.pays
    assert a.ends_worse
    assert "but ends at 2.00 (2.00 to 2.00) times its loss" in a.verdict
    assert conclusion(found).endswith("its loss at the end is higher")


def test_nothing_pays_where_turns_differ_more_than_alternatives():
    noise = [outcome(s, [4.0, 2.0, 1.0]) for s in (12.0, 8.0, 10.0)]
    slow = [outcome(2 * o.seconds / 3, [4.0, 2.0, 1.0]) for o in BASE]
    _, a, b = found = judged(BASE, noise, slow)
    assert not a.pays
    assert "no difference is shown" in a.verdict
    assert b.verdict.startswith("b does not pay: 2.00")
    assert conclusion(found) == "nothing is shown to pay: keep the job as it is"


def test_with_an_interval_that_says_nothing_it_is_not_known_rather_than_no_difference():
    wild = [outcome(s, [4.0, 2.0, 1.0]) for s in (1.0, 900.0, 30.0)]
    _, a = judged(BASE, wild)
    assert a.verdict.startswith("a: not known: ")
    assert "(too few turns to tell)" in a.verdict


def test_without_validations_the_time_of_the_same_samples_decides():
    def plain(seconds):
        return Outcome(seconds, 100, 640, 0.5, ())

    _, a = judged([plain(10.0), plain(11.0)], [plain(5.0), plain(5.5)])
    assert a.to_loss is None
    assert a.pays
    assert "0.50 (0.50 to 0.50) of the time, " in a.verdict


def test_what_failed_is_said_and_judges_nothing():
    found = judge(["unchanged", "a"], [[BASE[0], None]], ["", "worker 0 failed"])
    assert found[1].verdict == "a failed: worker 0 failed"
    assert found[1].cells()[:2] == ["a", "failed"]
    assert conclusion(found).startswith("nothing")
    assert isinstance(found[1], Judged)
    assert found[1].as_table()["to_loss"] is None


def test_the_figures_of_a_run_are_read_from_its_folder(tmp_path):
    found = outcome_of(RunFolder(make_run(tmp_path / "digits", step_s=0.02)))
    assert found.samples == 3000
    assert found.sent_bytes == 1_000_001
    assert found.seconds == pytest.approx(48 * 0.02, rel=0.1)
    assert [loss for _, loss in found.curve]
    assert found.curve[0][0] < found.curve[-1][0]
    assert found.curve[-1][0] < START_UP_S + found.seconds
