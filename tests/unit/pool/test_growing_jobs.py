"""Jobs grow: those on GPUs by another start, and those that one slow measurement spoke against."""

from itertools import pairwise

import pytest
from msgspec.structs import replace

from instep.pool.ahead.forecast import forecast
from instep.pool.decide import decide
from instep.pool.jobs import (
    ClientEnded,
    JobSubmitted,
    PlacesTold,
    PoolHost,
    PoolJob,
    PoolState,
    ResizeRefused,
    RunSeen,
    TimePassed,
)
from instep.pool.paces.curve import left_of, speed
from instep.pool.paces.doubts import RETRY_S, believed, doubted
from instep.pool.view import explanation


def job(name, least=1, most=16, **more):
    return PoolJob(id=name, share="a", at_least=least, at_most=most, **more)


def seen(state, name, now, step_s, left_s):
    """The run of a job, measured with the workers that it has."""
    workers = state.jobs[name].target
    sight = RunSeen(name, workers, 10, 9999, left_s, pace=(workers, step_s), first=1.0 + 3.0)
    return decide(state, sight, now)


def on_gpus(state, left_s, now=10.0):
    """A job whose run has refused more workers than the four with which it began."""
    state = decide(state, JobSubmitted(job("net")), 1.0)
    assert state.jobs["net"].target == 4
    if state.hosts:
        state = decide(state, PlacesTold("net", state.jobs["net"].places), 2.0)
    state = seen(state, "net", now, 1.0, left_s)
    return decide(state, ResizeRefused("net", 4), now + 1)


@pytest.mark.parametrize("hosts", [{}, {n: PoolHost(cores=8) for n in "ab"}])
def test_a_job_on_gpus_grows_to_all_that_it_can_use_by_starting_again_at_a_commit(hosts):
    state = on_gpus(PoolState(cores=16, hosts=hosts), 40_000.0)
    for workers in (8, 16):
        state = decide(state, TimePassed(), state.at + 10)
        assert state.jobs["net"].status == "stopping"
        state = decide(state, ClientEnded("net", "", step=20), state.at + 1)
        grown = state.jobs["net"]
        assert (grown.status, grown.target, grown.in_vain) == ("running", workers, 0)
        state = seen(state, "net", state.at + 10, 4 / workers, 40_000.0)
    state = decide(state, TimePassed(), state.at + 100)
    assert state.jobs["net"].target == 16


def test_a_job_on_gpus_that_ends_soon_stays_and_others_have_what_it_cannot_use():
    state = on_gpus(PoolState(cores=16), 100.0)
    state = decide(state, JobSubmitted(job("next")), 13.0)
    state = decide(state, TimePassed(), 30.0)
    assert (state.jobs["net"].status, state.jobs["net"].target) == ("running", 4)
    assert state.jobs["next"].target == 4
    state = seen(state, "next", 35.0, 1.0, 9000.0)
    assert decide(state, TimePassed(), 60.0).jobs["next"].target == 8
    said = "".join(explanation(state, state.jobs["net"], 36.0))
    assert "another start at its last commit: with more once that saves 5 times" in said


def test_a_start_with_more_workers_is_in_the_forecast_with_its_seconds():
    state = on_gpus(PoolState(cores=8), 8000.0)
    net = replace(state.jobs["net"], head_s=100.0)
    (found,) = forecast(replace(state, jobs={"net": net}), 11.0).values()
    four = left_of(net, 11.0) / speed(4)
    assert four * speed(4) / speed(8) + 100.0 < found.ends_s < four


def test_a_job_on_gpus_that_was_parked_goes_on_with_more_than_its_least():
    state = on_gpus(PoolState(cores=4), 40_000.0)
    urgent = job("urgent", least=4, most=4, priority=5)
    state = decide(state, JobSubmitted(urgent), 20.0)
    assert state.jobs["net"].status == "stopping"
    state = decide(state, ClientEnded("net", "", step=20), 21.0)
    assert state.jobs["urgent"].target == 4
    state = decide(state, ClientEnded("urgent", "completed"), 30.0)
    assert (state.jobs["net"].status, state.jobs["net"].target) == ("running", 4)


