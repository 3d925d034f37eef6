"""The master's mind: every story of a run as a line of events, and what follows from it."""

import signal
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from instep.comm.protocol.messages import (
    ON_REQUEST,
    Done,
    Failed,
    Form,
    Regroup,
    Release,
    Stop,
    Whereabouts,
)
from instep.control.decisions import endings
from instep.control.decisions.actions import Finish, GoBack, Kill, KillAll, Log, Send, Start
from instep.control.decisions.crash_loop import (
    MAX_CRASHES,
    MOST_APART,
    MOST_LOOPS,
    MOST_LOSSES,
    MOST_UNFORMED,
    OUT_OF_SYSTEM,
)
from instep.control.decisions.decide import BROKEN_S, decide
from instep.control.decisions.endings import BETTER_CAUSE_S, EXIT_S, UNSEEN
from instep.control.decisions.events import (
    Broke,
    Built,
    Ended,
    Formed,
    HostLost,
    Hung,
    Interrupted,
    Joined,
    LastMessage,
    Restarted,
    RolledBack,
    Scaled,
    Silent,
    Tick,
    WentBack,
)
from instep.control.decisions.generations import (
    BOUND_S,
    BUILDING_S,
    FIRST_MEETING_S,
    MEETING_S,
)
from instep.control.decisions.phases import Phase, TransitionError
from instep.control.decisions.state import State, TimeLimit, first_members
from instep.control.stop_rules import Fired
from instep.errors import INTERRUPTED, PeerError


def failed(kind="error", cause="ValueError: no", step=4, exit_code=5):
    return Failed(
        kind=kind, cause=cause, where="", line="", step=step, phase="forward", exit_code=exit_code
    )


NO_THREAD = "the group of 2 workers did not form: can't start new thread."
ECHO = failed("PeerError", "another worker went away in the middle of a collective.")


def after(*events, workers=2, time_limit=None, recovers=False):
    """State and actions after pieces of events; a number lets that many seconds pass.

    A worker that joins is built at once, and one that is told to form a group does.
    """
    state = State(members=first_members(workers), time_limit=time_limit, recovers=recovers)
    now, actions = 0.0, []
    for piece in events:
        if isinstance(piece, (int, float)):
            now += piece
            piece = Tick(step=5)
        state, follows = decide(state, piece, now)
        actions += follows
        if isinstance(piece, Joined):
            state, follows = decide(state, Built(piece.worker), now)
            actions += follows
        for a in follows:
            if isinstance(a, Send) and isinstance(a.message, Form):
                state, _ = decide(state, Formed(a.worker, a.message.generation), now)
    return state, actions


def ends(actions):
    return [action for action in actions if isinstance(action, Finish)]


def blamed(actions):
    return [a.fields for a in actions if isinstance(a, Log) and a.name == "worker_failed"]


def everybody_joined(workers=2):
    return [Joined(n) for n in range(workers)]


def everybody_done(workers=2, rule="epochs", step=9):
    return [LastMessage(n, Done(generation=1, step=step, rule=rule)) for n in range(workers)]


def everybody_ended(workers=2, code=0, step=9):
    return [Ended(n, code, step) for n in range(workers)]


def test_no_group_forms_before_all_have_joined():
    state, actions = after(Joined(1))
    assert (state.phase, actions) == ("gathering", [])


def test_once_all_have_joined_ranks_follow_the_order_of_numbers():
    state, actions = after(Joined(2), Joined(0), Joined(1), workers=3)
    assert state.phase == "training"
    assert [a.worker for a in actions if isinstance(a, Send)] == [0, 1, 2]
    forms = [a.message for a in actions if isinstance(a, Send)]
    told = {"generation": 1, "members": [0, 1, 2], "timeout_s": FIRST_MEETING_S, "checkpoint": ""}
    assert forms == [Form(rank=n, **told) for n in range(3)]


def test_the_log_says_how_long_gathering_took():
    _, actions = after(Joined(0), 2.5, Joined(1))
    (log,) = [a for a in actions if isinstance(a, Log)]
    assert log.name == "generation_started"
    assert log.fields == {"generation": 1, "members": [0, 1], "reason": "start", "seconds": 2.5}


def test_a_worker_that_joins_twice_is_refused():
    for joined in ([Joined(0)], everybody_joined()):
        with pytest.raises(TransitionError, match=r"member 0 is \w+ in generation \d"):
            after(*joined, Joined(0))


def test_no_worker_is_released_before_all_are_done():
    _, actions = after(
        *everybody_joined(), LastMessage(1, Done(generation=1, step=9, rule="epochs"))
    )
    assert Send(1, Release()) not in actions


def test_when_all_are_done_all_are_released_and_the_run_is_over_when_they_have_ended():
    events = [*everybody_joined(), *everybody_done()]
    state, actions = after(*events)
    assert state.phase == "releasing"
    assert [Send(0, Release()), Send(1, Release())] == actions[-2:]
    assert ends(after(*events, Ended(0, 0, 9))[1]) == []
    state, actions = after(*events, *everybody_ended())
    assert state.phase == "ended"
    assert ends(actions) == [Finish("completed", "epochs", 9, 0)]


@pytest.mark.parametrize(
    ("rule", "finish"),
    [
        ("epochs", Finish("completed", "epochs", 9, 0)),
        ("steps", Finish("completed", "steps", 9, 0)),
        ("own loop", Finish("completed", "own loop", 9, 0)),
        ("stop_after_steps", Finish("stopped", "stop_after_steps", 9, 0)),
        ("interrupted", Finish("interrupted", "interrupted", 9, INTERRUPTED)),
        (ON_REQUEST, Finish("interrupted", "interrupted", 9, INTERRUPTED)),
    ],
)
def test_the_rule_by_which_workers_stopped_decides_the_outcome(rule, finish):
    events = [*everybody_joined(), *everybody_done(rule=rule), *everybody_ended()]
    assert ends(after(*events)[1]) == [finish]


def test_a_released_worker_that_does_not_exit_is_killed_after_a_timeout():
    events = [*everybody_joined(), *everybody_done(), Ended(0, 0, 9)]
    assert ends(after(*events, EXIT_S * 0.99)[1]) == []
    _, actions = after(*events, EXIT_S)
    assert actions[-2:] == [KillAll(), Finish("completed", "epochs", 9, 0)]


def test_a_released_worker_that_is_killed_changes_nothing():
    events = [*everybody_joined(), *everybody_done(), Ended(0, 0, 9), Ended(1, -9, 9)]
    assert ends(after(*events)[1]) == [Finish("completed", "epochs", 9, 0)]


def test_a_failure_kills_the_others_at_once_and_ends_the_run_when_they_are_gone():
    events = [*everybody_joined(), LastMessage(1, failed())]
    state, actions = after(*events)
    assert (state.phase, actions[-1]) == ("ending", KillAll())
    assert [fields["worker"] for fields in blamed(actions)] == [1]
    _, actions = after(*events, *everybody_ended(code=-9))
    assert ends(actions) == [Finish("failed", "error", 3, 5)]
    assert len(blamed(actions)) == 1


