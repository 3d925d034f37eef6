"""Members that come, go and hang while a run goes on: events, and what follows from it."""

import pytest

from instep.comm.protocol.messages import Done, Form, Regroup, Release, Stop
from instep.control.decisions.actions import GoBack, Kill, KillAll, Log, Send, Start
from instep.control.decisions.crash_loop import MOST_APART, MOST_HANGS
from instep.control.decisions.decide import decide
from instep.control.decisions.events import (
    Broke,
    Built,
    Ended,
    Formed,
    HostJoined,
    Hung,
    Interrupted,
    Joined,
    LastMessage,
    Noticed,
    Reconnected,
    Restarted,
    Scaled,
    Stuck,
    Tick,
    WentBack,
)
from instep.control.decisions.generations import BOUND_S, BUILDING_S
from instep.control.decisions.membership import refuse_scale
from instep.control.decisions.phases import TransitionError
from instep.control.decisions.state import State, first_members
from instep.errors import PeerError
from instep.job import file as spec_file


class Story:
    """A run of so many workers, and what its master's mind made of the events."""

    def __init__(self, workers, servers=0, *, drains=False, together=False):
        self.together = together
        self.state = State(members=first_members(workers, servers), recovers=True, drains=drains)
        self.now = 0.0
        self.actions = []
        self.happens(HostJoined())
        self.come(*range(workers + servers))
        self.form()
        self.actions = []

    def happens(self, *events):
        for piece in events:
            self.state, follows = decide(self.state, piece, self.now)
            self.actions += follows

    def come(self, *workers):
        self.happens(*(n for w in workers for n in (Joined(w), Built(w, together=self.together))))

    def form(self):
        generation = self.state.generation
        self.happens(*(Formed(worker, generation) for worker in self.state.group))

    def leave(self, *workers):
        generation = self.state.generation
        self.happens(*(Broke(worker, generation) for worker in workers or self.state.group))

    def new(self, kind):
        """The actions of a kind since they were asked for last."""
        found = [a for a in self.actions if isinstance(a, kind)]
        self.actions = [a for a in self.actions if not isinstance(a, kind)]
        return found

    def told(self, kind):
        sends = self.new(Send)
        self.actions += [send for send in sends if not isinstance(send.message, kind)]
        return [send.worker for send in sends if isinstance(send.message, kind)]

    def logged(self, name):
        return [log.fields for log in self.actions if isinstance(log, Log) and log.name == name]


def test_a_host_that_connects_starts_the_missing_workers():
    state = State(members=first_members(3), recovers=True)
    state, _ = decide(state, Joined(1), 0.0)
    assert decide(state, HostJoined(), 0.0)[1] == [Start(0), Start(2)]


def test_newcomers_get_ready_while_the_others_train_and_all_change_at_one_commit():
    story = Story(2)
    story.happens(Scaled(4))
    assert story.new(Start) == [Start(2), Start(3)]
    story.come(2)
    assert story.told(Regroup) == []
    story.come(3)
    assert story.told(Regroup) == [0, 1]
    story.leave(0)
    assert story.told(Form) == []
    story.leave(1)
    assert story.told(Form) == [0, 1, 2, 3]
    (log,) = story.logged("generation_started")
    assert (log["members"], log["reason"]) == ([0, 1, 2, 3], "scaled from 2 to 4 workers")
    assert story.state.begins_at is None


def test_a_worker_that_is_no_longer_wanted_is_released_at_the_commit_and_its_exit_is_no_failure():
    story = Story(3)
    story.happens(Scaled(1))
    assert story.told(Regroup) == [0, 1, 2]
    story.leave()
    assert story.told(Form) == [0]
    assert story.told(Release) == []
    story.form()
    assert story.told(Release) == [1, 2]
    story.happens(Ended(1, 0, 5, 5), Ended(2, -9, 5, 5))
    assert story.new(Start) == []
    assert (story.state.phase, story.state.joined) == ("training", {0})


def test_workers_of_hosts_that_leave_are_released_before_others():
    story = Story(4)
    story.happens(Scaled(2, hosts=(7,), first=frozenset({0, 2})))
    (log,) = story.logged("scaled")
    assert (log["before"], log["workers"], log["hosts"]) == (4, 2, [7])
    story.leave()
    assert story.state.group == (1, 3)


