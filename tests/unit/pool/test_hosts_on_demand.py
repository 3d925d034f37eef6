"""Hosts that a pool starts when jobs wait for them, gives back, or is about to lose."""

import time

import pytest
from msgspec.structs import replace

from instep import detached
from instep.errors import SpecError
from instep.launch.join_folder import JoinFolder
from instep.pool.decide import decide
from instep.pool.hosts.demand import ASK_S, HostsInVain, IdleHosts, asked_for
from instep.pool.hosts.host_gate import HostGate
from instep.pool.jobs import (
    ClientEnded,
    HostAway,
    HostSeen,
    HostSpec,
    JobSubmitted,
    PlacesTold,
    PoolHost,
    PoolJob,
    PoolState,
    RunSeen,
    TimePassed,
)
from instep.pool.policy import plan
from instep.pool.pool_file import pool_of
from instep.pool.view import host_lines


def host(**more):
    return PoolHost(cores=4, away=0.0, on_demand=True, **more)


def job(name, least=1, **more):
    return PoolJob(id=name, share="a", at_least=least, at_most=8, **more)


def waiting(*jobs, **hosts):
    """A pool in which jobs have waited for so long that hosts may be started for them."""
    state = PoolState(cores=4, hosts=hosts)
    for each in jobs:
        state = decide(state, JobSubmitted(replace(each, submitted=100.0)), 100.0)
    return state


def asked(state):
    return [*asked_for(state, 100.0 + ASK_S)]


def test_hosts_are_asked_for_in_their_order_as_many_as_the_jobs_need_that_wait():
    hosts = {name: host() for name in "abc"}
    assert asked(waiting(**hosts)) == []
    assert asked(waiting(job("one"), **hosts)) == ["a"]
    assert asked(waiting(job("one", 3), job("two", 2), **hosts)) == ["a", "b"]
    assert asked(waiting(job("one", 6), **hosts)) == ["a", "b"]
    assert asked(waiting(job("one", 13), **hosts)) == [], "it has no room on all together"
    assert not asked_for(waiting(job("one"), **hosts), 100.0 + ASK_S / 2)


def test_what_a_host_that_is_there_has_room_for_is_asked_of_no_other():
    there = PoolHost(cores=2)
    assert asked(waiting(job("one", 2), here=there, more=host())) == []
    assert asked(waiting(job("one", 2), job("two", 1), here=there, more=host())) == ["more"]
    state = waiting(job("one", 1, memory=9), here=replace(there, memory=8), more=host(memory=16))
    assert asked(state) == ["more"]
    assert asked(waiting(job("one", 1, memory=17), more=host(memory=16))) == []


def test_nobody_asks_for_a_job_that_waits_for_something_else():
    state = waiting(job("one", 3), job("two", 3), a=host(), b=host())
    assert asked(replace(state, limits={"a": 3})) == ["a"]
    assert asked(waiting(job("one", local=True), a=host())) == []
    assert asked(waiting(job("one"), a=host(drained=True))) == []


@pytest.mark.parametrize("on_demand", [True, False])
def test_a_job_for_which_hosts_in_reach_have_no_memory_keeps_nobody_waiting(on_demand):
    """Its workers were dealt to it, and the other job waited for them."""
    hosts = {
        "here": PoolHost(cores=3, memory=8),
        "more": PoolHost(cores=1, memory=8, away=0.0, on_demand=on_demand),
    }
    large, other = job("large", 2, memory=8), replace(job("other", 3), share="b")
    state = PoolState(cores=3, hosts=hosts)
    for each in (large, other):
        state = decide(state, JobSubmitted(replace(each, submitted=100.0)), 100.0)
    state = decide(state, TimePassed(), 103.0)
    assert state.jobs["other"].places == {"here": 3}
    why = plan(state, 103.0).reasons["large"]
    assert why == "it needs 2 workers at least, and the hosts in reach have memory for 1"
    state = decide(state, ClientEnded("other", "completed"), 110.0)
    state = decide(state, TimePassed(), 120.0)
    assert asked_for(state, 120.0) == ({"more": {"large"}} if on_demand else {})
    state = decide(state, HostSeen("more", {}), 121.0)
    state = decide(state, TimePassed(), 122.0)
    assert state.jobs["large"].places == {"here": 1, "more": 1}


def test_a_host_that_was_given_back_is_asked_for_again():
    state = waiting(job("one"), a=host(leaving=True))
    assert asked(state) == ["a"]
    state = decide(state, HostSeen("a", {}), 104.0)
    assert state.jobs["one"].places == {"a": 4}