def test_the_exit_code_of_a_run_is_that_of_the_error_that_ended_it():
    events = [
        *everybody_joined(),
        LastMessage(0, failed("DataError", exit_code=4)),
        *everybody_ended(),
    ]
    assert ends(after(*events)[1])[0].exit_code == 4


def test_a_worker_that_fails_before_all_have_joined_ends_the_run():
    _, actions = after(
        Joined(0), LastMessage(0, failed("RecipeError", step=0, exit_code=3)), Ended(0, 1, 0)
    )
    assert ends(actions) == [Finish("failed", "RecipeError", 0, 3)]


def test_a_broken_connection_reported_before_its_cause_waits_and_the_cause_is_named():
    events = [
        *everybody_joined(),
        LastMessage(0, ECHO),
        BETTER_CAUSE_S / 2,
        LastMessage(1, failed()),
    ]
    _, actions = after(*events)
    assert [(f["worker"], f["kind"]) for f in blamed(actions)] == [(1, "error")]


def test_a_broken_connection_reported_before_a_kill_waits_and_the_signal_is_named():
    _, actions = after(*everybody_joined(), LastMessage(0, ECHO), Ended(0, 1, 3), Ended(1, -11, 3))
    assert [(f["worker"], f["kind"]) for f in blamed(actions)] == [(1, "killed")]
    assert "SIGSEGV" in blamed(actions)[0]["cause"]


def test_a_broken_connection_without_another_cause_is_named_after_a_second():
    events = [*everybody_joined(), LastMessage(0, ECHO)]
    assert blamed(after(*events, BETTER_CAUSE_S * 0.99)[1]) == []
    _, actions = after(*events, BETTER_CAUSE_S)
    assert [f["kind"] for f in blamed(actions)] == ["PeerError"]


def test_a_broken_connection_reported_after_its_cause_changes_nothing():
    _, actions = after(
        *everybody_joined(), LastMessage(1, failed()), LastMessage(0, ECHO), *everybody_ended()
    )
    assert [f["worker"] for f in blamed(actions)] == [1]


def test_an_exit_that_is_seen_before_the_last_message_waits_for_it():
    events = [*everybody_joined(), Ended(1, 1, 3), 0.1, LastMessage(1, failed()), Ended(0, -9, 3)]
    _, actions = after(*events)
    assert [f["cause"] for f in blamed(actions)] == ["ValueError: no"]
    assert ends(actions) == [Finish("failed", "error", 3, 5)]


def test_a_good_exit_that_is_seen_before_the_last_done_is_no_failure():
    first, last = everybody_done()
    _, actions = after(*everybody_joined(), first, Ended(1, 0, 9), last, Ended(0, 0, 9), EXIT_S)
    assert blamed(actions) == []
    assert [end.outcome for end in ends(actions)] == ["completed"]


def test_an_exit_without_a_last_message_is_named_with_its_code_and_last_step():
    _, actions = after(*everybody_joined(), Ended(1, 3, 7), BETTER_CAUSE_S)
    (fields,) = blamed(actions)
    assert (fields["worker"], fields["step"], fields["kind"]) == (1, 7, "exit")
    assert "ended with code 3 and said nothing" in fields["cause"]


def test_an_exit_whose_code_is_unknown_is_reported_without_one():
    _, actions = after(*everybody_joined(), Ended(1, UNSEEN, 7), BETTER_CAUSE_S)
    (fields,) = blamed(actions)
    assert (fields["worker"], fields["step"], fields["kind"]) == (1, 7, "exit")
    assert "disconnected without a message" in fields["cause"]
    assert "code" not in fields["cause"]


@pytest.mark.parametrize(
    ("number", "name", "hint"),
    [
        (signal.SIGKILL, "SIGKILL", "ran out of memory"),
        (signal.SIGSEGV, "SIGSEGV", "Native code"),
        (signal.SIGBUS, "SIGBUS", "shared memory may be full"),
        (signal.SIGTERM, "SIGTERM", "(signal 15)."),
        (99, "an unknown signal", "(signal 99)."),
    ],
)
def test_a_worker_that_a_signal_ended_is_named_at_once_with_the_signal(number, name, hint):
    _, actions = after(*everybody_joined(), Ended(0, -number, 5))
    (fields,) = blamed(actions)
    assert (fields["worker"], fields["step"], fields["kind"]) == (0, 5, "killed")
    assert name in fields["cause"]
    assert hint in fields["cause"]
    assert KillAll() in actions


def test_a_silent_worker_ends_a_run_whose_workers_cannot_be_replaced():
    silent = Silent(1, 7, "exchange", "its process gave no sign of life.")
    state, actions = after(*everybody_joined(), silent)
    (fields,) = blamed(actions)
    assert (fields["worker"], fields["kind"], fields["step"]) == (1, "silent", 7)
    assert (fields["phase"], fields["cause"]) == ("exchange", silent.cause)
    assert (state.phase, state.blame.failed.exit_code) == ("ending", 5)
    assert after(*everybody_joined(), silent, recovers=True)[0].phase == "training"
    assert after(*everybody_joined(), *everybody_done(), silent)[0].phase == "releasing"
    stranger = Silent(5, 7, "exchange", "its process gave no sign of life.")
    assert after(*everybody_joined(), stranger)[0].phase == "training"


def test_the_first_interrupt_asks_every_worker_to_stop_and_kills_none():
    state, actions = after(*everybody_joined(), Interrupted("SIGINT", step=7))
    assert state.phase == "training"
    why = {"rule": "interrupted", "step": 7, "why": "Ctrl-C came"}
    assert actions[-3:] == [
        Log("stop_requested", {"by": "SIGINT", **why}),
        Send(0, Stop(rule="interrupted")),
        Send(1, Stop(rule="interrupted")),
    ]


def test_the_second_interrupt_kills_and_ends_as_interrupted():
    events = [*everybody_joined(), Interrupted("SIGINT"), Interrupted("SIGINT")]
    state, actions = after(*events)
    assert (state.phase, actions[-1]) == ("ending", KillAll())
    _, actions = after(*events, *everybody_ended(code=-9))
    assert ends(actions) == [Finish("interrupted", "interrupted", 0, INTERRUPTED)]
    assert blamed(actions) == []


REACHED = Fired("target", 8, "accuracy 0.98 reached the target 0.97")


def requests(actions):
    return [a.fields for a in actions if isinstance(a, Log) and a.name == "stop_requested"]


def stops(actions):
    sends = [a for a in actions if isinstance(a, Send)]
    return [(a.worker, a.message.rule) for a in sends if isinstance(a.message, Stop)]


