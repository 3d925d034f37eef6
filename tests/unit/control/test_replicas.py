"""Replicas of several processes: they live and die together, and a group has all of one or none."""

import pytest

from instep.comm.protocol.messages import Done, Failed, Form, Regroup, Release
from instep.control.decisions.actions import Finish, Forget, GoBack, Kill, Log, Send, Start
from instep.control.decisions.crash_loop import MOST_LOSSES
from instep.control.decisions.decide import BROKEN_S, WAITING_S, decide
from instep.control.decisions.endings import BETTER_CAUSE_S, UNSEEN
from instep.control.decisions.events import (
    Broke,
    Built,
    Ended,
    Formed,
    HostJoined,
    Hung,
    Joined,
    LastMessage,
    Noticed,
    Reconnected,
    Restarted,
    Scaled,
    Tick,
    WentBack,
)
from instep.control.decisions.generations import BUILDING_S
from instep.control.decisions.membership import refuse_scale
from instep.control.decisions.phases import Phase
from instep.control.decisions.state import State, first_members
from instep.job import file as spec_file

ECHO = Failed(
    kind="PeerError", cause="a fellow went", where="", line="", step=4, phase="", exit_code=5
)


class Story:
    """A run of so many workers, and what its master decided on the events."""

    def __init__(self, workers=4, ranks=2, *, recovers=True):
        members = first_members(workers)
        self.state = State(members=members, ranks=ranks, recovers=recovers)
        self.now = 0.0
        self.actions = []
        self.happens(HostJoined())
        self.come(*range(workers))
        self.form()
        self.actions = []

    def happens(self, *events):
        for event in events:
            self.state, follows = decide(self.state, event, self.now)
            self.actions += follows

    def passes(self, seconds):
        self.now += seconds
        self.happens(Tick(step=5))

    def come(self, *workers):
        for worker in workers:
            self.happens(Joined(worker), Built(worker))

    def form(self):
        for worker in self.state.group:
            self.happens(Formed(worker, self.state.generation))

    def leave(self, *workers):
        for worker in workers:
            self.happens(Broke(worker, self.state.generation))

    def new(self, kind):
        """The workers of the actions of a kind since they were asked for last."""
        found = [a.worker for a in self.actions if isinstance(a, kind)]
        self.actions = [a for a in self.actions if not isinstance(a, kind)]
        return found

    def told(self, kind):
        sends = [a for a in self.actions if isinstance(a, Send) and isinstance(a.message, kind)]
        self.actions = [a for a in self.actions if a not in sends]
        return [send.worker for send in sends]

    def logged(self, name):
        return [log.fields for log in self.actions if isinstance(log, Log) and log.name == name]


def killed(worker):
    return Ended(worker, -9, 6, 5)


def test_a_replica_that_loses_a_process_is_started_again_whole():
    story = Story()
    story.happens(killed(1))
    (lost,) = story.logged("worker_lost")
    assert (lost["worker"], lost["restarted"]) == (1, [0])
    assert (story.new(Kill), story.new(Start)) == ([0], [1])
    assert Forget(0) in story.actions
    story.happens(killed(0))
    assert story.new(Start) == [0]
    assert len(story.logged("worker_lost")) == 1
    assert story.state.restarts == {0: 1}
    story.leave(2, 3)
    story.come(0)
    assert story.told(Form) == []
    story.come(1)
    assert story.told(Form) == [0, 1, 2, 3]


def test_the_loss_counts_for_its_cause_and_not_for_those_that_were_killed_with_it():
    story = Story()
    for _ in range(MOST_LOSSES - 1):
        story.happens(killed(1), killed(0))
        story.leave(2, 3)
        story.come(0, 1)
        story.form()
    assert story.state.lost == {1: (5, MOST_LOSSES - 1)}
    story.happens(killed(0), killed(1))
    assert story.state.lost == {0: (5, 1), 1: (5, MOST_LOSSES - 1)}
    assert story.state.phase == "gathering"


