"""What can happen to a run, what can be done about it, and what its master knows: plain data.

The three vocabularies of the master's mind (`decide.py`), which turns the
first into the second by way of the third. Nothing here decides anything. The
state is written to the run's journal as it is, so it holds only plain values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from instep.comm.messages import AnyMessage, Done, Failed, Mark, Whereabouts
from instep.control.stop_rules import Fired

# ---- news: what can happen


@dataclass(frozen=True)
class HostCame:
    """A process that starts workers is there."""


@dataclass(frozen=True)
class Joined:
    """A worker has introduced itself."""

    worker: int


@dataclass(frozen=True)
class Attached:
    """A worker that the run knows has found the master again."""

    worker: int
    generation: int
    """The last that it was told to form."""


@dataclass(frozen=True)
class Built:
    """A worker has all that it needs but the others."""

    worker: int
    recovers: bool = True
    """Whether it can be in one group after another."""


@dataclass(frozen=True)
class Said:
    """A worker's last word: it has finished, or it cannot go on."""

    worker: int
    word: Done | Failed


@dataclass(frozen=True)
class Ended:
    """A worker's process has ended, or hung up and has no process that we could watch."""

    worker: int
    code: int | None
    """Negative for a signal; None where nobody saw how it ended."""
    step: int
    """The step that it was computing, as far as is known; 0 before the first."""
    committed: int = 0
    """The last step that any worker has committed, as far as is known."""
    place: Whereabouts | None = None
    """What it was at, where it left word."""


@dataclass(frozen=True)
class Unborn:
    """A worker's process could not be started, however often it was tried."""

    worker: int
    error: str


@dataclass(frozen=True)
class HostLost:
    """The process that starts workers has ended, and no other takes its place."""

    code: int
    detail: str = ""


@dataclass(frozen=True)
class Hung:
    """A worker gives no sign of life, or gets nowhere."""

    worker: int
    step: int
    phase: str
    how: str
    """What was seen, and for how long."""
    where: str = ""
    """The line at which it stands, as far as it could be asked."""
    loops: bool = False
    """Whether it keeps a processor busy with one read, and so does not wait for a disk."""


@dataclass(frozen=True)
class Silent:
    """A worker has given no sign of life for too long, in a run where nobody can be replaced."""

    worker: int
    step: int
    phase: str
    cause: str
    """What is to be said of it."""


@dataclass(frozen=True)
class Stuck:
    """Every member waits for the others in an exchange that does not move."""

    generation: int
    seconds: float
    step: int = 0
    """The last that any worker has committed, as far as is known."""


@dataclass(frozen=True)
class Scaled:
    """Somebody wants another number of workers."""

    workers: int


@dataclass(frozen=True)
class Noticed:
    """A worker was told that its machine is about to go away."""

    worker: int


@dataclass(frozen=True)
class Interrupted:
    """Somebody wants the run to stop: once for the next commit, twice for now."""

    by: str
    ready: bool = True
    """Whether every worker has said that its first step is about to begin."""
    step: int = 0
    """The last that is known to have been committed."""


@dataclass(frozen=True)
class Tick:
    """Time has passed."""

    step: int = 0
    """The last that is known to have been committed."""


@dataclass(frozen=True)
class Formed:
    """A worker is in the group of a generation, and holds its state."""

    worker: int
    generation: int


@dataclass(frozen=True)
class WentBack:
    """The run's files are those of this checkpoint again; empty for the beginning."""

    checkpoint: str
    step: int = 0
    """The last that it holds."""


@dataclass(frozen=True)
class Broke:
    """A worker has left its group: it came apart, or was to change at this commit."""

    worker: int
    generation: int
    cause: str = ""
    """What it saw of that, if anything."""
    mine: bool = False
    """Whether the worker itself is the cause, and no connection."""


@dataclass(frozen=True)
class Undone:
    """The workers go back to a clean copy: what came of later steps may have been wrong."""

    step: int
    """The last that it holds, and that no rule fired at."""


@dataclass(frozen=True)
class Restarted:
    """The master itself was lost; this one knows what the journal says."""


News: TypeAlias = (
    HostCame
    | Joined
    | Attached
    | Built
    | Formed
    | Said
    | Ended
    | Unborn
    | HostLost
    | Hung
    | Silent
    | Stuck
    | Scaled
    | Noticed
    | Interrupted
    | Fired
    | Broke
    | WentBack
    | Undone
    | Restarted
    | Tick
)

# ---- actions: what can be done


@dataclass(frozen=True)
class Send:
    """Say something to a worker."""

    worker: int
    message: AnyMessage