def test_a_rule_that_fired_is_logged_with_its_figures_and_names_the_end():
    events = [*everybody_joined(), REACHED]
    state, actions = after(*events)
    assert state.phase == "training"
    why = "accuracy 0.98 reached the target 0.97"
    assert requests(actions) == [{"by": "master", "rule": "target", "step": 8, "why": why}]
    assert stops(actions) == []  # whoever told the figures passes the verdict on
    _, actions = after(*events, *everybody_done(rule=ON_REQUEST), *everybody_ended())
    assert ends(actions) == [Finish("stopped", "target", 9, 0)]


@pytest.mark.parametrize(
    ("asked", "finish"),
    [
        ([REACHED, Interrupted("SIGINT")], Finish("stopped", "target", 9, 0)),
        ([Interrupted("SIGINT"), REACHED], Finish("interrupted", "interrupted", 9, INTERRUPTED)),
        ([REACHED, Fired("plateau", 9, "no")], Finish("stopped", "target", 9, 0)),
    ],
)
def test_of_several_that_ask_for_a_stop_the_first_is_its_rule(asked, finish):
    events = [
        *everybody_joined(),
        *asked,
        *everybody_done(rule=ON_REQUEST),
        *everybody_ended(),
    ]
    assert ends(after(*events)[1]) == [finish]


@pytest.mark.parametrize(
    ("last", "finish"),
    [
        (8, Finish("interrupted", "interrupted", 8, INTERRUPTED)),
        (9, Finish("stopped", "target", 9, 0)),
    ],
)
def test_a_rule_has_not_ended_a_run_that_an_interrupt_ends_sooner(last, finish):
    """As where all had to go back, after the rule had fired and before its last step."""
    stops = [REACHED, Interrupted("SIGINT")]
    events = [*everybody_joined(), *stops, *everybody_done(rule=ON_REQUEST, step=last)]
    assert ends(after(*events, *everybody_ended())[1]) == [finish]


def test_a_rule_that_fires_when_the_run_ends_by_itself_changes_nothing():
    events = [*everybody_joined(), REACHED, *everybody_done(), *everybody_ended()]
    assert ends(after(*events)[1]) == [Finish("completed", "epochs", 9, 0)]
    _, actions = after(*everybody_joined(), *everybody_done(), REACHED)
    assert requests(actions) == []


@pytest.mark.parametrize(("spent_s", "left_s"), [(0.0, 30.0), (20.0, 10.0)])
def test_when_the_time_of_all_sessions_is_up_every_worker_gets_one_stop(spent_s, left_s):
    limit = TimeLimit(30.0, began=0.0, spent_s=spent_s)
    events = [*everybody_joined(), left_s - 0.25]
    assert requests(after(*events, time_limit=limit)[1]) == []
    _, actions = after(*events, 0.5, 0.5, time_limit=limit)
    why = "the run had taken 30 s, and its limit is 30 s"
    assert requests(actions) == [{"by": "master", "rule": "time_limit", "step": 5, "why": why}]
    assert stops(actions) == [(0, "time_limit"), (1, "time_limit")]
    ending = [*everybody_done(rule=ON_REQUEST), *everybody_ended()]
    _, actions = after(*events, 0.5, *ending, time_limit=limit)
    assert ends(actions) == [Finish("stopped", "time_limit", 9, 0)]


def test_a_time_limit_that_passes_before_the_group_is_there_waits_for_it():
    limit = TimeLimit(3.0, began=0.0)
    assert requests(after(Joined(0), 9.0, time_limit=limit)[1]) == []
    _, actions = after(Joined(0), 9.0, Joined(1), 0.1, time_limit=limit)
    assert stops(actions) == [(0, "time_limit"), (1, "time_limit")]


def test_a_time_limit_does_not_hide_a_failure():
    events = [*everybody_joined(), LastMessage(0, ECHO), 9.0, 0.1]
    _, actions = after(*events, time_limit=TimeLimit(3.0, began=0.0))
    assert [fields["kind"] for fields in blamed(actions)] == ["PeerError"]


@pytest.mark.parametrize("joined", [[], [Joined(1)]])
def test_an_interrupt_while_gathering_ends_the_run(joined):
    _, actions = after(*joined, Interrupted("SIGTERM"), Ended(1, -9, 0), EXIT_S)
    assert KillAll() in actions
    assert ends(actions) == [Finish("interrupted", "interrupted", 0, INTERRUPTED)]


def test_an_interrupt_after_all_are_done_changes_nothing():
    events = [*everybody_joined(), *everybody_done(), Interrupted("SIGINT"), Interrupted("SIGINT")]
    _, actions = after(*events, *everybody_ended())
    assert ends(actions) == [Finish("completed", "epochs", 9, 0)]
    assert KillAll() not in actions


def test_a_failure_after_the_second_interrupt_is_not_blamed():
    twice = [Interrupted("SIGINT"), Interrupted("SIGINT")]
    _, actions = after(
        *everybody_joined(), *twice, LastMessage(0, failed()), *everybody_ended(code=-9)
    )
    assert ends(actions)[0].outcome == "interrupted"


def test_a_failure_after_the_first_interrupt_is_a_failure():
    events = [
        *everybody_joined(),
        Interrupted("SIGINT"),
        LastMessage(0, failed()),
        *everybody_ended(code=-9),
    ]
    assert ends(after(*events)[1]) == [Finish("failed", "error", 3, 5)]


@pytest.mark.parametrize("joined", [[], everybody_joined()])
def test_a_lost_host_ends_the_run_at_once_with_what_it_said_last(joined):
    _, actions = after(*joined, HostLost(1, "ImportError: no torch"))
    (fields,) = blamed(actions)
    assert (fields["worker"], fields["kind"]) == (-1, "host")
    assert "ended with code 1. ImportError: no torch" in fields["cause"]
    assert ends(actions) == [Finish("failed", "host", 0, 5)]


def test_a_host_that_is_lost_while_the_run_ends_finishes_it():
    _, actions = after(*everybody_joined(), *everybody_done(), HostLost(0))
    assert ends(actions) == [Finish("completed", "epochs", 9, 0)]
    _, actions = after(*everybody_joined(), LastMessage(0, failed()), HostLost(-9))
    assert ends(actions) == [Finish("failed", "error", 3, 5)]


def test_processes_that_do_not_exit_are_abandoned_after_a_timeout():
    events = [*everybody_joined(), LastMessage(0, failed()), Ended(0, 1, 4)]
    assert ends(after(*events, EXIT_S * 0.99)[1]) == []
    _, actions = after(*events, EXIT_S)
    assert actions[-2:] == [KillAll(), Finish("failed", "error", 3, 5)]


def test_a_tick_with_nothing_to_wait_for_does_nothing():
    state, _actions = after(*everybody_joined())
    assert decide(state, Tick(), 1e9) == (state, [])


def test_after_the_end_events_change_nothing():
    state, _ = after(*everybody_joined(), *everybody_done(), *everybody_ended())
    for events in (Joined(0), LastMessage(0, failed()), HostLost(1), Interrupted("SIGINT"), Tick()):
        assert decide(state, events, 99.0) == (state, [])


