"""Bounds prune the trials that Optuna's pruners would; workers are shared by a pure rule."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep.job.search import SearchSpec
from instep.search.allotment import allot
from instep.search.pruning import bounds_of
from instep.search.results import Result, ToldTrial

RUNGS = (1, 4, 16)


def spec_of(prune):
    return SearchSpec(prune=prune, rungs=RUNGS, space={"a.x": [1]})


def ours(values, told, prune, upwards):
    """The rungs of a trial with these values, up to the one at which it is pruned."""
    bounds = dict(bounds_of(spec_of(prune), told, upwards=upwards))
    reached = []
    for rung, value in zip(RUNGS, values, strict=True):
        reached.append((rung, value))
        bound = bounds.get(rung)
        if bound is not None and not (value >= bound if upwards else value <= bound):
            return Result("pruned", value, tuple(reached))
    return Result("completed", values[-1], tuple(reached))


@pytest.mark.parametrize("prune", ["halving", "median"])
@pytest.mark.parametrize("upwards", [True, False])
def test_trials_one_after_the_other_are_pruned_where_optuna_prunes_them(prune, upwards):
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    pruner = (
        optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4)
        if prune == "halving"
        else optuna.pruners.MedianPruner()
    )
    study = optuna.create_study(
        direction="maximize" if upwards else "minimize",
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=pruner,
    )
    draw, told = random.Random(5), []
    for _ in range(60):
        first = draw.random()  # only gets better, as Optuna's median looks at the best so far
        sign = 1 if upwards else -1
        values = [first, first + sign * draw.random() / 2, first + sign * (0.5 + draw.random())]
        trial, theirs = study.ask(), None
        for rung, value in zip(RUNGS, values, strict=True):
            trial.report(value, rung)
            if trial.should_prune():
                theirs = rung
                break
        state = optuna.trial.TrialState
        study.tell(trial, *([] if theirs else [values[-1]]), state=state.PRUNED if theirs else None)
        mine = ours(values, told, prune, upwards)
        assert (mine.rungs[-1][0] if mine.state == "pruned" else None) == theirs
        told.append(ToldTrial({}, mine))
    assert {each.result.state for each in told} == {"completed", "pruned"}


@given(
    st.lists(st.integers(0, 99), unique=True, max_size=9).map(sorted),
    st.integers(1, 24),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 24),
)
def test_workers_are_shared_whole_and_the_first_trials_get_what_is_left(
    waiting, capacity, unit, most
):
    most = max(most // unit, 1) * unit
    found = allot(waiting, capacity, unit, most)
    assert [*found] == waiting[: max(1, capacity // unit)]
    assert all(n % unit == 0 and unit <= n <= most for n in found.values())
    assert sum(found.values()) <= max(capacity, unit)
    assert [*found.values()] == sorted(found.values(), reverse=True)
    assert max(found.values(), default=0) - min(found.values(), default=0) <= unit
    idle = max(1, capacity // unit) * unit - sum(found.values())
    assert not idle or all(n == most for n in found.values()), "workers are left over"
