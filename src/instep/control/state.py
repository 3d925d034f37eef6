"""What the master knows, what can happen, and what it can do: plain data, three vocabularies.

`decide.py` turns an event into actions and the next state. Nothing here decides
anything; the state only knows which phases a member may go through:

    ABSENT -Joined-> BUILDING -Built-> READY -Form-> FORMING -Formed-> INSIDE
    FORMING, INSIDE -Broke-> LEFT -Form-> FORMING      INSIDE -Form g+1-> FORMING
    BUILDING, READY, LEFT, at the end all -Release-> RELEASED
    any -Ended-> ABSENT (can be replaced) or ENDED
    BUILDING to LEFT -Ended of a fellow-> KILLED

Several processes may share one replica (copy) of the model: the *fellows* of a member. They live
and die together, and a group has all of them or none.

The state is written to the run's journal as it is, so it holds only plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, TypeAlias

from instep.comm.protocol.messages import AnyMessage, Done, Failed, Mark, Whereabouts
from instep.control.stop_rules import Fired

# ---- events: what can happen


@dataclass(frozen=True)
class HostJoined:
    """A process that starts workers is there."""


@dataclass(frozen=True)
class Joined:
    """A new process has introduced itself under this number."""

    worker: int


@dataclass(frozen=True)
class Reconnected:
    """A process that has joined before has connected again."""

    worker: int
    generation: int
    """The last `Form` that it received."""


@dataclass(frozen=True)
class Built:
    """A member has the model and all else that it needs, except its group."""

    worker: int
    recovers: bool = True
    """Whether it can be in one group after another."""
    holds: bool = False
    """Whether it holds the state of the run, which its process before left on its host."""
    together: bool = False
    """Whether its group ends with any of its members."""


@dataclass(frozen=True)
class Formed:
    """A member is in the group of a generation, and holds its state."""

    worker: int
    generation: int


@dataclass(frozen=True)
class Broke:
    """A member has left its group: it came apart, or was to change at this commit."""

    worker: int
    generation: int
    cause: str = ""
    """What the member saw, if anything."""
    mine: bool = False
    """Whether the member itself is the cause, and no connection."""
    holds: bool = False
    """Whether it holds the state of the run, which a peer may have given it before all broke."""


@dataclass(frozen=True)
class LastMessage:
    """A member has finished, or has failed."""

    worker: int
    message: Done | Failed


@dataclass(frozen=True)
class Ended:
    """A member's process has ended, or has closed its connection and cannot be watched."""

    worker: int
    code: int | None
    """Negative for a signal; None where it is not known."""
    step: int
    """The step that it was computing, as far as is known; 0 before the first."""
    committed: int = 0
    """The last step that any worker has committed, as far as is known."""
    place: Whereabouts | None = None
    """What it was doing, where it left a note."""


@dataclass(frozen=True)
class StartFailed:
    """A process could not be started, after all retries."""

    worker: int
    error: str


@dataclass(frozen=True)
class HostLost:
    """The process that starts workers has ended, and there is no other."""

    code: int
    detail: str = ""


@dataclass(frozen=True)
class Hung:
    """A member that can be replaced is silent, or makes no progress."""

    worker: int
    step: int
    phase: str
    how: str
    """What was seen, and for how long."""
    where: str = ""
    """The line of code it hangs at, if known."""
    loops: bool = False
    """Whether it keeps a processor busy with one read, so that it does not wait for a disk."""


@dataclass(frozen=True)
class Silent:
    """A member that cannot be replaced has been silent for too long."""

    worker: int
    step: int
    phase: str
    cause: str
    """For the error message."""


@dataclass(frozen=True)
class Stuck:
    """All members wait for each other in an exchange that makes no progress."""

    generation: int
    seconds: float
    step: int = 0
    """The last that any worker has committed, as far as is known."""


@dataclass(frozen=True)
class Scaled:
    """The run is to have another number of workers: a user wants it, or hosts come or leave."""

    workers: int
    hosts: tuple[int, ...] = ()
    """Those that come or leave; none if a user wants it."""
    first: frozenset[int] = frozenset()
    """Workers that leave before others do."""


@dataclass(frozen=True)
class Noticed:
    """A member's machine is about to go away, or it shall move to another."""

    worker: int