def slow_with_four(at):
    """A job that had four workers while its machine was busy, and shrank to one."""
    state = decide(PoolState(cores=4), JobSubmitted(job("net", most=4)), 1.0)
    net = replace(state.jobs["net"], paces=((1, 1.0),))
    state = replace(state, jobs={"net": net})
    return seen(state, "net", at, 3.0, 9000.0)


def test_one_slow_measurement_is_taken_again_after_a_minute_and_then_the_job_grows():
    state = slow_with_four(10.0)
    assert state.jobs["net"].target == 1
    state = decide(state, TimePassed(), 10.0 + RETRY_S / 2)
    assert state.jobs["net"].target == 1
    state = decide(state, TimePassed(), 11.0 + RETRY_S)
    assert state.jobs["net"].target == 4
    state = seen(state, "net", 20.0 + RETRY_S, 0.3, 9000.0)
    state = decide(state, TimePassed(), 9999.0)
    assert (state.jobs["net"].target, state.jobs["net"].doubts) == (4, ())


def test_workers_that_are_slow_each_time_are_tried_ever_more_rarely():
    state, tried = slow_with_four(10.0), []
    while state.at < 4000.0:
        before = state.jobs["net"].target
        state = decide(state, TimePassed(), state.at + 5.0)
        if state.jobs["net"].target > before:
            tried.append(state.at)
            for _ in range(3):  # of one stay
                state = seen(state, "net", state.at + 1.0, 3.0, 9000.0)
    waits = [after - before for before, after in pairwise(tried)]
    assert 4 <= len(tried) <= 6
    assert all(1.7 < after / before < 2.3 for before, after in pairwise(waits))


def test_a_pace_of_an_earlier_version_or_of_fewer_workers_that_were_quicker_is_taken_again():
    net = job("net", paces=((1, 1.0), (2, 2.0), (4, 0.4)))
    assert believed(net, 0.0) == ((1, 1.0), (4, 0.4))
    net = replace(net, doubts=doubted(net, 2, 50.0))
    assert net.doubts == ((2, 50.0, 1),)
    assert believed(net, 50.0) == net.paces
    assert believed(net, 51.0 + RETRY_S) == ((1, 1.0), (4, 0.4))
    poor = job("poor", paces=((1, 1.0), (8, 0.9)))  # eight are hardly quicker than one
    assert believed(replace(poor, doubts=doubted(poor, 8, 5.0)), 6.0) == poor.paces


def test_no_run_begins_again_in_vain_for_workers_that_another_one_cannot_use():
    state = PoolState(cores=12)
    for number, (name, left_s) in enumerate([("short", 50.0), ("long", 100.0)]):
        state = decide(state, JobSubmitted(job(name)), 1.0 + number)
        assert state.jobs[name].target == 4
        state = seen(state, name, 10.0 + number, 1.0, left_s)
        state = decide(state, ResizeRefused(name, 4), 12.0 + number)
    for _ in range(3):
        state = decide(state, TimePassed(), state.at + 10)
        assert {each.status for each in state.jobs.values()} == {"running"}


def test_a_core_that_one_job_has_no_memory_for_is_for_another_one():
    hosts = {"one": PoolHost(cores=6, memory=8), "two": PoolHost(cores=2)}
    left_s = {"large": 900.0, "small": 90_000.0}  # a short job comes first
    state = decide(PoolState(cores=8, hosts=hosts), JobSubmitted(job("large", memory=4)), 1.0)
    state = decide(state, JobSubmitted(job("small")), 2.0)
    for now in (10.0, 20.0, 30.0):
        for name, each in state.jobs.items():
            state = decide(state, PlacesTold(name, each.places), now)
            sight = RunSeen(name, each.target, 5, 9999, left_s[name], pace=(each.target, 1.0))
            state = decide(state, sight, now + 1)
        state = decide(state, TimePassed(), now + 8)
    assert sum(each.target for each in state.jobs.values()) == 8


def test_a_run_that_has_not_begun_holds_the_workers_that_it_was_started_with():
    state = decide(PoolState(cores=4), JobSubmitted(job("old")), 1.0)
    state = decide(state, JobSubmitted(job("new", least=2)), 2.0)
    assert state.jobs["old"].target == 2
    state = decide(state, RunSeen("old", 0, begun=False), 3.0)
    assert (state.held, state.jobs["new"].target) == (4, 0), "its four workers were on their way"
    state = decide(state, RunSeen("old", 2), 4.0)
    assert state.jobs["new"].target == 2
