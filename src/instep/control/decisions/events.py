"""The events of a run: all that can happen to it, as plain data.

What follows from each is decided in `decide.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from instep.comm.protocol.messages import Done, Failed, Whereabouts
from instep.control.stop_rules import Fired


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