@pytest.mark.parametrize("phase", ["building", "ready", "forming", "inside", "left"])
def test_a_fellow_is_killed_wherever_it_is_and_what_it_still_says_is_ignored(phase):
    story = Story()
    if phase in ("building", "ready"):
        story.happens(killed(1), killed(0), Joined(1), Joined(0))
        story.leave(2, 3)
        story.happens(*[Built(0)] * (phase == "ready"))
    elif phase == "forming":
        story.leave(0, 1, 2, 3)
        story.passes(BROKEN_S)
        story.passes(BROKEN_S)
    elif phase == "left":
        story.leave(0)
    story.actions = []
    assert story.state.member(0).phase == phase
    story.happens(killed(1))
    assert story.new(Kill) == [0]
    known, generation = story.state, story.state.generation
    story.happens(
        Built(0),
        Formed(0, generation),
        Broke(0, generation),
        LastMessage(0, ECHO),
        LastMessage(0, Done(generation=generation, step=6, rule="epochs")),
        Hung(0, 6, "forward", "gave no sign of life"),
        Noticed(0),
        Reconnected(0, 0),
    )
    assert story.state == known
    assert not story.told(Form) + story.new(Kill)


def test_a_failure_that_follows_from_a_fellow_is_not_held_against_it():
    story = Story()
    story.happens(LastMessage(0, ECHO), killed(1), Ended(0, 5, 6, 5))
    story.passes(BETTER_CAUSE_S + 0.1)
    assert story.told(Form) == [2, 3]
    assert not [a for a in story.actions if isinstance(a, Finish)]
    assert story.state.lost.keys() == {1}


def test_a_failure_of_a_newcomer_that_follows_from_a_fellow_leaves_the_others_alone():
    story = Story()
    story.happens(Scaled(6), Joined(4), Joined(5), LastMessage(4, ECHO), killed(5))
    story.passes(BETTER_CAUSE_S + 0.1)
    assert (story.state.phase, story.state.generation) == ("training", 1)


def test_a_second_loss_while_a_replica_starts_again_starts_it_once_more():
    story = Story(8, ranks=4)
    story.happens(killed(1))
    assert (story.new(Kill), story.new(Start)) == ([0, 2, 3], [1])
    story.happens(killed(0), Joined(1))
    story.happens(Joined(0))
    assert story.new(Start) == [0]
    story.happens(killed(1))  # 2 and 3 of the start before have not ended yet
    assert (story.new(Kill), story.new(Start)) == ([0], [1])
    assert story.state.restarts == {0: 2}
    for worker in (2, 0, 3):
        story.happens(killed(worker))
    assert story.new(Start) == [2, 0, 3]
    story.leave(4, 5, 6, 7)
    story.come(0, 1, 2, 3)
    assert story.told(Form) == [*range(8)]


def test_a_process_that_never_joined_has_met_nobody_and_takes_nobody_with_it():
    story = Story()
    story.happens(killed(1), killed(0), Joined(0))
    assert story.new(Start) == [1, 0]
    story.new(Kill)
    story.happens(killed(1))
    assert (story.new(Kill), story.new(Start)) == ([], [1])
    assert story.state.restarts == {0: 1}


def test_no_group_forms_while_a_process_that_may_still_write_is_being_killed():
    story = Story()
    story.happens(killed(1))
    story.leave(2, 3)
    story.passes(10 * BUILDING_S)
    assert story.told(Form) == []
    story.happens(killed(0))
    story.passes(0.1)
    assert story.told(Form) == [2, 3]


def test_the_others_train_on_without_a_part_of_a_replica_and_take_it_in_whole():
    story = Story()
    story.happens(killed(1), killed(0))
    story.leave(2, 3)
    story.come(0)
    story.passes(BUILDING_S + 0.1)
    assert story.told(Form) == [2, 3]
    assert story.logged("replica_waits") == [{"replica": 0, "workers": [0], "missing": [1]}]
    story.form()
    story.happens(Joined(1))
    assert story.told(Regroup) == []
    story.happens(Built(1))
    assert story.told(Regroup) == [2, 3]
    story.leave(2, 3)
    assert story.told(Form) == [0, 1, 2, 3]
    assert not story.told(Release)


