"""The rules of `[stop]`: what each makes of the figures, and that nothing but figures decides."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from instep.comm.protocol.messages import Figures
from instep.control.stop_rules import Fired, Judge, Rules, recorded
from instep.events import STEPS
from instep.job.train import StopSpec

NAN, INF = math.nan, math.inf


def step_figures(losses, norms=None):
    """The figures of steps 1, 2, ... with these losses."""
    norms = norms or [None] * len(losses)
    return [
        Figures(step=number, loss=loss, gradient_norm=norm)
        for number, (loss, norm) in enumerate(zip(losses, norms, strict=True), 1)
    ]


def validations(values, metric="loss"):
    """One every ten steps."""
    return [
        Figures(step=10 * number, metrics={metric: value, "other": 0.0})
        for number, value in enumerate(values, 1)
    ]


def fires(figures, **rules):
    """The first rule to fire; None if none does."""
    rules_of_job = Rules(StopSpec(**rules))
    return next(
        (fired for each in figures if (fired := rules_of_job.evaluate(each)) is not None), None
    )


@pytest.mark.parametrize(
    ("rules", "figures", "expected"),
    [
        (
            {"target": 0.97, "metric": "accuracy"},
            validations([0.5, 0.973, 0.99], "accuracy"),
            Fired("target", 20, "accuracy 0.973 reached the target 0.97"),
        ),
        (
            {"target": 0.5},
            validations([0.9, 0.6, 0.5]),
            Fired("target", 30, "loss 0.5 reached the target 0.5"),
        ),
        (
            {"target": 3, "metric": "error", "mode": "min"},
            validations([9.0, 3.0], "error"),
            Fired("target", 20, "error 3 reached the target 3"),
        ),
        ({"target": 3, "metric": "error", "mode": "min"}, validations([9.0, NAN], "error"), None),
        ({"target": 0.5, "metric": "accuracy"}, validations([0.1]), None),
        (
            {"target": 0.95, "metric": "accuracy"},
            validations([0.949998, float(np.float32(57) / np.float32(60))], "accuracy"),
            Fired("target", 20, "accuracy 0.95 reached the target 0.95"),
        ),
        (
            {"target": 0.05},
            validations([0.0500001, 0.05 + 4e-9]),
            Fired("target", 20, "loss 0.05 reached the target 0.05"),
        ),
        (
            {"target": -0.95, "metric": "score"},
            validations([-0.950002, -0.9500005], "score"),
            Fired("target", 20, "score -0.950001 reached the target -0.95"),
        ),
        ({"target": 0}, validations([1e-30]), None),
        (
            {"bounds": ((1, 0.5), (3, 0.8)), "metric": "accuracy"},
            validations([0.5, 0.1, 0.7999, 0.1], "accuracy"),
            Fired("pruned", 30, "accuracy 0.7999 of validation 3 was worse than the bound 0.8"),
        ),
        (
            {"bounds": ((2, 0.5),)},
            validations([0.9, NAN]),
            Fired("pruned", 20, "loss nan of validation 2 was worse than the bound 0.5"),
        ),
        ({"bounds": ((1, 0.9), (2, 0.5))}, validations([0.9, 0.5, 7.0]), None),
        ({"target": 0}, validations([0.0]), Fired("target", 10, "loss 0 reached the target 0")),
        (
            {"patience": 2},
            validations([3.0, 2.0, 2.5, 2.0]),
            Fired(
                "plateau",
                40,
                "loss did not improve in 2 validations: 2 at step 20 was the best, 2 is the last",
            ),
        ),
        (
            {"patience": 1, "least_change": 0.5},
            validations([3.0, 2.5, 2.25]),
            Fired(
                "plateau",
                30,
                "loss did not improve by 0.5 in 1 validation: "
                "2.5 at step 20 was the best, 2.25 is the last",
            ),
        ),
        ({"patience": 2, "least_change": 0.5}, validations([3.0, 2.75, 2.5, 2.25, 2.0]), None),
        ({"patience": 2}, validations([3.0, 4.0, 2.0, 4.0, 1.0]), None),
        (
            {"patience": 2},
            validations([NAN, INF, 5.0]),
            Fired("plateau", 20, "loss did not improve in 2 validations: inf is the last"),
        ),
        ({"patience": 2, "mode": "max"}, validations([1.0, 2.0, 1.0, 3.0]), None),
        ({}, step_figures([1.0, NAN], [4.0, INF]), None),  # each worker sees that by itself
        ({"rise": 2, "window": 1}, step_figures([1.0, NAN, INF * 0, 2.0], [None, NAN, 1, 1]), None),
        (
            {"rise": 2, "window": 1},
            step_figures([1.0, NAN, 0.5, 1.0, INF]),
            Fired(
                "diverged",
                5,
                "the mean loss of the last 1 steps was inf, above 2 times the lowest yet, 0.5",
            ),
        ),
        (
            {"rise": 1.5, "window": 2},
            step_figures([4.0, 2.0, 2.0, 3.0, 9.0]),
            Fired(
                "diverged",
                5,
                "the mean loss of the last 2 steps was 6, above 1.5 times the lowest yet, 2",
            ),
        ),
        (
            {"rise": 2, "window": 3},
            step_figures([NAN, 1.0, 1.0, 1.0, 7.0]),
            Fired(
                "diverged",
                5,
                "the mean loss of the last 3 steps was 3, above 2 times the lowest yet, 1",
            ),
        ),
        ({"rise": 1.5, "window": 4}, step_figures([1.0, 9.0, 9.0]), None),
        ({"rise": 2, "window": 1}, step_figures([-4.0, -2.0, 0.0]), None),
        (
            {"rise": 2, "window": 1},
            step_figures([-4.0, 0.5]),
            Fired(
                "diverged",
                2,
                "the mean loss of the last 1 steps was 0.5, above 2 times the lowest yet, -4",
            ),
        ),
        ({"rise": 2, "window": 1}, step_figures([4.0, 0.0, 1e-30, 3e-6]), None),
        ({"rise": 2, "window": 1}, step_figures([0.0, 0.0, 1e-30]), None),
        (
            {"rise": 2, "window": 1},
            step_figures([4.0, 0.0, 5e-6]),
            Fired(
                "diverged",
                3,
                "the mean loss of the last 1 steps was 5e-06, above 2 times the lowest yet, 0",
            ),
        ),
        (
            {"gradient_norm": 0.001},
            step_figures([1.0, 1.0, 1.0], [0.001, None, 0.0009]),
            Fired("gradient_norm", 3, "the norm of the gradient was 0.0009, below 0.001"),
        ),
        ({"gradient_norm": 0.001}, step_figures([1.0], [NAN]), None),
        ({}, step_figures([NAN, INF], [NAN, 0.0]) + validations([NAN]), None),
    ],
)
def test_a_rule_fires_at_its_figures_and_names_them(rules, figures, expected):
    fired = fires(figures, **rules)
    if expected is None:
        assert fired is None
        return
    assert fired == expected._replace(at_once=expected.rule in ("target", "pruned", "plateau"))
    assert fired.after == (expected.step - 1 if fired.at_once else expected.step)


def test_the_target_comes_before_the_plateau_at_the_same_validation():
    fired = fires(validations([0.4, 0.4], "loss"), target=0.4, patience=1)
    assert fired is not None
    assert (fired.rule, fired.step) == ("target", 10)


BELOW = Fired("gradient_norm", 1, "the norm of the gradient was 0.25, below 0.5")


@pytest.mark.parametrize(
    ("rules", "at_once"), [({"patience": 5}, [BELOW._replace(at_once=True)]), ({}, [])]
)
def test_a_step_at_which_a_rule_fired_is_the_last_if_its_validation_is_evaluated(rules, at_once):
    """It is the same for a judge that heard it from the records."""
    spec = StopSpec(gradient_norm=0.5, **rules)
    figures = [Figures(step=1, loss=1.0, gradient_norm=0.25), Figures(step=1, metrics={"loss": 1})]
    judge = Judge(spec)
    assert judge.evaluate(figures[0], again=False) == BELOW
    assert judge.evaluate(figures[1], again=False) == next(iter(at_once), None)
    assert Judge(spec, figures).fired_after(0) == [BELOW, *at_once]
    assert Judge(spec, figures[:1]).fired_after(0) == [BELOW]


FLOATS = st.floats(width=64)
FIGURES = st.lists(st.tuples(FLOATS, st.none() | FLOATS, st.none() | FLOATS), max_size=40).map(
    lambda rows: [
        Figures(step=n, loss=loss, gradient_norm=norm, metrics=_named(value))
        for n, (loss, norm, value) in enumerate(rows, 1)
    ]
)
ANY_RULES = st.builds(
    StopSpec,
    target=st.none() | st.floats(-2, 2),
    mode=st.sampled_from(["auto", "min", "max"]),
    patience=st.integers(0, 4),
    least_change=st.floats(0, 1),
    non_finite=st.booleans(),
    rise=st.none() | st.floats(1.01, 4),
    window=st.integers(1, 5),
    gradient_norm=st.none() | st.floats(0.01, 2),
)


def _named(value):
    return {} if value is None else {"loss": value}


@given(ANY_RULES, FIGURES, st.integers(0, 40))
def test_rules_that_replay_the_records_continue_as_if_never_interrupted(spec, figures, cut):
    steady, resumed = Rules(spec), Rules(spec)
    before = [steady.evaluate(each) for each in figures[:cut]]
    assert resumed.replay(figures[:cut]) == before
    assert [steady.evaluate(each) for each in figures[cut:]] == [
        resumed.evaluate(each) for each in figures[cut:]
    ]


@settings(max_examples=200)
@given(st.lists(st.integers(-50, 50), max_size=40), st.integers(1, 6), st.sampled_from([1.5, 2, 3]))
def test_a_rise_is_what_its_definition_says(losses, window, rise):
    """Whole numbers, whose sums are exact, and every mean made anew."""
    means = [sum(losses[n - window : n]) / window for n in range(window, len(losses) + 1)]
    expected = None
    for at, mean in enumerate(means):
        lowest = min(means[:at], default=math.inf)
        first = next((abs(each) for each in means[:at] if each), 0.0)
        size = max(abs(lowest), 1e-6 * first)
        if at and size and mean > lowest + (rise - 1) * size:
            expected = at + window
            break
    fired = fires(step_figures([float(loss) for loss in losses]), rise=rise, window=window)
    assert (fired.step if fired else None) == expected


@given(st.lists(st.floats(0, 8), max_size=30), st.integers(1, 4), st.sampled_from([0.0, 1.0]))
def test_patience_ends_so_many_validations_after_the_last_that_counted(values, patience, least):
    best, at = math.inf, 0
    expected = None
    for number, value in enumerate(values, 1):
        if best == math.inf or (value < best and best - value >= least):
            best, at = value, number
        elif number - at == patience:
            expected = 10 * number
            break
    fired = fires(validations(values), patience=patience, least_change=least)
    assert (fired.step if fired else None) == expected


def record(step, loss, norm=NAN, worker=0, begin=0.0):
    made = np.zeros(1, STEPS)
    made["step"], made["loss"], made["gradient_norm"] = step, loss, norm
    made["worker"], made["begin"] = worker, begin
    return made


def test_recorded_figures_are_those_that_were_evaluated_in_the_same_order():
    steps = np.concatenate(
        [
            record(2, 0.75, 0.5, worker=1, begin=2.0),
            record(3, 0.5, begin=3.0),
            record(1, 1.5, begin=1.5),
            record(2, 0.75, 0.5, worker=0, begin=2.0),
            record(4, 0.25, begin=4.0),
        ]
    )
    events = [
        {"step": 2, "metrics": {"loss": 1.0}, "scheduled": True},
        {"step": 3, "metrics": {"loss": 2.0}, "scheduled": False},
        {"step": 4, "metrics": {"loss": 3.0}, "scheduled": True},
    ]
    assert recorded(steps, events, until=3) == [
        Figures(step=1, loss=1.5),
        Figures(step=2, loss=0.75, gradient_norm=0.5),
        Figures(step=2, metrics={"loss": 1.0}),
        Figures(step=3, loss=0.5),
    ]
    assert recorded(steps[:0], [], until=9) == []