@dataclass(frozen=True)
class Interrupted:
    """A user wants the run to stop: once for the next commit, twice for now."""

    by: str
    step: int = 0
    """The last that is known to be committed."""


@dataclass(frozen=True)
class WentBack:
    """The run's files are those of this checkpoint again; empty for the beginning."""

    checkpoint: str
    step: int = 0
    """The last that it holds."""


@dataclass(frozen=True)
class RolledBack:
    """The workers have returned to a clean copy: results of later steps may be wrong."""

    step: int
    """The last that it holds, and at which no rule fired."""


@dataclass(frozen=True)
class Restarted:
    """This master replaces one that was lost; it knows what the journal says."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    step: int = 0
    """The last that is known to be committed."""


Event: TypeAlias = (
    HostJoined
    | Joined
    | Reconnected
    | Built
    | Formed
    | Broke
    | LastMessage
    | Ended
    | StartFailed
    | HostLost
    | Hung
    | Silent
    | Stuck
    | Scaled
    | Noticed
    | Interrupted
    | Fired
    | WentBack
    | RolledBack
    | Restarted
    | Tick
)

# ---- actions: what can be done


@dataclass(frozen=True)
class Send:
    """Send a message to a member."""

    worker: int
    message: AnyMessage


@dataclass(frozen=True)
class Log:
    """Write an event to the run's log."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """Kill a member's process."""

    worker: int


@dataclass(frozen=True)
class Forget:
    """Forget what the processes of a replica have told each other: others take their place."""

    replica: int


@dataclass(frozen=True)
class KillAll:
    """Kill every process that is left."""


@dataclass(frozen=True)
class GoBack:
    """Undo what was committed after the newest checkpoint: no member holds it any more."""


@dataclass(frozen=True)
class Start:
    """Start a process under this number."""

    worker: int


@dataclass(frozen=True)
class Finish:
    """The run is over."""

    outcome: Literal["completed", "stopped", "failed", "interrupted"]
    rule: str
    step: int
    """The last that is known to be committed."""
    exit_code: int


Action: TypeAlias = Send | Log | Kill | Forget | KillAll | GoBack | Start | Finish

# ---- one member


class Phase(StrEnum):
    """Where a member is on its way."""

    ABSENT = "absent"
    """No process has joined under its number."""
    BUILDING = "building"
    READY = "ready"
    """It has been in no group yet."""
    FORMING = "forming"
    """It was sent the `Form` of the present generation, and has not confirmed it."""
    INSIDE = "inside"
    """It is in the group of the present generation."""
    LEFT = "left"
    """It has left its last group, and waits for the next `Form`."""
    KILLED = "killed"
    """It is being killed, since a fellow was lost; what it still sends is ignored."""
    RELEASED = "released"
    """It was sent `Release`, and its process may still be there."""
    ENDED = "ended"
    """Its process has ended, and is not replaced."""


IN_A_GROUP = frozenset({Phase.FORMING, Phase.INSIDE})
READY = IN_A_GROUP | {Phase.READY, Phase.LEFT}
KILLED = frozenset({Phase.KILLED})
LIVING = READY | {Phase.BUILDING, Phase.KILLED, Phase.RELEASED}

_GONE = frozenset({Phase.ABSENT, Phase.ENDED})
_LOST = _GONE | {Phase.KILLED}
NEXT = {
    Phase.ABSENT: _GONE | {Phase.BUILDING},
    Phase.BUILDING: _LOST | {Phase.READY, Phase.RELEASED},
    Phase.READY: _LOST | {Phase.FORMING, Phase.RELEASED},
    Phase.FORMING: _LOST | {Phase.INSIDE, Phase.LEFT, Phase.FORMING, Phase.RELEASED},
    Phase.INSIDE: _LOST | {Phase.LEFT, Phase.FORMING, Phase.RELEASED},
    Phase.LEFT: _LOST | {Phase.FORMING, Phase.RELEASED},
    Phase.KILLED: _GONE,
    Phase.RELEASED: _GONE,
    Phase.ENDED: _GONE,
}
"""The phases that may follow each; any other transition is refused."""


Role: TypeAlias = Literal["worker", "server"]


class TransitionError(AssertionError):
    """An event that cannot happen to a member in its phase."""


@dataclass(frozen=True)
class Member:
    """What the master knows of one number. A replacement begins with an empty record."""

    wanted: bool = False
    """Whether the next generation shall have it."""
    role: Role = "worker"
    owes: bool = False
    """Whether it may have state that no other member has, or the last process under its number
    left some: that is handed over before it leaves."""
    phase: Phase = Phase.ABSENT
    formed: int = 0
    """The newest generation whose group it was in; 0 for none."""
    held: int = 0
    """The newest generation that it left with the state of the run; 0 for none."""
    last_message: Done | Failed | None = None
    """Its last message: it has finished, or failed."""
    hung: str = ""
    """How it hangs, where it is being killed for that."""
    loops: bool = False
    """Whether it hangs in a read that keeps a processor busy."""


_UNKNOWN = Member()

# ---- the run


@dataclass(frozen=True)
class Blame:
    """Which worker failed, and how."""

    worker: int
    failed: Failed


@dataclass(frozen=True)
class TimeLimit:
    """How long the whole run may take."""

    limit_s: float
    began: float
    """When this session of the run began, on the clock of `decide`'s `now`."""
    spent_s: float = 0.0
    """Seconds that earlier sessions took."""