@pytest.mark.parametrize("replicas", [1, 2])
def test_where_no_replica_is_whole_each_says_once_for_whom_it_waits(replicas):
    story = Story(2 * replicas)
    story.happens(*(killed(n) for first in range(0, 2 * replicas, 2) for n in (first + 1, first)))
    story.come(*range(0, 2 * replicas, 2))
    story.passes(WAITING_S - 0.1)
    assert story.logged("replica_waits") == []
    for _ in range(3):
        story.passes(100.0)
    said = [{"replica": n, "workers": [2 * n], "missing": [2 * n + 1]} for n in range(replicas)]
    assert story.logged("replica_waits") == said
    story.come(*range(1, 2 * replicas, 2))
    assert not story.told(Form)
    assert GoBack() in story.actions
    story.happens(WentBack("", 0))
    story.form()
    story.actions = []
    story.happens(killed(1), killed(0))
    story.come(0)
    story.passes(WAITING_S)
    assert story.logged("replica_waits") == said[:1], "it is another wait"


def test_a_process_that_comes_while_the_others_train_says_for_whom_it_waits():
    story = Story()
    story.happens(killed(1), killed(0))
    story.leave(2, 3)
    story.passes(BUILDING_S + 0.1)
    assert story.told(Form) == [2, 3]
    story.form()
    story.come(1)
    story.passes(WAITING_S - 0.1)
    assert story.logged("replica_waits") == []
    story.passes(0.1)
    story.passes(100.0)
    assert story.logged("replica_waits") == [{"replica": 0, "workers": [1], "missing": [0]}]


def test_a_replica_that_lacks_more_or_others_than_before_says_so():
    story = Story(4, ranks=4)
    story.happens(*map(killed, (1, 0, 2, 3)))
    story.passes(WAITING_S)
    story.come(0)
    story.passes(WAITING_S - 0.1)
    assert story.logged("replica_waits") == [], "the others may come any moment"
    story.passes(0.1)
    story.come(3)
    story.passes(WAITING_S)
    assert [e["missing"] for e in story.logged("replica_waits")] == [[1, 2, 3], [1, 2]]


def test_a_loss_in_a_replica_that_is_not_in_the_group_does_not_break_it():
    story = Story()
    story.happens(Scaled(6))
    assert story.new(Start) == [4, 5]
    story.come(4)
    story.happens(Joined(5), killed(5))
    assert (story.new(Kill), story.new(Start)) == ([4], [5])
    assert (story.state.phase, story.state.generation) == ("training", 1)


def test_the_run_goes_back_where_no_whole_replica_holds_its_state():
    story = Story()
    story.happens(killed(1), killed(2), killed(0), killed(3))
    story.come(0, 1, 2)
    assert not [a for a in story.actions if isinstance(a, GoBack)]
    story.come(3)
    assert [a for a in story.actions if isinstance(a, GoBack)]
    story.happens(WentBack("", 0))
    assert story.told(Form) == [0, 1, 2, 3]


def test_a_replica_of_which_some_got_the_state_does_not_hold_it():
    story = Story()
    story.happens(killed(1), killed(0))
    story.leave(2, 3)
    story.come(0, 1)
    story.happens(Formed(2, 2), Formed(3, 2), Formed(0, 2))
    story.happens(Broke(0, 2, holds=True), Broke(1, 2))
    assert story.state.holders == {2, 3}
    story.happens(killed(3), killed(2))
    story.actions = []
    story.come(2, 3)
    assert [a for a in story.actions if isinstance(a, GoBack)]


def test_members_that_have_left_a_generation_follow_a_fellow_that_is_still_inside():
    story = Story()
    story.leave(0, 1, 2)
    story.passes(BROKEN_S)
    story.passes(BROKEN_S)
    assert story.told(Form) == [0, 1, 2, 3]