def test_a_second_scaling_waits_for_the_first():
    story = Story(2)
    story.happens(Scaled(3))
    story.come(2)
    assert story.told(Regroup) == [0, 1]
    story.happens(Scaled(1))
    assert story.told(Regroup) == []
    story.leave()
    assert story.state.group == (0,)


def test_the_same_number_again_changes_nothing():
    story = Story(2)
    before = story.state
    story.happens(Scaled(2))
    assert (story.state, story.actions) == (before, [])


def test_a_worker_with_notice_has_a_successor_before_it_leaves():
    story = Story(2)
    story.happens(Noticed(0))
    assert story.new(Start) == [Start(2)]
    assert story.told(Regroup) == []
    story.come(2)
    assert story.told(Regroup) == [0, 1]
    story.leave()
    assert story.state.group == (1, 2)
    story.form()
    assert story.told(Release) == [0]
    (log,) = story.logged("worker_leaving")
    assert log == {"worker": 0, "successor": 2}


def test_a_second_notice_for_the_same_worker_changes_nothing():
    story = Story(2)
    story.happens(Noticed(0), Noticed(0))
    assert story.new(Start) == [Start(2)]


def test_the_only_holder_hands_over_in_a_generation_of_both_before_it_leaves():
    story = Story(1)
    story.happens(Noticed(0))
    story.come(1)
    story.leave()
    assert story.state.group == (0, 1)
    assert story.told(Release) == []
    assert story.told(Regroup) == [0]
    story.form()
    assert story.told(Regroup) == [0, 1]
    story.leave()
    assert story.state.group == (1,)
    story.form()
    assert story.told(Release) == [0]
    assert story.new(GoBack) == []


def test_a_worker_that_is_killed_before_its_successor_is_there_is_not_started_again():
    story = Story(2)
    story.happens(Noticed(0))
    assert story.new(Start) == [Start(2)]
    story.happens(Ended(0, -9, 5, 4))
    assert story.new(Start) == []
    story.come(2)
    assert story.state.group == (1, 2)


def test_a_loss_while_another_one_leaves_stops_nobody_though_no_process_comes_in_its_place():
    story = Story(2)
    story.happens(Noticed(0), Ended(1, None, 5, 4))
    story.come(2)
    story.leave(0)
    assert story.told(Form) == []
    story.now += BUILDING_S + 0.1
    story.happens(Tick(4))
    assert story.told(Form) == [0, 2], "the one that leaves has what the other needs"
    story.form()
    story.happens(Tick(4))
    assert story.told(Regroup) == []
    story.now += BOUND_S
    story.happens(Tick(5))
    assert story.told(Regroup) == [0, 2]
    story.leave()
    story.now += BUILDING_S
    story.happens(Tick(5))
    assert story.state.group == (2,)
    story.form()
    assert story.told(Release) == [0]
    story.come(1)
    story.leave()
    assert story.state.group == (1, 2)


def test_a_worker_that_has_no_process_is_given_up_before_others_but_for_those_of_hosts_that_go():
    story = Story(3)
    story.happens(Ended(1, None, 5, 4), Scaled(2))
    assert story.state.wanted == {0, 2}
    story = Story(3)
    story.happens(Ended(1, None, 5, 4), Scaled(2, hosts=(7,), first=frozenset({0})))
    assert story.state.wanted == {1, 2}


def test_a_loss_in_the_middle_of_a_change_ends_in_one_generation_of_all_that_are_wanted():
    story = Story(2)
    story.happens(Scaled(3))
    story.come(2)
    story.leave(0)
    story.happens(Ended(1, -9, 5, 4))
    story.come(1)
    assert story.state.group == (0, 1, 2)
    assert not story.state.changing


def test_a_newcomer_that_is_lost_before_the_change_is_started_again_while_the_others_train():
    story = Story(2)
    story.happens(Scaled(3))
    story.happens(Joined(2))
    story.new(Start)
    story.happens(Ended(2, -9, 0, 4))
    assert story.new(Start) == [Start(2)]


def test_a_run_that_ends_while_a_newcomer_gets_ready_ends_with_it():
    story = Story(2)
    story.happens(Scaled(3), Joined(2))
    words = [LastMessage(w, Done(generation=1, step=9, rule="steps")) for w in (0, 1)]
    story.happens(*words)
    assert story.told(Release) == [0, 1, 2]
    story.happens(*(Ended(w, 0, 9, 9) for w in (0, 1, 2)))
    assert story.state.phase == "ended"