RunPhase: TypeAlias = Literal["gathering", "training", "releasing", "ending", "ended"]


def first_members(workers: int, servers: int = 0) -> dict[int, Member]:
    """The members that a run begins with; servers have the numbers after the workers."""
    at_work = {number: Member(wanted=True) for number in range(workers)}
    numbers = range(workers, workers + servers)
    return at_work | {number: Member(wanted=True, role="server") for number in numbers}


@dataclass(frozen=True)
class State:
    """All that the master knows of a run."""

    members: dict[int, Member] = field(default_factory=dict)
    """By number: who is wanted, and who is there."""
    ranks: int = 1
    """How many processes share a replica; their numbers follow each other."""
    restarts: dict[int, int] = field(default_factory=dict)
    """By replica: how often its processes were started again."""
    waits: dict[int, list[int]] = field(default_factory=dict)
    """By replica: the processes that it lacks, as was said last."""
    recovers: bool = False
    """Whether a member that is lost is replaced."""
    together: bool = False
    """Whether all start again where one is lost: NCCL does not let go of those that wait for it."""
    drains: bool = False
    """Whether members own state, which one that leaves must hand over first."""
    phase: RunPhase = "gathering"
    generation: int = 0
    group: tuple[int, ...] = ()
    """The members of the present generation, in rank order."""
    draining: tuple[int, ...] = ()
    """Those of them that get no work, and hand over what they own before they leave."""
    begins_at: str | None = None
    """The checkpoint that the present generation began from, empty for the beginning of the run;
    None where it began with what its members held."""
    timeout_s: float = 0.0
    """How long the members of the present generation may take to connect."""
    changing: bool = False
    """Whether its members were asked to leave it at the next commit."""
    since: float = 0.0
    """When the master began to gather members for the next generation."""
    came: float = 0.0
    """When a process joined last."""
    why: str = "start"
    """Why the next generation is needed."""
    checkpoint: str = ""
    """The checkpoint that a generation begins from where no member holds state."""
    checkpoint_step: int = 0
    """The last step that it holds, where the run went back to it."""
    from_checkpoint: bool = True
    """Whether the next generation begins there."""
    course: int = 0
    """The first generation since the run began, or went back; 0 before it."""
    lost: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By worker: the last step that was committed when it was lost, and how often it was lost
    since. Going back does not make it less."""
    hangs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The same, of losses by a hang."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The same, by place: a sample (`training 512`), or a step and a signal."""
    skips: bool = False
    """Whether samples that cannot be read are left out."""
    left_out: tuple[Mark, ...] = ()
    """Samples that are left out, since processes that read them ended again and again."""
    broken: int = 0
    """How often the group came apart since a member was lost last."""
    parted: bool = False
    """Whether a network lies between members, which may part them for any time."""
    seen: Broke | None = None
    """Why the present group came apart: what the member at fault said, else the first report."""
    apart: tuple[int, int] | None = None
    """The last step that was committed when a group came apart though every process lives
    and no network may be the cause, and how often that happened since."""
    asked: int = 0
    """How often a user asked for a stop."""
    stop: str = ""
    """The rule that asked for a stop first; later ones do not replace it."""
    stop_after: int | None = None
    """The last step but one, where a rule fired; None if any step may be the last."""
    time_limit: TimeLimit | None = None
    suspect: Blame | None = None
    blame: Blame | None = None
    deadline: float | None = None
    """When the master stops waiting: for a cause, or for processes that should have ended."""

    def member(self, number: int) -> Member:
        """The record of a number."""
        return self.members.get(number, _UNKNOWN)

    # ---- changes

    def move(self, number: int, to: Phase) -> State:
        """The state after a member has changed its phase. There is no other way to change one.

        Raises:
            TransitionError: this phase cannot follow the member's present one.
        """
        member = self.expect(number, *(phase for phase in Phase if to in NEXT[phase]), to=to)
        if to is Phase.ABSENT:
            member = Member(member.wanted, member.role, member.owes)  # for the next process
        return self._with(number, replace(member, phase=to))

    def note(self, number: int, **facts: Any) -> State:
        """The state after something else has become known of a member."""
        assert "phase" not in facts
        return self._with(number, replace(self.member(number), **facts))

    def expect(self, number: int, *phases: Phase, to: str = "this event") -> Member:
        """The record of a member that must be in one of these phases.

        Raises:
            TransitionError: it is in another.
        """
        member = self.member(number)
        if member.phase not in phases:
            raise TransitionError(
                f"member {number} is {member.phase} in generation {self.generation}, "
                f"which {to} cannot follow"
            )
        return member

    def _with(self, number: int, member: Member) -> State:
        members = self.members | {number: member}
        if member.phase is Phase.ABSENT and not (member.wanted or member.owes):
            del members[number]
        return replace(self, members=members)

    # ---- views of the records, each made once: a state does not change

    def those(self, phases: frozenset[Phase]) -> frozenset[int]:
        """Numbers of the members in one of these phases."""
        return frozenset(n for n, member in self.members.items() if member.phase in phases)

    def fellows(self, number: int) -> frozenset[int]:
        """The members that share a replica with this one, itself included."""
        first = number - number % self.ranks
        return frozenset(range(first, first + self.ranks))

    def whole(self, numbers: frozenset[int]) -> frozenset[int]:
        """Those of them whose fellows are all among them."""
        return frozenset(n for n in numbers if self.fellows(n) <= numbers)

    def restarts_of(self, number: int) -> int:
        """How often a member's replica was started again."""
        return self.restarts.get(number // self.ranks, 0)

    @cached_property
    def wanted(self) -> frozenset[int]:
        """Members that the next generation shall have."""
        return frozenset(n for n, member in self.members.items() if member.wanted)

    @cached_property
    def needed(self) -> frozenset[int]:
        """Members that the next generation waits for: also those that have to hand over first."""
        return frozenset(n for n, member in self.members.items() if member.wanted or member.owes)

    @cached_property
    def servers(self) -> frozenset[int]:
        """Members that hold parameters for the others."""
        return frozenset(n for n, member in self.members.items() if member.role == "server")

    @cached_property
    def joined(self) -> frozenset[int]:
        """Members whose process has joined, and has not been replaced."""
        return frozenset(n for n, member in self.members.items() if member.phase != Phase.ABSENT)

    @cached_property
    def living(self) -> frozenset[int]:
        """Members whose process has joined, and has not ended."""
        return self.those(LIVING)

    @cached_property
    def ready(self) -> frozenset[int]:
        """Members that can be in a group."""
        return self.those(READY)

    @cached_property
    def holders(self) -> frozenset[int]:
        """Members that hold the state of the run, as all their fellows do."""
        since = max(self.course, 1)
        records = ((n, self.members[n]) for n in self.ready)
        held = frozenset(n for n, each in records if max(each.formed, each.held) >= since)
        return self.whole(held)

    @cached_property
    def done(self) -> dict[int, Done]:
        """Members of the present generation that have finished, with their last message."""
        said = {n: member.last_message for n, member in self.members.items()}
        generation = self.generation
        return {
            n: last_message
            for n, last_message in said.items()
            if isinstance(last_message, Done) and last_message.generation == generation
        }

    @cached_property
    def complete(self) -> bool:
        """Whether all members of the present generation have been in its group."""
        return all(self.member(n).formed == self.generation for n in self.group)

    @cached_property
    def left(self) -> bool:
        """Whether all members have left the group of the present generation."""
        return all(self.member(n).phase == Phase.LEFT for n in self.group)