def test_a_process_that_had_finished_and_is_needed_again_takes_its_fellows_with_it():
    story = Story()
    story.happens(LastMessage(0, Done(generation=1, step=9, rule="epochs")), Ended(0, 0, 9))
    assert story.state.member(0).phase is Phase.ENDED
    story.happens(killed(3))
    assert (story.new(Kill), sorted(story.new(Start))) == ([1, 2], [0, 3])
    assert story.state.restarts == {0: 1, 1: 1}


def test_a_new_master_kills_those_again_that_were_being_killed():
    story = Story()
    story.happens(killed(1))
    story.actions = []
    story.happens(Restarted())
    assert (story.new(Kill), story.new(Start)) == ([0], [1])


def test_a_process_whose_machine_goes_away_takes_its_replica_with_it():
    story = Story()
    story.happens(Noticed(3))
    (leaving,) = story.logged("worker_leaving")
    assert leaving == {"worker": 3, "successor": 5, "fellows": [2]}
    assert story.new(Start) == [4, 5]
    story.happens(Noticed(2))  # the machine is that of both
    assert story.new(Start) == []
    story.come(4, 5)
    assert story.told(Regroup) == [0, 1, 2, 3]
    story.leave(0, 1, 2, 3)
    assert story.told(Form) == [0, 1, 4, 5]
    story.form()
    assert story.told(Release) == [2, 3]
    story.happens(Ended(2, 0, 9))  # as it was told to: its fellow is not killed
    assert story.new(Kill) == []


def test_replicas_come_and_go_whole():
    story = Story()
    story.happens(Scaled(8))
    assert story.new(Start) == [4, 5, 6, 7]
    story.come(4, 5, 6, 7)
    story.leave(0, 1, 2, 3)
    story.form()
    story.happens(Scaled(2))
    story.leave(*range(8))
    story.told(Form)
    assert story.state.group == (0, 1)
    story.form()
    assert story.told(Release) == [2, 3, 4, 5, 6, 7]
    story.happens(Ended(2, 0, 9), Ended(4, 0, 9), Ended(5, 0, 9))
    story.happens(Scaled(4))
    assert story.new(Start) == [4, 5], "3 is still there, and 2 shares its replica"
    assert story.state.restarts_of(4) > 0, "or it would find what the first 5 told the first 4"


JOB = {"recipe": "a.py:f", "workers": 4}


@pytest.mark.parametrize(
    ("mesh", "workers", "refusal"),
    [
        ({"shard": 4}, 5, "a replica has 4 processes ([mesh] shard = 4), so 4, 8, ..."),
        (
            {"tensor": 2, "stages": 2},
            6,
            "a replica has 4 processes ([mesh] tensor = 2, stages = 2), so 4, 8, ...",
        ),
        ({"shard": 4}, 12, "work for 8 at most, since train.micro_batches = 8"),
        ({"tensor": 4}, 36, "work for 32 at most, since train.micro_batches = 8"),
        ({"shard": 4}, 8, ""),
        ({"tensor": 4}, 32, ""),
    ],
)
def test_a_run_is_scaled_by_whole_replicas(mesh, workers, refusal):
    job = spec_file.build(JOB | {"mesh": mesh}, source="a test")
    answer = refuse_scale(Story(ranks=4).state, job, workers)
    assert refusal in answer
    assert bool(refusal) == bool(answer)
    assert not refusal or answer.startswith(f"workers = {workers}: ")


def test_where_nobody_can_be_replaced_a_lost_process_ends_the_run():
    story = Story(recovers=False)
    story.happens(Ended(1, UNSEEN, 6, 5))
    story.passes(BETTER_CAUSE_S)
    assert story.state.phase == "ending"
    assert story.state.blame.worker == 1
    assert story.new(Start) == []


def test_processes_that_are_replicas_of_their_own_have_no_fellows():
    story = Story(ranks=1)
    story.happens(killed(1))
    (lost,) = story.logged("worker_lost")
    assert lost.keys() == {"worker", "step", "cause"}
    assert (story.new(Kill), story.new(Start)) == ([], [1])
    assert not [a for a in story.actions if isinstance(a, Forget)]
