"""What is asked of the servers that have no leases, by workers and by the first server.

Answered in `further.py`; of the first server workers ask an `Ask`.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Stage(msgspec.Struct, tag=True, array_like=True):
    """A worker sends its gradient, as the body, before it shows the token to the first server."""

    token: int
    present: list[bool]
    """As in `commits.Push`."""


class Pull(msgspec.Struct, tag=True, array_like=True):
    """A worker has a lease, and wants what to compute with."""

    token: int


class Prepare(msgspec.Struct, tag=True, array_like=True):
    """The push with this token is to be the next update: get ready, and tell its squares."""

    token: int
    worker: int
    version: int
    """Number of the update."""


class Apply(msgspec.Struct, tag=True, array_like=True):
    """Update, and keep what is new."""

    version: int
    moves: bool
    """Whether anything moves; what is prepared does."""
    factor: float
    """What the gradient is multiplied by."""
    options: list[dict[str, Any]]
    """As `LeasedUpdate.options`."""
    keeps: bool
    """Whether the first server keeps copies in memory that outlives it."""


class Be(msgspec.Struct, tag=True, array_like=True):
    """Be at this update: what was done beyond it has not happened."""

    course: int
    version: int


class Give(msgspec.Struct, tag=True, array_like=True):
    """Send the pieces, as the body."""


class Write(msgspec.Struct, tag=True, array_like=True):
    """Write the optimizer's state into a file of a checkpoint, as `further.path_of`."""

    begins: str
    ends: str
    """The path, before and after the server's place."""
    last: bool = False
    """Whether it is of the last step of this session."""


class End(msgspec.Struct, tag=True, array_like=True):
    """The run is over."""

    step: int
    """The last one."""
    rule: str
    """By which it has ended."""
    finite: bool
    """Whether its loss was."""
    generation: int
    """In which the first server ends; all have to end in the same."""


Question = Stage | Pull | Prepare | Apply | Be | Give | Write | End


class ServerAnswer(msgspec.Struct, array_like=True):
    """To any of them."""

    fine: bool = True
    """Whether it was done: `Prepare` needs the push, `Apply` the update before, `Be` the copy,
    `Write` the disk."""
    squares: list[float] = []
    """Of the gradient, as `norm.summed`: however many blocks it has, they are a few."""
    keeps: bool = True
    """Whether this server keeps copies."""
    size_bytes: int = 0
    sha256: str = ""
    """Of the file."""
    why: str = ""
    errno: int = 0
    """Why there is none."""
    since: int = -1
    """To `Pull`: as `coded.Given.since`."""
