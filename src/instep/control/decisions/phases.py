"""The phases of a member, and the record that the master keeps of it:

    ABSENT -Joined-> BUILDING -Built-> READY -Form-> FORMING -Formed-> INSIDE
    FORMING, INSIDE -Broke-> LEFT -Form-> FORMING      INSIDE -Form g+1-> FORMING
    BUILDING, READY, LEFT, at the end all -Release-> RELEASED
    any -Ended-> ABSENT (can be replaced) or ENDED
    BUILDING to LEFT -Ended of a fellow-> KILLED

Several processes may share one replica (copy) of the model: the *fellows* of a member. They live
and die together, and a group has all of them or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeAlias

from instep.comm.protocol.messages import Done, Failed


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
