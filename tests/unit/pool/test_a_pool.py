"""A pool: no core twice, no half gang, no job lost, wherever its scheduler is killed."""

import pytest
from msgspec.structs import replace

from instep.errors import RunError
from instep.pool.decide import decide
from instep.pool.jobs import (
    CancelAsked,
    ClientEnded,
    JobSubmitted,
    PoolJob,
    PoolState,
    ResizeRefused,
    RunSeen,
    TimePassed,
)
from instep.pool.policy import plan
from instep.pool.pool_journal import PoolJournal
from instep.pool.requests import ask, pending
from instep.pool.view import explanation, job_lines
from simulation.pooled import story


def job(name, share="a", least=1, most=8, **more):
    return PoolJob(id=name, share=share, at_least=least, at_most=most, **more)


def after(state, *events, now=1.0):
    for number, event in enumerate(events):
        state = decide(state, event, now + number)
    return state


def targets(state):
    return {each.id: each.target for each in state.jobs.values()}


def test_in_every_story_each_job_ends_once_and_no_core_is_given_twice():
    told = [story(seed) for seed in [*range(100), 772]]  # in 772 one dies before each start
    assert sum(each["kills"] for each in told) > 300


@pytest.mark.slow
def test_ten_thousand_stories_hold():
    for seed in range(10_000):
        story(seed)


def test_a_job_that_waits_gets_cores_by_shrinking_and_only_when_processes_have_ended():
    state = after(PoolState(cores=4), JobSubmitted(job("old")))
    assert targets(state) == {"old": 4}
    state = after(state, JobSubmitted(job("new", least=2)), now=10)
    assert targets(state) == {"old": 2, "new": 0}
    assert state.held == 4
    assert "old gives them now" in "".join(explanation(state, state.jobs["new"], 10))
    state = after(state, RunSeen("old", 3), now=11)
    assert targets(state)["new"] == 0, "half a gang was started"
    state = after(state, RunSeen("old", 2), now=12)
    assert targets(state) == {"old": 2, "new": 2}


def test_a_higher_priority_parks_a_job_only_if_nothing_is_left_to_shrink():
    state = after(PoolState(cores=2), JobSubmitted(job("one")), JobSubmitted(job("two", least=1)))
    state = after(state, RunSeen("one", 1), now=20)
    assert targets(state) == {"one": 1, "two": 1}
    state = after(state, JobSubmitted(job("late", priority=0)), now=30)
    assert targets(state) == {"one": 1, "two": 1, "late": 0}, "an equal one was parked"
    state = after(state, JobSubmitted(job("high", priority=5)), now=31)
    (parked,) = [each for each in state.jobs.values() if each.status == "stopping"]
    state = after(state, ClientEnded(parked.id, "", step=7), now=32)
    assert targets(state)["high"] == 1
    assert (state.jobs[parked.id].status, state.jobs[parked.id].step) == ("waiting", 7)
    state = after(state, ClientEnded("high", "completed"), now=40)
    assert state.jobs[parked.id].status == "running"


def test_shares_get_what_their_weights_say_whoever_submits_more():
    state = PoolState(cores=9, weights={"a": 2.0, "b": 1.0})
    many = [JobSubmitted(job(f"a{n}", "a")) for n in range(3)]
    state = after(state, *many, JobSubmitted(job("b0", "b", most=9)))
    wanted = plan(state, 5.0).workers
    assert wanted["b0"] == 3
    assert sum(wanted.values()) == 9
    limited = replace(state, limits={"a": 4})
    assert sum(n for name, n in plan(limited, 5.0).workers.items() if name[0] == "a") == 4


def test_of_equal_shares_that_do_not_both_fit_the_one_runs_that_used_less():
    state = after(PoolState(cores=1, used={"a": 9000.0}, at=0.5), JobSubmitted(job("x", "a")))
    state = after(state, JobSubmitted(job("y", "b")), now=100)
    assert state.jobs["x"].status == "stopping"


def test_a_job_begins_with_its_least_and_up_to_four_and_a_search_with_all():
    jobs = [
        job("all", most=16),
        job("least", least=12, most=16),
        job("net", most=16, kind="search"),
    ]
    begun = [after(PoolState(cores=16), JobSubmitted(each)) for each in jobs]
    assert [targets(each) for each in begun] == [{"all": 4}, {"least": 12}, {"net": 16}]
    said = [explanation(each, *each.jobs.values(), 2.0) for each in begun]
    assert "more than 4 once its steps are measured" in said[0][2]
    assert "more than 12 once its steps are measured" in said[1][2]
    assert not any("measured" in line for line in said[2])


def test_a_run_that_refuses_another_size_keeps_its_workers():
    state = after(PoolState(cores=4), JobSubmitted(job("rigid")), JobSubmitted(job("new")))
    state = after(state, ResizeRefused("rigid", 4), TimePassed(), now=20)
    assert targets(state) == {"rigid": 4, "new": 0}
    assert "another start at its last commit" in "".join(
        explanation(state, state.jobs["rigid"], 21)
    )


def test_a_job_whose_client_dies_goes_on_and_fails_if_it_never_gets_further():
    state = after(PoolState(cores=1), JobSubmitted(job("net")))
    for number in range(3):
        state = after(state, ClientEnded("net", "", "no room"), now=10 * number + 10)
        assert state.jobs["net"].status == "running"
    state = after(state, ClientEnded("net", "", "no room", step=5), now=50)
    assert (state.jobs["net"].status, state.jobs["net"].in_vain) == ("running", 0)
    for number in range(4):
        state = after(state, ClientEnded("net", "", "no room", step=5), now=10 * number + 60)
    assert (state.jobs["net"].outcome, state.jobs["net"].why) == ("failed", "no room")


def test_a_cancelled_job_stops_and_one_that_waits_never_starts():
    state = after(PoolState(cores=1), JobSubmitted(job("one")), JobSubmitted(job("two")))
    state = after(state, CancelAsked("one"), CancelAsked("two"), CancelAsked("nobody"), now=10)
    assert state.jobs["one"].status == "stopping"
    assert state.jobs["two"].outcome == "cancelled"
    assert after(state, ClientEnded("one", "")).jobs["one"].outcome == "cancelled"


def test_the_journal_gives_the_next_scheduler_the_same_state(tmp_path):
    with pytest.raises(RunError, match="no pool in"):
        PoolJournal(tmp_path, write=False)
    state, journal = PoolState(cores=2), PoolJournal(tmp_path, write=True)
    events = [JobSubmitted(job("one")), JobSubmitted(job("two", "b")), RunSeen("one", 1, 5, 9, 4.0)]
    for number, event in enumerate(events):
        following = decide(state, event, number + 1.0)
        journal.write(event, state, following)
        state = following
    journal.close()
    again = PoolJournal(tmp_path, write=False)
    assert again.load(PoolState(cores=2)) == state
    again.close()
    assert [line.split()[0] for line in job_lines(state)] == ["job", "one", "two"]


def test_requests_come_in_their_order_and_the_same_key_is_one_job(tmp_path):
    ask(tmp_path, JobSubmitted(job("one", key="k")))
    ask(tmp_path, CancelAsked("one"))
    (tmp_path / "inbox" / "0-torn.json").write_text('{"type":')
    assert [each for _, each in pending(tmp_path)] == [
        JobSubmitted(job("one", key="k")),
        CancelAsked("one"),
    ]
    state = after(
        PoolState(cores=2), JobSubmitted(job("one", key="k")), JobSubmitted(job("b", key="k"))
    )
    assert [*state.jobs] == ["one"]