def test_deciding_leaves_the_state_it_was_given_as_it_was():
    state = State(members=first_members(2))
    before = repr(state)
    for events in (
        Joined(0),
        LastMessage(0, Done(generation=1, step=1, rule="steps")),
        Ended(0, 0, 1),
        HostLost(1),
    ):
        decide(state, events, 0.0)
    assert repr(state) == before


WORKERS = 3
NUMBER = st.integers(0, WORKERS - 1)
RULE = st.sampled_from(
    ["epochs", "steps", "own loop", "stop_after_steps", "interrupted", ON_REQUEST]
)


class AnyStory(RuleBasedStateMachine):
    """Whatever happens, in whatever order, the mind neither raises nor ends twice."""

    recovers = False

    def __init__(self):
        super().__init__()
        limit = TimeLimit(4.0, began=0.0)
        self.state = State(members=first_members(WORKERS), time_limit=limit, recovers=self.recovers)
        self.now, self.finishes = 0.0, 0

    def happens(self, events):
        generation = self.state.generation
        try:
            self.state, actions = decide(self.state, events, self.now)
        except TransitionError:  # no process can say this now: the shell drops it
            return
        self.finishes += len(ends(actions))
        forms = [a for a in actions if isinstance(a, Send) and isinstance(a.message, Form)]
        assert {form.message.generation for form in forms} <= {generation + 1}
        assert not forms or [form.worker for form in forms] == list(range(WORKERS))
        assert not forms or not self.state.those(frozenset({Phase.ENDED}))

    @rule(worker=NUMBER)
    def joins(self, worker):
        self.happens(Joined(worker))

    @rule(worker=NUMBER)
    def is_built(self, worker):
        if worker in self.state.joined:
            self.happens(Built(worker))

    @rule(worker=NUMBER, late=st.integers(0, 2))
    def has_formed(self, worker, late):
        self.happens(Formed(worker, self.state.generation - late))

    @rule(worker=NUMBER, late=st.integers(0, 2))
    def breaks(self, worker, late):
        self.happens(Broke(worker, self.state.generation - late))

    @rule(worker=NUMBER, step=st.integers(0, 5), why=RULE)
    def is_done(self, worker, step, why):
        self.happens(LastMessage(worker, Done(generation=1, step=step, rule=why)))

    @rule(worker=NUMBER, echo=st.booleans())
    def fails(self, worker, echo):
        self.happens(LastMessage(worker, ECHO if echo else failed()))

    @rule(worker=NUMBER, code=st.sampled_from([0, 1, 9, -2, -9, -11, -99]))
    def ends_its_process(self, worker, code):
        self.happens(Ended(worker, code, 1))

    @rule(code=st.sampled_from([0, 1, -9]))
    def loses_the_host(self, code):
        self.happens(HostLost(code))

    @rule(by=st.sampled_from(["SIGINT", "SIGTERM"]))
    def is_interrupted(self, by):
        self.happens(Interrupted(by))

    @rule(step=st.integers(1, 5))
    def reaches_a_target(self, step):
        self.happens(Fired("target", step, "it was reached"))

    @rule(seconds=st.floats(0, 3))
    def waits(self, seconds):
        self.now += seconds
        self.happens(Tick())

    @invariant()
    def ends_once_at_most(self):
        assert self.finishes == (self.state.phase == "ended")

    def teardown(self):
        self.happens(Interrupted("SIGINT"))
        self.happens(Interrupted("SIGINT"))
        for worker in range(WORKERS):
            self.happens(Ended(worker, 0, 1))
        for _ in range(4):
            self.waits(EXIT_S)
        assert self.finishes == 1, f"all processes have ended and the run has not: {self.state}"


class AnyStoryThatRecovers(AnyStory):
    """And where the lost are replaced."""

    recovers = True


TestAnyStoryThatRecovers = AnyStoryThatRecovers.TestCase
TestAnyStoryThatRecovers.settings = settings(max_examples=100, stateful_step_count=30)
TestAnyStory = AnyStory.TestCase
TestAnyStory.settings = settings(max_examples=60, stateful_step_count=20)


def test_an_interrupt_before_the_first_group_has_formed_ends_the_run_at_once():
    assert KillAll() in heard(ready(), Interrupted("SIGINT"))[1]
    _, actions = heard(ready(), Formed(0, 1), Formed(1, 1), Interrupted("SIGINT"))
    assert KillAll() not in actions


@pytest.mark.parametrize(
    "order",
    [
        [LastMessage(0, ECHO), Ended(1, 3, 4)],
        [Ended(1, 3, 4), LastMessage(0, ECHO)],
        [LastMessage(0, ECHO), Ended(0, 1, 4), Ended(1, 3, 4)],
    ],
)
def test_an_exit_without_a_message_is_the_cause_though_a_broken_connection_came_first(
    order,
):
    _, actions = after(*everybody_joined(), *order, BETTER_CAUSE_S)
    assert [(f["worker"], f["kind"]) for f in blamed(actions)] == [(1, "exit")]


# ---- where the lost are replaced

KILL = Ended(1, -9, 4, committed=3)


def started(actions):
    return [a.worker for a in actions if isinstance(a, Start)]


def formed(actions):
    return [
        (a.worker, a.message.generation, a.message.rank)
        for a in actions
        if isinstance(a, Send) and isinstance(a.message, Form)
    ]


def test_a_worker_that_is_killed_is_replaced_and_the_next_generation_formed_with_it():
    state, actions = after(*everybody_joined(), KILL, recovers=True)
    assert started(actions) == [1]
    assert state.phase == "gathering"
    assert formed(actions) == [(0, 1, 0), (1, 1, 1)]
    _, actions = after(*everybody_joined(), KILL, Joined(1), recovers=True)
    assert formed(actions)[2:] == [(0, 2, 0), (1, 2, 1)]
    reasons = [a.fields["reason"] for a in actions if isinstance(a, Log) and "reason" in a.fields]
    assert reasons[0] == "start"
    assert "worker 1 was lost: the process was killed by SIGKILL" in reasons[1]


def test_no_group_forms_with_a_worker_that_is_not_built():
    state, _ = after(*everybody_joined(), KILL, recovers=True)
    state, follows = decide(state, Joined(1), 1.0)
    assert formed(follows) == []
    assert len(formed(decide(state, Built(1), 1.0)[1])) == 2


def test_a_worker_that_is_killed_while_the_group_forms_leads_to_one_more_generation():
    events = [*everybody_joined(), KILL, Joined(1), Ended(0, -9, 4, committed=3), Joined(0)]
    _, actions = after(*events, recovers=True)
    assert [generation for _, generation, _ in formed(actions)] == [1, 1, 2, 2, 3, 3]