# ---- hangs

HANG = Hung(1, 8, "forward", "got nothing done for 2.0 s", "a.py:3 in f")


def test_a_worker_that_hangs_is_killed_and_its_loss_says_how_and_where_it_hung():
    story = Story(2)
    story.happens(HANG)
    assert story.new(Kill) == [Kill(1)]
    assert story.logged("worker_hung")[0]["where"] == "a.py:3 in f"
    story.happens(Ended(1, -9, 8, 7))
    assert story.new(Start) == [Start(1)]
    (lost,) = story.logged("worker_lost")
    assert lost["cause"] == "it got nothing done for 2.0 s in forward at step 8 (a.py:3 in f)."


def test_a_hung_worker_that_is_refused_before_it_is_killed_is_replaced():
    story = Story(2)
    story.happens(HANG, Ended(1, PeerError.exit_code, 8, 7))
    assert story.new(Start) == [Start(1)]
    assert story.logged("worker_lost")[0]["cause"].startswith("it got nothing done for 2.0 s")


def test_a_hang_counts_once_for_one_process():
    story = Story(2)
    story.happens(HANG, HANG)
    assert story.new(Kill) == [Kill(1)]
    story.happens(Ended(1, -9, 8, 7))
    story.come(1)
    story.happens(HANG)
    assert story.new(Kill) == [Kill(1)]


def test_a_worker_that_hangs_repeatedly_at_one_place_ends_the_run_with_the_line():
    story = Story(2)
    for _ in range(MOST_HANGS - 1):
        story.happens(HANG, Ended(1, -9, 8, 7))
        story.come(1)
        story.form()
    story.happens(HANG, Ended(1, -9, 8, 7))
    (failed,) = story.logged("worker_failed")
    assert failed["kind"] == "hang"
    assert "a.py:3 in f" in failed["cause"]
    assert f"It happened {MOST_HANGS} times" in failed["cause"]


def test_an_exchange_without_progress_is_abandoned_and_the_same_members_form_again():
    story = Story(3)
    story.happens(Stuck(1, 2.5))
    assert story.told(Form) == [0, 1, 2]
    assert story.state.generation == 2
    assert "made no progress" in story.logged("generation_started")[0]["reason"]
    story.happens(Stuck(1, 2.5))
    assert story.state.generation == 2


def test_an_exchange_that_never_moves_ends_the_run_and_one_that_moves_meanwhile_does_not():
    story = Story(2)
    for n in range(MOST_APART):
        story.happens(Stuck(story.state.generation, 2.5, n))
        story.form()
    assert story.logged("worker_failed") == []
    for _ in range(MOST_APART - 1):
        story.happens(Stuck(story.state.generation, 2.5, MOST_APART - 1))
        story.form()
    (failed,) = story.logged("worker_failed")
    assert (failed["kind"], failed["step"]) == ("group", MOST_APART)
    assert "the exchange made no progress for 2.5 s" in failed["cause"]
    assert f"{MOST_APART} times and no step after {MOST_APART - 1} was" in failed["cause"]


# ---- a master that takes over


@pytest.fixture
def two():
    return Story(2)


def test_a_master_that_takes_over_while_all_train_changes_nothing(two):
    two.happens(Restarted())
    assert two.actions == []
    two.happens(Reconnected(0, 1), Reconnected(1, 1))
    assert two.actions == []


def test_a_master_that_takes_over_while_a_group_forms_has_it_form_again(two):
    two.happens(Ended(1, -9, 5, 4))
    two.come(1)
    two.happens(Formed(0, 2))
    two.new(Send)
    two.happens(Restarted())
    assert two.state.generation == 3
    assert two.told(Form) == [0, 1]


def test_a_worker_that_reconnects_gets_the_messages_it_missed(two):
    two.happens(Interrupted("SIGINT"), Ended(1, -9, 5, 4))
    two.come(1)
    two.new(Send)
    two.happens(Reconnected(0, 1))
    words = [send.message for send in two.new(Send)]
    assert [type(word) for word in words] == [Form, Stop]
    assert (words[0].generation, words[0].rank, words[0].members) == (2, 0, [0, 1])
    two.happens(Reconnected(0, 2))
    assert [type(send.message) for send in two.new(Send)] == [Stop]


