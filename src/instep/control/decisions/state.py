"""The state of a run, as the master knows it: plain data, which decides nothing.

`decide.py` turns an event (`events.py`) into actions (`actions.py`) and the next state; the state
only knows which phases a member may go through (`phases.py`). It is written to the run's journal
as it is, so it holds only plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

from instep.comm.protocol.messages import Done, Failed, Mark
from instep.control.decisions.events import Broke
from instep.control.decisions.phases import LIVING, NEXT, READY, Member, Phase, TransitionError

_UNKNOWN = Member()


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
    bound: bool = False
    """Whether nobody else has the data that a member computes with: a lost one is waited for."""
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