def at(state, now, *events):
    """State and actions after events at one moment; members that are told to form a group do."""
    actions = []
    for event in events:
        state, follows = decide(state, event, now)
        actions += follows
        for a in follows:
            if isinstance(a, Send) and isinstance(a.message, Form):
                state, _ = decide(state, Formed(a.worker, a.message.generation), now)
    return state, actions


def test_the_others_train_while_a_replacement_gets_ready_and_take_it_in_at_a_commit():
    left = Broke(0, 1)
    state, _ = after(*everybody_joined(3), KILL, left, Broke(2, 1), workers=3, recovers=True)
    state, actions = at(state, BUILDING_S - 0.01, Joined(1), Tick(step=4))
    assert formed(actions) == [], "it may be ready at once"
    state, actions = at(state, BUILDING_S, Tick(step=4))
    assert formed(actions) == [(0, 2, 0), (2, 2, 1)]
    assert (state.phase, state.group) == ("training", (0, 2))
    state, actions = at(state, 7.0, Built(1))
    assert actions == [Send(worker, Regroup(generation=2)) for worker in (0, 2)]
    state, actions = at(state, 7.1, Broke(0, 2), Broke(2, 2))
    assert formed(actions) == [(0, 3, 0), (1, 3, 1), (2, 3, 2)]
    (log,) = [a.fields for a in actions if isinstance(a, Log)]
    assert log["seconds"] == pytest.approx(0.1), "they trained until it was ready"


def test_training_waits_for_a_replacement_that_takes_up_state_only_the_lost_worker_had():
    state, _ = after(*everybody_joined(3), KILL, workers=3, recovers=True)
    state, actions = at(replace(state, drains=True), 60.0, Joined(1), Tick(step=4))
    assert (state.phase, actions) == ("gathering", [])
    _, actions = at(state, 61.0, Built(1))
    assert [worker for worker, _, _ in formed(actions)] == [0, 1, 2]


def test_training_waits_for_who_alone_has_data_until_its_host_seems_lost():
    left = Broke(0, 1), Broke(2, 1)
    state, _ = after(*everybody_joined(3), KILL, *left, workers=3, recovers=True)
    bound = replace(state, bound=True)
    early, actions = at(bound, BOUND_S - 0.01, Tick(step=4))
    assert (early.phase, actions) == ("gathering", [])
    late, actions = at(early, BOUND_S, Tick(step=4))
    assert formed(actions) == [(0, 2, 0), (2, 2, 1)], "no process has come"
    assert at(late, 90.0, Joined(1), Built(1))[1] == [
        Send(worker, Regroup(generation=2)) for worker in (0, 2)
    ]
    there, actions = at(early, 100.0, Joined(1), Tick(step=4))
    assert (there.phase, actions) == ("gathering", []), "its process gets ready"
    _, actions = at(there, 101.0, Built(1))
    assert [worker for worker, _, _ in formed(actions)] == [0, 1, 2]


def test_a_replacement_that_never_gets_ready_ends_the_run_though_the_others_commit():
    state, actions = after(*everybody_joined(3), KILL, workers=3, recovers=True)
    for again in range(1, MOST_LOSSES):
        state, follows = at(state, 9.0 * again, Joined(1), Tick(step=4))
        actions += follows
        state, follows = at(state, 9.0 * again + 5, Ended(1, -9, 0, committed=4 + 10 * again))
        actions += follows
    assert [g for worker, g, _ in formed(actions) if worker == 0] == [1, 2], "nobody is disturbed"
    assert f"It happened {MOST_LOSSES} times and it was never ready" in blamed(actions)[0]["cause"]


def test_a_worker_that_is_lost_repeatedly_without_a_commit_ends_the_run():
    events = [piece for _ in range(MOST_LOSSES) for piece in (KILL, Joined(1))]
    _, actions = after(*everybody_joined(), *events[:-1], recovers=True)
    assert len(started(actions)) == MOST_LOSSES - 1
    assert (
        f"It happened {MOST_LOSSES} times and no step after 3 was committed"
        in blamed(actions)[0]["cause"]
    )


def test_going_back_to_a_checkpoint_does_not_reset_the_count_of_losses():
    events = []
    for reached in (6, 0, 3, 5, 6, 2, 6, 1, 6, 6):  # it goes back to the beginning each time
        events += [Ended(0, -9, reached + 1, committed=reached)]
    _, actions = lost(events, workers=1)
    assert actions.count(GoBack()) == MOST_LOSSES - 1
    assert len(started(actions)) == MOST_LOSSES - 1
    (failed,) = blamed(actions)
    assert f"It happened {MOST_LOSSES} times and no step after 6 was committed" in failed["cause"]


def crash(worker=0, step=7, **place):
    where = Whereabouts(step=step, **place) if place else None
    return Ended(worker, -11, step, committed=step - 1, place=where)


READING = {"dataset": "training", "sample": 512, "file": "a.png"}


def lost(events, workers=2, *, skips=False):
    """As `after`, where each piece of events is the end of a worker that then comes again."""
    state = State(members=first_members(workers), recovers=True, skips=skips)
    actions = []
    for piece in [*everybody_joined(workers), *events]:
        pieces = [piece]
        if isinstance(piece, Joined):
            pieces += [Built(piece.worker)]
        elif isinstance(piece, Ended):
            pieces += [Joined(piece.worker), Built(piece.worker)]
        for each in pieces:
            if state.phase == "ending":
                break
            state, follows = decide(state, each, 0.0)
            actions += follows
            if GoBack() in follows:
                state, follows = decide(state, WentBack(""), 0.0)
                actions += follows
    return state, actions


def test_a_process_that_crashes_at_the_same_step_three_times_is_not_tried_again():
    _, actions = lost([crash()] * 9, workers=1)
    assert len(started(actions)) == MAX_CRASHES - 1
    (failed,) = blamed(actions)
    assert (failed["step"], failed["kind"]) == (7, "killed")
    assert "SIGSEGV" in failed["cause"]
    assert f"It happened {MAX_CRASHES} times at this step." in failed["cause"]


def test_crashes_at_other_steps_or_for_other_reasons_are_not_the_same():
    events = [crash(step=7), crash(step=8), crash(step=9), crash(step=10)]
    assert blamed(lost(events)[1]) == []
    assert blamed(lost([Ended(0, -9, 7, committed=6)] * (MAX_CRASHES + 1))[1]) == []


def test_a_sample_that_kills_every_process_that_reads_it_is_the_cause():
    events = [crash(worker, **READING) for worker in (0, 1, 0)]
    _, actions = lost(events)
    (failed,) = blamed(actions)
    assert (failed["kind"], failed["phase"]) == ("DataError", "loading")
    assert "while it read sample 512 (a.png)" in failed["cause"]
    state, _ = lost([*events, Ended(1, -9, 7)])
    assert endings.finish_of(state).exit_code == 4