def test_a_host_is_idle_once_nothing_has_run_there_for_its_time():
    idle = IdleHosts({"a": 10.0, "b": float("inf")})
    state = PoolState(cores=2, hosts={n: PoolHost(cores=1, on_demand=n == "a") for n in "ab"})
    assert idle.find(state, 0.0) == []
    assert idle.find(state, 10.0) == []
    assert idle.find(state, 11.0) == ["a"]
    busy = decide(state, JobSubmitted(job("net")), 1.0)
    assert idle.find(busy, 12.0) == []
    assert idle.find(state, 21.0) == []
    assert idle.find(state, 23.0) == ["a"]


def test_the_jobs_of_a_host_that_will_soon_be_gone_move_and_it_is_back_when_it_joins_again():
    state = PoolState(cores=4, hosts={name: PoolHost(cores=2) for name in "ab"})
    state = decide(state, JobSubmitted(replace(job("net", 2), at_most=2)), 1.0)
    (first,) = state.jobs["net"].places
    other = "b" if first == "a" else "a"
    state = decide(state, PlacesTold("net", {first: 2}), 2.0)
    state = decide(state, RunSeen("net", 2, 5), 3.0)
    state = decide(state, HostSeen(first, {"net": 2}, leaving=True), 4.0)
    assert state.jobs["net"].places == {other: 2}
    assert ", leaving" in host_lines(state)[0]
    state = decide(state, PlacesTold("net", {other: 2}), 5.0)
    state = decide(state, HostSeen(other, {"net": 2}), 6.0)
    state = decide(decide(state, HostAway(first), 7.0), TimePassed(), 60.0)
    assert (state.held, state.cores) == (2, 2), "something is taken to be where nothing can be"
    state = decide(state, HostSeen(first, {}), 61.0)
    assert state.cores == 4
    assert decide(state, ClientEnded("net", "completed"), 62.0).held <= 2


@pytest.fixture
def gate(tmp_path):
    """A gate for one host on demand, whose command is never done."""
    folder = JoinFolder(tmp_path / "certificates")
    folder.prepare(1)
    spec = {"a": HostSpec(cores=4, start="sh -c 'sleep 600; true'", idle="1h")}
    made = HostGate(("127.0.0.1", 0), spec, folder, lambda text: None)
    made.started = tmp_path / "hosts"
    yield made
    made.close()


def test_a_command_starts_with_the_first_job_that_waits_and_ends_if_none_does_any_more(gate):
    lock, idle = gate.started / "0.lock", PoolState(cores=4, hosts={"a": host()})
    gate.start_missing(gate.started, idle)
    assert not detached.has_begun(lock)
    since = time.time() - ASK_S
    state = decide(idle, JobSubmitted(job("net", submitted=since)), since)
    gate.start_missing(gate.started, state)
    while not detached.has_begun(lock):
        pass
    gate._tried.clear()
    gate.start_missing(gate.started, idle)
    gate._own["a"].wait()
    while detached.lives(lock):  # what it has started has the file too
        pass


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('start = "ssh a"\nidle = "soon"', r"hosts\.a\.idle: .*soon"),
        ('idle = "5m"', r"hosts\.a\.idle = '5m' is for a host that the scheduler starts"),
    ],
)
def test_what_no_host_on_demand_can_be_is_refused(tmp_path, line, said):
    path = tmp_path / "pool.toml"
    path.write_text(f'listen = "127.0.0.1:2220"\n[hosts.a]\ncores = 1\n{line}\n')
    with pytest.raises(SpecError, match=said):
        pool_of(path)


def test_a_host_is_started_less_and_less_often_for_a_job_that_does_not_come_to_it():
    vain, now, starts = HostsInVain({"a": 30.0}), 0.0, []
    while now < 900.0:
        if vain.due({"a": {"one"}}, now):
            starts.append(now)
            now += 30.0
            vain.given_back("a", now, ran=False)
        now += ASK_S
    assert starts == [0.0, 90.0, 240.0, 510.0], "after pauses of 60, 120, 240 s"
    assert vain.due({"a": {"one", "two"}}, now) == {"a"}, "another job comes at once"
    vain.given_back("a", now, ran=True)
    assert vain.due({"a": {"one"}}, now) == {"a"}, "something came to it"


def test_it_is_known_whether_something_has_run_on_a_host_since_it_came():
    idle = IdleHosts({"a": 10.0})
    state = PoolState(cores=4, hosts={"a": host()})
    there = replace(state, hosts={"a": replace(host(), away=None)})
    busy = replace(there, hosts={"a": replace(host(workers={"one": 1}), away=None)})
    for seen, ran in ((there, set()), (busy, {"a"}), (there, {"a"}), (state, set())):
        idle.find(seen, 0.0)
        assert idle.ran == ran