def test_a_change_that_was_asked_for_is_asked_for_again(two):
    two.happens(Scaled(3))
    two.come(2)
    two.new(Send)
    two.happens(Restarted(), Reconnected(0, 1))
    assert two.told(Regroup) == [0]


def test_a_worker_that_a_lost_master_started_and_that_never_joined_is_started_again(two):
    two.happens(Ended(1, -9, 5, 4))
    two.new(Start)
    two.happens(Restarted())
    assert two.new(Start) == [Start(1)]


def test_a_release_that_may_be_lost_is_sent_again(two):
    words = [LastMessage(w, Done(generation=1, step=9, rule="steps")) for w in (0, 1)]
    two.happens(*words)
    two.new(Send)
    two.happens(Restarted(), Reconnected(1, 1))
    assert two.told(Release) == [1]


def test_processes_that_were_to_be_killed_are_killed_again(two):
    two.happens(Interrupted("SIGINT"), Interrupted("SIGINT"))
    two.new(KillAll)
    two.happens(Restarted())
    assert two.new(KillAll) == [KillAll()]


def test_a_change_of_members_completes_although_a_message_was_lost_with_the_master(two):
    two.happens(Scaled(3))
    two.come(2)
    two.leave(0)
    two.happens(Restarted())
    two.now += 60.0
    two.happens(Tick(step=5))
    assert two.state.group == (0, 1, 2)


def test_killed_workers_do_not_lengthen_the_timeout_of_hangs():
    story = Story(2)
    story.happens(Ended(1, -9, 8, 7))
    story.come(1)
    story.form()
    assert story.state.hangs == {}
    story.happens(HANG, Ended(1, -9, 8, 7))
    assert (story.state.hangs, story.state.lost) == ({1: (7, 1)}, {1: (7, 1)})


# ---- members that own state


@pytest.fixture
def three():
    return Story(3, drains=True)


def drained(story):
    forms = [send.message for send in story.new(Send) if isinstance(send.message, Form)]
    return [(form.members, form.draining) for form in forms[:1]]


def test_a_member_that_leaves_has_one_generation_to_hand_over_before_it_is_released(three):
    three.happens(Scaled(2))
    three.leave()
    assert drained(three) == [([0, 1, 2], (2,))]
    three.form()
    assert three.told(Regroup) == [0, 1, 2]
    assert three.told(Release) == []
    three.leave()
    assert drained(three) == [([0, 1], ())]
    three.form()
    assert three.told(Release) == [2]


def test_a_member_whose_successor_is_ready_hands_over_to_it(three):
    three.happens(Noticed(0))
    three.come(3)
    three.leave()
    assert drained(three) == [([0, 1, 2, 3], (0,))]
    three.form()
    three.leave()
    assert drained(three) == [([1, 2, 3], ())]


def test_a_member_whose_group_breaks_while_it_drains_drains_again(three):
    three.happens(Scaled(2))
    three.leave()
    three.form()
    three.new(Send)
    three.happens(Ended(0, -9, 5, 4))
    three.come(0)
    assert drained(three) == [([0, 1, 2], (2,))]


def test_a_member_that_is_killed_while_it_drains_is_not_waited_for(three):
    three.happens(Scaled(2))
    three.leave()
    three.form()
    three.new(Send)
    three.happens(Ended(2, -9, 5, 4))
    assert three.new(Start) == []
    assert drained(three) == [([0, 1], ())]


def test_what_a_killed_member_left_is_handed_over_if_its_replacement_is_not_wanted_any_more(three):
    three.happens(Ended(2, -9, 5, 4))
    three.leave(0, 1)
    three.new(Start)
    three.happens(Scaled(2))
    assert drained(three) == []
    three.come(2)
    assert drained(three) == [([0, 1, 2], (2,))]
    three.form()
    three.leave()
    assert drained(three) == [([0, 1], ())]


def test_a_member_that_is_killed_before_it_has_handed_over_is_replaced_to_do_it(three):
    three.happens(Scaled(2), Ended(2, -9, 5, 4))
    assert three.new(Start) == [Start(2)]
    three.leave(0, 1)
    three.happens(Joined(2), Ended(2, -9, 0, 4))
    assert three.new(Start) == [Start(2)]
    three.happens(HostJoined())
    assert three.new(Start) == [Start(2)]
    three.come(2)
    assert drained(three) == [([0, 1, 2], (2,))]