@pytest.mark.parametrize("code", [0, 3, PeerError.exit_code])
def test_a_sample_whose_read_ends_the_process_by_a_code_is_the_cause(code):
    def ended(worker):
        return Ended(worker, code, 7, committed=6, place=Whereabouts(step=7, **READING))

    _, actions = lost([ended(worker) for worker in (0, 1, 0)])
    (failed,) = blamed(actions)
    assert (failed["kind"], failed["phase"]) == ("DataError", "loading")
    assert f"ended with code {code} and said nothing" in failed["cause"]
    assert "while it read sample 512 (a.png)" in failed["cause"]
    state, actions = lost([ended(worker) for worker in (0, 1, 0)], skips=True)
    assert blamed(actions) == []
    assert f"by code {code} 3 times" in state.left_out[0].cause


def test_an_exit_with_a_code_outside_a_read_blames_no_sample():
    place = Whereabouts(step=7)
    _, actions = after(
        *everybody_joined(), Ended(1, 3, 7, place=place), BETTER_CAUSE_S, recovers=True
    )
    (failed,) = blamed(actions)
    assert (failed["kind"], failed["cause"]) == (
        "exit",
        "the process ended with code 3 and said nothing.",
    )
    ahead = Whereabouts(step=7, **READING, ahead=True)
    _, actions = after(
        *everybody_joined(), Ended(1, 3, 7, place=ahead), BETTER_CAUSE_S, recovers=True
    )
    assert [failed["kind"] for failed in blamed(actions)] == ["exit"]


def test_a_read_that_loops_in_several_workers_at_once_has_a_second_attempt():
    """Before the first step all of them read the same samples."""
    events = []
    for worker in (0, 1, 0):
        how = "got nothing done for 30.1 s"
        events.append(Hung(worker, 0, "loading", how, "a.py:3 in f", loops=True))
        events.append(Ended(worker, -9, 0, place=Whereabouts(**READING)))
    assert blamed(lost(events[:-2])[1]) == []
    (failed,) = blamed(lost(events)[1])
    assert "while it read sample 512 (a.png)" in failed["cause"]


def test_a_sample_that_kills_is_left_out_by_all_in_the_next_generation():
    events = [crash(worker, **READING) for worker in (0, 1, 0)]
    state, actions = lost(events, skips=True)
    assert blamed(actions) == []
    forms = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Form)]
    (one,), (other,) = forms[-1].marks, forms[-2].marks
    assert one == other
    assert (one.dataset, one.sample) == ("training", 512)
    assert "SIGSEGV 3 times" in one.cause
    assert state.lost == {1: (6, 1)}  # what it did to worker 0 says nothing of the rest


def test_a_sample_that_was_read_ahead_is_only_suspected():
    vague = crash(**READING, ahead=True)
    state, actions = lost([vague] * (MAX_CRASHES + 1))
    assert blamed(actions) == []
    forms = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Form)]
    assert [(mark.sample, mark.cause) for mark in forms[-1].marks] == [(512, "")]
    assert state.left_out == ()


def test_a_read_that_loops_a_second_time_is_the_cause():
    hang = Hung(0, 7, "loading", "got nothing done for 1.3 s", "a.py:3 in f", loops=True)
    ended = Ended(0, -9, 7, committed=6, place=Whereabouts(step=7, **READING))
    _, actions = lost([hang, ended] * MOST_LOOPS)
    (failed,) = blamed(actions)
    assert "a.py:3 in f" in failed["cause"]
    assert "while it read sample 512 (a.png)" in failed["cause"]
    assert "2 times at this sample" in failed["cause"]
    waits = Hung(0, 7, "loading", "got nothing done for 30.1 s", "a.py:3 in f")
    assert blamed(lost([waits, ended] * MOST_LOOPS)[1]) == []  # a store may stall


def test_a_worker_that_is_lost_as_often_but_with_commits_between_is_replaced_each_time():
    events = [p for n in range(40) for p in (Ended(1, -9, n, committed=n), Joined(1))]
    _, actions = after(*everybody_joined(), *events, recovers=True)
    assert len(started(actions)) == 40


def test_a_group_that_breaks_forms_again_if_no_process_has_exited():
    broken = [*everybody_joined(), Broke(0, 1)]
    assert len(formed(after(*broken, BROKEN_S * 0.9, recovers=True)[1])) == 2
    _, actions = after(*broken, Broke(1, 1), BROKEN_S, recovers=True)
    assert formed(actions)[2:] == [(0, 2, 0), (1, 2, 1)]
    patience = [a.message.timeout_s for a in actions if isinstance(a, Send)]
    assert patience == [FIRST_MEETING_S] * 2 + [2 * MEETING_S] * 2


def apart(times, committed=lambda n: 0, cause=NO_THREAD, mine=False, parted=False, before=False):
    """State and actions after as many groups have come apart, every process living."""
    state = replace(ready(), parted=parted)
    if before:
        state = state.note(0, formed=state.generation)
    actions, now = [], 0.0
    for n in range(times):
        first = Broke(0, state.generation, "another worker went away.")
        second = Broke(1, state.generation, cause, mine)
        state, _ = heard(state, first, second, now=now)
        now += BROKEN_S
        state, follows = heard(state, Tick(committed(n)), now=now)
        actions += follows
        assert ("generation_started" in [a.name for a in follows if isinstance(a, Log)]) == (
            not blamed(follows)
        )
    return state, actions


def test_a_group_that_never_forms_ends_the_run_with_the_cause_that_a_worker_reported():
    assert blamed(apart(MOST_APART - 1, mine=True)[1]) == []
    state, actions = apart(MOST_APART, mine=True)
    (failed,) = blamed(actions)
    assert (failed["worker"], failed["step"], failed["kind"]) == (1, 0, "group")
    assert failed["cause"] == (
        f"{NO_THREAD} The group came apart {MOST_APART} times and no step was committed."
        f"{OUT_OF_SYSTEM}"
    )
    assert state.blame.failed.exit_code == 5


def test_if_no_worker_is_the_cause_the_first_report_is_named():
    (failed,) = blamed(apart(MOST_APART)[1])
    assert failed["worker"] == 0
    assert failed["cause"].startswith("another worker went away. The group came apart")


def test_groups_that_come_apart_with_commits_between_are_formed_each_time():
    assert blamed(apart(40, committed=lambda n: n)[1]) == []
    assert blamed(apart(4 + MOST_APART, committed=lambda n: min(n, 5))[1]) == []
    (failed,) = blamed(apart(5 + MOST_APART, committed=lambda n: min(n, 5))[1])
    assert failed["step"] == 6
    assert "no step after 5 was committed" in failed["cause"]


def test_hosts_that_a_network_has_parted_are_waited_for_and_want_of_memory_is_not():
    assert blamed(apart(200, parted=True, before=True)[1]) == []
    assert len(blamed(apart(MOST_APART, parted=True, mine=True)[1])) == 1