@dataclass(frozen=True)
class Log:
    """Write an event."""

    name: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Kill:
    """End a worker's process."""

    worker: int


@dataclass(frozen=True)
class KillAll:
    """End every process that is left."""


@dataclass(frozen=True)
class GoBack:
    """Take back what was committed after the newest checkpoint: nobody is left who has it."""


@dataclass(frozen=True)
class Start:
    """Bring up a process under this worker's number."""

    worker: int


@dataclass(frozen=True)
class Finish:
    """The run is over."""

    outcome: Literal["completed", "stopped", "failed", "interrupted"]
    rule: str
    step: int
    """The last that is known to have been committed."""
    exit_code: int


Action: TypeAlias = Send | Log | Kill | KillAll | GoBack | Start | Finish

# ---- state


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
    """What earlier sessions took."""


Phase: TypeAlias = Literal["gathering", "training", "releasing", "ending", "ended"]


@dataclass(frozen=True)
class State:
    """All that the master knows of a run's members."""

    wanted: frozenset[int]
    """Numbers of the workers that the next generation shall have."""
    recovers: bool = False
    """Whether a worker that is lost is replaced."""
    phase: Phase = "gathering"
    joined: frozenset[int] = frozenset()
    """Who has introduced itself, and lives."""
    built: frozenset[int] = frozenset()
    """Who is ready to be in a group."""
    ended: frozenset[int] = frozenset()
    spoke: frozenset[int] = frozenset()
    """Who has had a last word."""
    done: dict[int, Done] = field(default_factory=dict)
    generation: int = 0
    formed: bool = False
    """Whether there has been a generation in this session."""
    members: tuple[int, ...] = ()
    """Of the present generation, in rank order."""
    begins_at: str | None = None
    """The checkpoint that the present generation began from, empty for a beginning; None where
    it began with what its members held."""
    timeout_s: float = 0.0
    """How long the members of the present generation may take to find each other."""
    inside: frozenset[int] = frozenset()
    """Who is in the group of the present generation."""
    out: frozenset[int] = frozenset()
    """Who has left it again."""
    changing: bool = False
    """Whether its members were told to leave it at the next commit."""
    since: float = 0.0
    """When members began to be gathered for the next generation."""
    why: str = "start"
    """What made the next generation necessary."""
    origin: str = ""
    """The checkpoint that a generation begins from where no member holds state."""
    origin_step: int = 0
    """The last step that it holds, where the run went back to it."""
    from_origin: bool = True
    """Whether the next generation begins there."""
    holders: frozenset[int] = frozenset()
    """Who holds the state of the run."""
    bound: frozenset[int] = frozenset()
    """Who was told to form a group, and has not said since that it has left it. It may hold the
    state, and commit what others do not."""
    course: int = 0
    """The first generation since the run began, or went back: what came before does not count."""
    lost: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Worker to the farthest step that was committed when it was lost, and how often it was lost
    since. Going back does not make it less."""
    hangs: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The same, of those that were lost because they hung."""
    hung: dict[int, str] = field(default_factory=dict)
    """Worker that is being ended to how it hung."""
    loops: frozenset[int] = frozenset()
    """Of those, who hung in a read that kept a processor busy."""
    places: dict[str, tuple[int, int]] = field(default_factory=dict)
    """The same as `lost`, by place: a sample (`training 512`), or a step and a signal."""
    skips: bool = False
    """Whether samples that cannot be read are left out."""
    left_out: tuple[Mark, ...] = ()
    """Samples that ended who read them, again and again."""
    broken: int = 0
    """How often groups have come apart since somebody was lost last."""
    parted: bool = False
    """Whether a network is between workers, which may part them for any time."""
    seen: Broke | None = None
    """Why the present group came apart: whoever is the cause, else who has said so first."""
    apart: tuple[int, int] | None = None
    """The farthest step that was committed when a group came apart though every process lives
    and no network may be the cause, and how often it did since."""
    asked: int = 0
    """How often a stop was asked for from outside."""
    stop: str = ""
    """The rule that asked for a stop first; it stands, whatever asks after it."""
    stop_after: int | None = None
    """The last step but one, by the figures that made it fire; None if any may be the last."""
    time_limit: TimeLimit | None = None
    suspect: Blame | None = None
    blame: Blame | None = None
    deadline: float | None = None
    """When patience ends: with a suspect, or with processes that should have ended."""

    @property
    def leaving(self) -> frozenset[int]:
        """Who lives, and is not wanted in the next generation."""
        return self.joined - self.wanted
