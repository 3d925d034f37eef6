"""The actions of the master: all that it can do, as plain data.

`master.py` carries them out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from instep.comm.protocol.messages import AnyMessage


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