def test_where_the_run_goes_back_nobody_has_anything_to_hand_over(three):
    three.happens(Scaled(2), Ended(2, -9, 5, 4), Ended(0, -9, 5, 4), Ended(1, -9, 5, 4))
    three.come(0, 1, 2)
    assert three.new(GoBack) == [GoBack()]
    three.happens(WentBack("checkpoint", 3))
    assert drained(three) == [([0, 1], ())]
    three.form()
    assert three.told(Release) == [2]


def test_where_workers_share_a_fate_all_start_again_from_a_checkpoint_where_one_is_lost():
    story = Story(3, together=True)
    story.happens(Ended(1, -9, 5, 4))
    assert story.new(Kill) == [Kill(0), Kill(2)]
    assert story.new(Start) == [Start(1)]
    story.happens(Ended(0, -9, 5, 4), Ended(2, -9, 5, 4))
    assert story.new(Start) == [Start(0), Start(2)]
    assert [story.state.restarts_of(worker) for worker in range(3)] == [1, 1, 1]
    assert story.logged("worker_lost") == [story.logged("worker_lost")[0]]
    story.come(0, 1, 2)
    assert story.new(GoBack) == [GoBack()]
    story.happens(WentBack("checkpoint", 3))
    assert story.told(Form) == [0, 1, 2]
    assert story.state.begins_at == "checkpoint"
    story.form()
    job = spec_file.build({"recipe": "a.py:f", "workers": 3}, source="a test")
    assert "GPUs" in refuse_scale(story.state, job, 2)


def test_without_own_state_a_member_leaves_at_once():
    story = Story(3)
    story.happens(Scaled(2))
    story.leave()
    assert drained(story) == [([0, 1], ())]


# ---- servers


def test_servers_have_the_last_ranks_and_every_member_gets_its_role():
    story = Story(2, servers=1)
    story.happens(Scaled(3))
    story.come(3)
    story.leave()
    forms = [send.message for send in story.new(Send) if isinstance(send.message, Form)]
    assert [form.members for form in forms] == [[0, 1, 3, 2]] * 3 + [[0, 1, 3, 2]]
    assert [(form.rank, form.role) for form in forms] == [
        (0, "worker"),
        (1, "worker"),
        (2, "worker"),
        (3, "server"),
    ]
    assert {form.servers for form in forms} == {(2,)}


def test_a_lost_server_is_replaced_and_no_worker_is_ended_or_started_for_it():
    story = Story(2, servers=2)
    story.happens(Ended(3, -9, 5, 4))
    assert story.new(Start) == [Start(3)]
    assert story.told(Form) == []
    story.come(3)
    assert story.told(Form) == [0, 1, 2, 3]
    assert story.new(Kill) + story.told(Release) == []


def test_servers_do_not_go_on_without_a_worker_that_gets_ready():
    story = Story(1, servers=1)
    story.happens(Ended(0, -9, 5, 4))
    story.happens(Joined(0))
    story.leave(1)
    story.now += BUILDING_S + 1
    story.happens(Tick(4))
    assert (story.told(Form), story.state.phase) == ([], "gathering")
    story.happens(Built(0))
    assert story.told(Form) == [0, 1]


def test_scaling_changes_the_workers_and_leaves_the_servers():
    story = Story(3, servers=1)
    story.happens(Scaled(1))
    story.leave()
    assert story.state.group == (0, 3)


def test_a_server_with_notice_stays_since_its_memory_is_of_its_number():
    story = Story(1, servers=1)
    before = story.state
    story.happens(Noticed(1))
    assert story.state == before


# ---- phases


@pytest.mark.parametrize(
    "event",
    [
        Joined(0),
        Built(7),
        Formed(7, 1),
        Broke(7, 1),
        LastMessage(7, Done(generation=1, step=9, rule="steps")),
    ],
)
def test_an_event_that_cannot_happen_to_a_member_in_its_phase_is_refused(event):
    story = Story(2)
    before = story.state
    with pytest.raises(TransitionError, match=r"member \d is (inside|absent) in generation 1"):
        story.happens(event)
    assert story.state == before
