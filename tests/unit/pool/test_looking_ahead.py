"""Starts and ends of jobs, foreseen from lengths and paces: against sums that are known."""

import numpy as np
import pytest
from msgspec.structs import replace

from instep.events import STEPS
from instep.pool.ahead.forecast import HEAD_S, TAIL_S, forecast, margins
from instep.pool.decide import decide
from instep.pool.jobs import ClientEnded, FlowNeeds, JobSubmitted, PoolJob, PoolState, RunSeen
from instep.pool.paces.curve import curve_of, left_of, speed, with_pace
from instep.pool.run_events import RunPace
from instep.pool.view import explanation, job_lines


def job(name, least=1, most=1, **more):
    return PoolJob(id=name, share="a", at_least=least, at_most=most, **more)


def after(state, now, *events):
    for event in events:
        state = decide(state, event, now)
    return state


def running(name, left_s, steps=100, **more):
    """A job that made its first steps one second ago, and needs so many seconds more."""
    made = {"status": "running", "target": 1, "held": 1, "began": 1.0, "step": 5, "steps": steps}
    return job(name, **{**made, "left_s": left_s, "seen": 1000.0, "paces": ((1, 1.0),), **more})


@pytest.mark.parametrize("serial", [0.0, 0.05, 0.4])
def test_a_curve_is_that_of_which_its_points_are(serial):
    true = {n: 0.8 / speed(n, serial) for n in (1, 2, 3, 5, 12)}
    found = curve_of(tuple((n, true[n]) for n in (1, 2, 5)))
    assert {n: found.step_s(n) for n in true} == pytest.approx(true)
    assert found.speed(12) == pytest.approx(speed(12, serial))
    assert curve_of(((4, true[5]),)).one_s == pytest.approx(true[5] * speed(4))
    measured = curve_of(with_pace(((1, 1.0), (8, 0.9)), 4, 0.4))  # it crosses to another host
    assert [measured.step_s(n) for n in (1, 4, 8)] == pytest.approx([1.0, 0.4, 0.9])
    assert curve_of(()).speed(4) == pytest.approx(speed(4))


def test_jobs_in_a_row_start_and_end_after_those_before_them():
    known = {"left_s": 50.0, "paces": ((1, 0.5),)}
    jobs = [
        running("first", 100.0),
        job("second", submitted=1.0, **known),
        job("third", submitted=2.0, **known, needs=FlowNeeds(("second",), "completed")),
        job("stranger", submitted=3.0),
        job("last", submitted=4.0, priority=-1, **known),
    ]
    state = PoolState(cores=1, jobs={each.id: each for each in jobs})
    found = forecast(state, 1010.0)
    gap = HEAD_S + TAIL_S
    assert found["first"][:2] == pytest.approx((0.0, 90.0 + TAIL_S))
    assert found["second"][:2] == pytest.approx((90.0 + TAIL_S, 140.0 + TAIL_S + gap))
    order = sorted(found, key=lambda name: found[name].starts_s)
    assert order == ["first", "second", "third", "stranger", "last"]
    assert found["stranger"].ends_s is None
    assert [found[each].rests_on for each in order] == ["", "", "", "stranger", "stranger"]
    lines = "\n".join(explanation(state, state.jobs["last"], 1010.0))
    assert "if stranger, whose length is not known" in lines
    assert "in 1m31s" in job_lines(state, 1010.0)[1]


def test_what_is_measured_of_a_run_is_its_length_and_that_of_the_next_one_like_it():
    state = after(PoolState(cores=1), 1000.0, JobSubmitted(job("one", like="x")))
    state = after(state, 1004.0, RunSeen("one", 1, 4, 104, 50.0, pace=(1, 0.5), first=1003.0))
    assert left_of(state.jobs["one"], 1014.0) == pytest.approx(40.0)
    assert forecast(state, 1014.0)["one"].ends_s == pytest.approx(40.0 + TAIL_S)
    state = after(state, 1058.0, ClientEnded("one", "completed", "", 104, {}, 1054.5, (1, 0.5)))
    assert margins(state.jobs.values()) == pytest.approx((3.0, 3.0))
    state = after(state, 1060.0, JobSubmitted(job("two", like="x")), JobSubmitted(job("b")))
    assert state.jobs["two"].left_s == pytest.approx(52.0)
    assert forecast(state, 1060.0)["two"].ends_s == pytest.approx(52.0 + 3.0 + 3.0)
    assert state.jobs["b"].left_s is None


def write_steps(run, steps, began, step_s):
    records = np.zeros(len(steps), STEPS)
    records["step"] = steps
    records["begin"] = began + step_s * np.arange(len(steps))
    with open(run / "steps.bin", "ab") as file:
        file.write(records.tobytes())


def test_a_pace_is_of_whole_steps_with_the_workers_that_a_run_has(tmp_path, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr("instep.pool.run_events.time.monotonic", lambda: next(clock) * 2.0)
    pace = RunPace(tmp_path, ())
    pace.update(1)
    assert pace.left_s(100) is None
    write_steps(tmp_path, [1, 2, 3], 50.0, 0.5)
    pace.update(1)
    assert (pace.first, pace.step, pace.pace) == (50.0, 3, None)
    write_steps(tmp_path, range(4, 14), 52.0, 0.5)
    pace.update(1)
    assert pace.left_s(100) == pytest.approx(87 * 0.55)  # half a second was lost in between
    write_steps(tmp_path, range(14, 20), 57.0, 0.25)
    pace.update(2)
    assert pace.pace is None
    write_steps(tmp_path, range(20, 40), 58.5, 0.25)
    pace.update(2)
    assert pace.pace == (2, pytest.approx(0.25))
    assert pace.left_s(39) == 0


def test_a_job_whose_workers_change_is_not_measured_by_the_former_ones():
    state = PoolState(cores=2, jobs={"a": running("a", 100.0, most=2)})
    state = replace(state, jobs={"a": replace(state.jobs["a"], at_most=2)})
    state = after(state, 1010.0, RunSeen("a", 1, 15, 100, 90.0, pace=(1, 1.0), first=1.0))
    assert state.jobs["a"].target == 2
    assert left_of(state.jobs["a"], 1010.0) == pytest.approx(90.0)
    assert left_of(state.jobs["a"], 1020.0) == pytest.approx(90.0 - 10 * speed(2))