def test_hosts_that_have_never_reached_each_other_end_the_run_with_what_to_look_at():
    assert blamed(apart(MOST_UNFORMED - 1, parted=True)[1]) == []
    state, actions = apart(MOST_UNFORMED, parted=True)
    (failed,) = blamed(actions)
    assert failed["cause"].startswith("another worker went away. The group came apart 4 times and")
    assert failed["cause"].endswith("open all ports between the machines.")
    assert state.blame.failed.exit_code == 5


def test_a_group_that_breaks_waits_for_the_replacement_of_the_killed_worker():
    events = [*everybody_joined(), Broke(0, 1), KILL, BROKEN_S, Joined(1)]
    _, actions = after(*events, recovers=True)
    assert [generation for _, generation, _ in formed(actions)] == [1, 1, 2, 2]


def test_messages_of_an_earlier_generation_are_ignored():
    events = [*everybody_joined(), KILL, Joined(1), Broke(0, 1), 10 * BROKEN_S]
    assert after(*events, recovers=True)[0].generation == 2


def test_a_worker_that_is_killed_after_its_last_message_needs_no_replacement():
    first, last = everybody_done()
    _, actions = after(
        *everybody_joined(), last, Ended(1, -9, 9, 9), first, Ended(0, 0, 9), recovers=True
    )
    assert started(actions) == []
    assert [end.outcome for end in ends(actions)] == ["completed"]


def test_workers_that_had_finished_finish_again_if_another_is_lost():
    first, _ = everybody_done()
    state, _ = after(*everybody_joined(), first, KILL, Joined(1), recovers=True)
    assert state.done == {}
    assert state.phase == "training"


def test_a_newcomer_gets_a_stop_that_was_requested_before_it_joined():
    events = [*everybody_joined(), Interrupted("SIGINT"), KILL, Joined(1)]
    _, actions = after(*events, recovers=True)
    stops = [a.worker for a in actions if isinstance(a, Send) and isinstance(a.message, Stop)]
    assert stops == [0, 1, 0, 1]


def test_an_interrupt_while_a_replacement_starts_waits_for_the_commit():
    state, actions = after(*everybody_joined(), KILL, Interrupted("SIGINT"), recovers=True)
    assert ends(actions) == []
    assert KillAll() not in actions
    assert KillAll() in decide(state, Interrupted("SIGINT"), 9.0)[1]


def checkpoints(actions):
    """The checkpoint that each generation begins from."""
    forms = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Form)]
    return [form.checkpoint for form in forms if form.rank == 0]


def test_the_first_generation_begins_at_the_checkpoint_and_later_ones_with_the_state_of_a_member():
    _, actions = after(*everybody_joined(), KILL, Joined(1), recovers=True)
    assert checkpoints(actions) == ["", None]
    assert GoBack() not in actions


BELOW = Fired("gradient_norm", 3, "it was below 0.5")


def test_if_no_member_holds_the_state_the_run_goes_back_before_it_forms_again():
    both = [Ended(n, -9, 4, committed=3) for n in range(2)]
    events = [*everybody_joined(), *both, Joined(0), Joined(1), WentBack("step-2")]
    _, actions = after(*events, recovers=True)
    assert checkpoints(actions) == ["", "step-2"]
    assert [type(a) for a in actions if isinstance(a, (GoBack, Start))] == [Start, Start, GoBack]


@pytest.mark.parametrize(
    ("stops", "step", "is_the_end"),
    [
        ([BELOW], 3, False),
        ([BELOW], 4, True),
        ([Fired("target", 4, "it was reached", at_once=True)], 3, False),
        ([Fired("target", 4, "it was reached", at_once=True)], 4, True),
        ([Fired("target", 1, "it was reached", at_once=True)], 0, False),
        ([Fired("target", 1, "it was reached", at_once=True)], 1, True),
        ([BELOW, BELOW._replace(at_once=True)], 2, False),
        ([BELOW, BELOW._replace(at_once=True)], 3, True),
        ([BELOW, Fired("target", 3, "it was reached", at_once=True)], 3, True),
        ([BELOW, Fired("target", 9, "it was reached", at_once=True)], 4, True),
        ([BELOW, Interrupted("SIGINT")], 3, False),
        ([BELOW, Interrupted("SIGINT")], 4, True),
        ([Interrupted("SIGINT")], 4, False),
    ],
)
def test_a_run_that_goes_back_to_the_checkpoint_that_a_rule_ended_it_with_trains_no_further(
    stops, step, is_the_end
):
    both = [Ended(n, -9, 5, committed=4) for n in range(2)]
    events = [*everybody_joined(), *stops, *both, Joined(0), Joined(1), WentBack("a", step)]
    state, actions = after(*events, recovers=True)
    forms = [a.message for a in actions if isinstance(a, Send) and isinstance(a.message, Form)]
    assert [form.ends for form in forms[-2:]] == [is_the_end] * 2
    last = None if state.asked else min(fired.after for fired in stops)
    assert Send(0, Stop(rule=state.stop, after=last)) in actions[-2:]


@pytest.mark.parametrize(
    ("stops", "step", "stop"),
    [
        ([BELOW], 2, ("", None)),
        ([BELOW], 3, ("", None)),  # it is events only where no rule fired at that step
        ([BELOW], 4, ("gradient_norm", 3)),
        ([BELOW._replace(at_once=True)], 2, ("", None)),
        ([BELOW, Interrupted("SIGINT")], 2, ("interrupted", None)),
        ([Interrupted("SIGINT")], 2, ("interrupted", None)),
    ],
)
def test_a_rule_that_fired_by_figures_that_were_undone_stops_nothing(stops, step, stop):
    state, _ = after(*everybody_joined(), *stops, RolledBack(step), recovers=True)
    assert (state.stop, state.stop_after) == stop
    again, actions = decide(state, BELOW, 9.0)
    assert again.stop == (stop[0] or BELOW.rule)
    assert [a.name for a in actions] == ([] if stop[0] else ["stop_requested"])


def test_a_newcomer_that_never_was_in_a_group_holds_nothing():
    state, _ = after(*everybody_joined(), KILL, recovers=True)
    for events in (Joined(1), Built(1)):  # told to form, and has not
        state, _ = decide(state, events, 1.0)
    assert state.holders == {0}
    state, actions = decide(state, Ended(0, -9, 4, committed=3), 2.0)
    assert actions[1:] == [Start(0)]
    for events in (Joined(0), Built(0)):
        state, actions = decide(state, events, 3.0)
    assert checkpoints(actions) == [None]  # for all we know, it may have got into the group
    for now, events in ((3.0, Broke(0, 3)), (3.0, Broke(1, 3)), (4.0, Tick())):
        state, actions = decide(state, events, now)
    assert actions == [GoBack()]


def test_a_member_that_reports_late_that_it_holds_the_state_keeps_the_run_from_going_back():
    state, _ = after(*everybody_joined(), KILL, recovers=True)
    for events in (Joined(1), Built(1), Ended(0, -9, 4, committed=3), Formed(1, 2), Joined(0)):
        state, _ = decide(state, events, 1.0)
    state, actions = decide(state, Built(0), 3.0)
    assert GoBack() not in actions
    assert checkpoints(actions) == [None]


