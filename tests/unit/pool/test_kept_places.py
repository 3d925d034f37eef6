"""A job that needs much memory is not passed for ever by those that fit, and no core idles for it.

Jobs of lower priority make room, equal ones no more than they can spare, and who comes later gets
what the job will not need.
"""

import random

import pytest
from msgspec.structs import replace

from instep.pool.ahead.forecast import TAIL_S, forecast
from instep.pool.decide import decide
from instep.pool.hosts.free_places import places_taken
from instep.pool.hosts.keeping import kept_for
from instep.pool.jobs import (
    ClientEnded,
    HostSeen,
    JobSubmitted,
    PlacesTold,
    PoolHost,
    PoolJob,
    PoolState,
    TimePassed,
)
from instep.pool.view import explanation, job_lines


def job(name, memory, least=1, most=1, **more):
    return PoolJob(id=name, share="a", at_least=least, at_most=most, memory=memory, **more)


def pool(**memory):
    hosts = {name: PoolHost(cores=8, memory=each) for name, each in memory.items()}
    return PoolState(cores=8 * len(hosts), hosts=hosts)


def settled(state, now):
    """Runs know their places, and processes and clients that are to end have ended."""
    for each in state.jobs.values():
        if each.status == "stopping":
            state = decide(state, ClientEnded(each.id, "", step=each.step + 1), now)
        state = decide(state, PlacesTold(each.id, state.jobs[each.id].places), now)
    for name in state.hosts:
        here = {each.id: each.places[name] for each in state.jobs.values() if name in each.places}
        state = decide(state, HostSeen(name, here), now)
    return state


def submitted(state, now, *jobs):
    for each in jobs:
        state = settled(decide(state, JobSubmitted(each), now), now)
    return state


def running(state):
    return {each.id: each.target for each in state.jobs.values() if each.target}


@pytest.mark.parametrize(("priority", "least"), [(5, 1), (0, 1), (5, 2)])
def test_a_job_that_needs_memory_gets_it_while_small_ones_come_again_and_again(priority, least):
    state = submitted(pool(a=10), 10.0, job("small-0", 4), job("small-1", 4))
    big = job("big", 8 // least, least, least, priority=priority)
    state = decide(state, JobSubmitted(big), 20.0)
    for number in range(2, 20):
        now = 10.0 * number + 10.0
        state = settled(state, now)
        if running(state).get("big"):
            break
        ends = next((name for name in running(state)), None)
        if ends is not None:
            state = settled(decide(state, ClientEnded(ends, "completed"), now), now)
        state = submitted(state, now, job(f"small-{number}", 4))
    assert running(state) == {"big": least}
    assert number < (5 if not priority else 4), "it waited for more than was there when it came"


def test_a_job_of_lower_priority_shrinks_and_is_parked_only_if_that_is_not_enough():
    old = job("old", 2, 1, 4)
    state = submitted(pool(a=10), 10.0, old)
    assert running(state) == {"old": 4}
    shrunk = submitted(state, 20.0, job("big", 4, priority=1))
    assert running(shrunk) == {"old": 3, "big": 1}
    parked = submitted(state, 20.0, job("big", 9, priority=1))
    assert running(settled(parked, 21.0)) == {"big": 1}
    equal = submitted(state, 20.0, job("big", 8))
    assert running(settled(equal, 21.0)) == {"old": 1, "big": 1}
    waits = submitted(state, 20.0, job("big", 9))
    assert running(settled(waits, 21.0)) == {"old": 4}, "it gives up what does not help"


def test_who_comes_later_gets_what_a_job_that_waits_will_not_need():
    state = submitted(pool(a=10, b=3), 10.0, job("long", 5), job("big", 8))
    state = submitted(state, 20.0, job("two", 2), job("one", 2), job("three", 3))
    assert running(state) == {"long": 1, "two": 1, "one": 1}
    assert {**state.jobs["two"].places, **state.jobs["one"].places} == {"a": 1, "b": 1}
    state = settled(decide(state, ClientEnded("long", "completed"), 30.0), 30.0)
    assert running(state) == {"two": 1, "one": 1, "big": 1}


def test_the_reason_and_the_start_of_a_job_that_waits_for_memory_are_said():
    long = job("long", 5, left_s=50.0, paces=((1, 1.0),))
    state = submitted(pool(a=10), 10.0, long, job("big", 8_000))
    state = replace(state, hosts={"a": replace(state.hosts["a"], memory=10_000)})
    jobs = {**state.jobs, "long": replace(state.jobs["long"], memory=5_000, step=5, seen=10.0)}
    state = decide(replace(state, jobs=jobs), TimePassed(), 20.0)
    text = "1 worker of 8.0 kB: kept for it on a, once long has given back what it has there"
    lines = explanation(state, state.jobs["big"], 20.0)
    assert lines[1] == f"waits   {text}"
    assert text in "".join(job_lines(state, 20.0))
    assert forecast(state, 20.0)["big"].starts_s == pytest.approx(40.0 + TAIL_S)
    assert lines[2].startswith("starts  in about 41 s")
    urgent = decide(state, JobSubmitted(job("first", 8_000, priority=3)), 21.0)
    assert forecast(urgent, 21.0)["first"].starts_s == pytest.approx(0.0)
    assert urgent.jobs["long"].status == "stopping"
    assert forecast(urgent, 21.0)["long"].starts_s is not None


def test_places_are_kept_where_they_make_room_and_no_more_is_given_up_than_helps():
    for seed in range(100):
        draw = random.Random(seed)
        hosts = {
            f"h{n}": PoolHost(cores=draw.randint(1, 6), memory=draw.choice([0, 8, 16]))
            for n in range(draw.randint(1, 4))
        }
        state = PoolState(cores=sum(h.cores for h in hosts.values()), hosts=hosts)
        for n in range(draw.randint(1, 8)):
            least = draw.randint(1, 2)
            most = draw.randint(least, 6)
            priority = draw.randint(0, 3)
            one = job(f"job-{n}", draw.choice([0, 2, 4]), least, most, priority=priority)
            state = submitted(state, 10.0 + n, one)
        taken = places_taken(state)
        big = job("big", draw.choice([4, 8]), draw.randint(1, 2), 2, priority=draw.randint(0, 4))
        found = kept_for(state.hosts, state.jobs, taken, big, 50.0)
        room = sum(min(h.cores, h.memory // big.memory if h.memory else 99) for h in hosts.values())
        assert (found is None) == (room < big.at_least)
        if found is None:
            continue
        left = {**taken, **{name: dict(places) for name, places in found.gives.items()}}
        for name, workers in () if found.waits_for else found.places.items():
            others = {i: places[name] for i, places in left.items() if places.get(name)}
            assert sum(others.values()) + workers <= hosts[name].cores
            memory = sum(state.jobs[i].memory * each for i, each in others.items())
            assert memory + workers * big.memory <= (hosts[name].memory or 10**9)
        for name, places in found.gives.items():
            kept, other = sum(places.values()), state.jobs[name]
            assert kept >= other.at_least or (not kept and other.priority < big.priority)
            assert other.priority <= big.priority
            assert any(taken[name].get(n, 0) > places.get(n, 0) for n in found.places)