def test_a_worker_that_had_finished_and_exited_starts_again_if_another_is_lost():
    first, _ = everybody_done()
    state, actions = after(*everybody_joined(), first, Ended(0, -9, 9, 9), KILL, recovers=True)
    assert started(actions) == [1, 0]
    assert state.joined == frozenset()


def test_a_group_that_breaks_does_not_form_again_with_an_exited_worker():
    first, _ = everybody_done()
    events = [*everybody_joined(), first, Ended(0, 0, 9), Broke(1, 1), BROKEN_S]
    state, actions = after(*events, recovers=True)
    assert started(actions) == [0]
    assert state.phase == "gathering"


def test_a_last_message_of_the_generation_before_does_not_count():
    events = [
        *everybody_joined(),
        KILL,
        Joined(1),
        LastMessage(0, Done(generation=1, step=9, rule="steps")),
    ]
    assert after(*events, recovers=True)[0].done == {}


def test_an_exit_without_a_message_remains_the_cause_after_a_kill():
    events = [*everybody_joined(), Ended(0, 3, 4), KILL, Joined(1), BETTER_CAUSE_S]
    _, actions = after(*events, recovers=True)
    assert [f["kind"] for f in blamed(actions)] == ["exit"]


def test_a_worker_that_cannot_recover_ends_the_run_when_another_is_lost():
    state = State(members=first_members(1), recovers=True)
    for events in (Joined(0), Built(0, recovers=False)):
        state, _ = decide(state, events, 0.0)
    _, actions = decide(state, Ended(0, -9, 4), 1.0)
    assert [f["kind"] for f in blamed(actions)] == ["killed"]


def test_a_report_of_a_group_from_before_the_run_went_back_makes_no_holder():
    both = [Ended(n, -9, 4, committed=3) for n in range(2)]
    events = [*everybody_joined(), *both, Joined(0), Joined(1)]
    state, _ = after(*events, recovers=True)
    state, _ = decide(state, WentBack(""), 1.0)
    state, _ = decide(state, Formed(0, 1), 1.0)
    assert state.holders == frozenset()
    assert decide(state, Formed(0, 2), 1.0)[0].holders == {0}


# ---- what the simulation found


def heard(state, *events, now=1.0):
    """The state after these, and all that is to be done."""
    everything = []
    for piece in events:
        state, actions = decide(state, piece, now)
        everything += actions
    return state, everything


def ready(workers=2):
    """Everybody was told to form the first group, and none has said that it has."""
    events = [piece for n in range(workers) for piece in (Joined(n), Built(n))]
    return heard(State(members=first_members(workers), recovers=True), *events)[0]


def test_a_member_that_may_have_formed_the_first_group_does_not_begin_again():
    _, actions = heard(ready(), Restarted())
    assert checkpoints(actions) == [None]


def test_after_a_group_without_a_holder_the_next_begins_at_the_checkpoint():
    state, _ = heard(ready(), Restarted(), Broke(0, 2), Broke(1, 2))
    _, actions = heard(state, Tick(), now=9.0)
    assert checkpoints(actions) == [""]
    assert GoBack() not in actions


def test_a_worker_that_was_lost_before_it_confirmed_its_group_may_have_committed():
    state, _ = heard(ready(1), Ended(0, -9, 1), Joined(0))
    assert heard(state, Built(0))[1] == [GoBack()]


@pytest.mark.parametrize("holds", [True, False])
def test_who_was_given_the_state_before_its_group_broke_is_not_gone_back_behind(holds):
    lost = Ended(1, -9, 1), Joined(1), Built(1)
    state, _ = heard(ready(), Formed(0, 1), Formed(1, 1), *lost)
    assert state.generation == 2
    state, _ = heard(state, Broke(1, 2, holds=holds), Ended(0, -9, 1), Joined(0))
    assert (GoBack() in heard(state, Built(0))[1]) == (not holds)


def test_a_late_report_of_an_earlier_group_still_makes_a_holder():
    state, _ = heard(ready(), Restarted(), Formed(0, 1))
    assert (state.generation, state.holders, state.member(0).phase) == (2, {0}, Phase.FORMING)


def test_a_master_that_was_lost_while_it_went_back_goes_back_again():
    state, _ = heard(ready(1), Ended(0, -9, 1), Joined(0), Built(0))
    assert heard(state, Restarted())[1] == [GoBack()]


def test_a_leaving_worker_is_released_once_all_that_stay_hold_the_state():
    state, actions = heard(ready(), Formed(0, 1), Formed(1, 1), Scaled(1), Broke(0, 1), Broke(1, 1))
    assert formed(actions) == [(0, 2, 0)]
    assert Send(1, Release()) not in actions
    assert decide(state, Formed(0, 2), 1.0)[1] == [Send(1, Release())]


def test_a_leaving_worker_gives_the_state_to_the_replacement_of_one_lost_meanwhile():
    events = [Formed(0, 1), Formed(1, 1), Scaled(1), Broke(0, 1), Broke(1, 1)]
    _, actions = heard(ready(), *events, Ended(0, -9, 4, 3), Joined(0), Built(0))
    assert formed(actions)[1:] == [(0, 3, 0), (1, 3, 1)]
    assert GoBack() not in actions


def test_a_leaving_worker_stays_if_the_group_broke_since_it_may_have_committed_more():
    events = [Formed(n, 1) for n in range(3)]
    state, _ = heard(ready(3), *events, Scaled(2), Broke(2, 1), Ended(0, -9, 4, 3))
    _, actions = heard(state, Joined(0), Built(0))
    assert [worker for worker, _, _ in formed(actions)] == [0, 1, 2]


def test_a_new_master_kills_what_the_lost_one_was_killing():
    events = [Formed(0, 1), Formed(1, 1), Hung(1, 4, "forward", "gave no sign of life for 2 s")]
    state, _ = heard(ready(), *events)
    assert Kill(1) in heard(state, Restarted())[1]


@pytest.mark.parametrize(("code", "starts"), [(5, [1]), (1, [])])
def test_a_process_that_could_not_join_is_replaced_and_one_that_fails_is_not(code, starts):
    state, _ = heard(State(members=first_members(2), recovers=True), Joined(0))
    assert started(heard(state, Ended(1, code, 0))[1]) == starts


def test_an_interrupt_before_a_newcomer_is_ready_waits_for_the_commit():
    events = [*everybody_joined(), KILL, Joined(1), Interrupted("SIGINT")]
    _, actions = after(*events, recovers=True)
    assert KillAll() not in actions


def test_what_a_worker_raises_still_ends_the_run():
    _, actions = after(*everybody_joined(), LastMessage(1, failed()), recovers=True)
    assert blamed(actions)[0]["cause"] == "ValueError: no"
