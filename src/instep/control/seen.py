"""Knowledge of one worker from its heartbeats, and what a watchdog says of it.

Pure. Way in: `watch.py:Watch`, which learns from many of these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from instep.comm.protocol.messages import COMPILING, Heartbeat
from instep.system.limits import BUSY
from instep.units import readable_seconds

MEETING = "meeting"
"""A worker forms its replica with the others, or runs a trial that they run together."""

WAITING = frozenset([MEETING, "joining", "exchange", "saving", COMPILING])
"""Activities in which a worker waits for others or for a compiler, and is not to blame."""

WORKED_S = 0.5
"""Seconds of a processor after which a worker in it counts as having done something."""

OF_A_STEP = frozenset(["forward", "backward", "update"])
"""Activities of every step in which a worker computes. A read is none: a store may stall."""


class Hang(NamedTuple):
    """A worker that hangs."""

    worker: int
    step: int
    phase: str
    how: str
    loops: bool = False
    """Whether it keeps a processor busy with a read."""


class Silent(NamedTuple):
    """A worker that cannot be replaced, and was silent for too long."""

    worker: int
    seconds: float
    """Since its last heartbeat."""
    all: bool
    """Whether all other workers were silent too."""

    def cause(self, pid: int, node: str, *, stopped: bool, joined: bool) -> str:
        """The cause to report.

        Args:
            pid: of its process; 0 if it is not known.
            node: the name of its machine; empty if it is not known.
            stopped: whether the system says that its process does not run.
            joined: whether another program than instep started it.
        """
        where = f" (pid {pid}{f' on {node}' if node else ''})" if pid else ""
        long = readable_seconds(self.seconds)
        how = f"its process{where} gave no sign of life for {long}"
        how += ", nor did any other worker" if self.all else " while others did"
        how += (
            ": it was stopped (SIGSTOP, Ctrl-Z)"
            if stopped
            else ": it may be stopped, or native code keeps the interpreter's lock"
        )
        return f"{how}. It cannot be replaced {'under instep.join' if joined else 'on GPUs'}."


@dataclass
class KnownWorker:
    """A worker, as its heartbeats show it."""

    last_heartbeat: float
    """When its last heartbeat came."""
    since: float
    """When it made progress last, as far as is known."""
    heartbeat: Heartbeat | None = None
    cpu_s: float = 0.0
    """What it had used when it made progress last."""
    worked: float = 0.0
    """When it made progress last, or had used `WORKED_S` of a processor since this was noted."""
    worked_cpu_s: float = 0.0
    """What it had used then."""
    steps: int = 0
    """That its process has committed."""
    ready: bool = True
    """Whether it is built."""
    blamed_s: float = 0.0
    """How long it had been busy with a read when it was found to hang; 0.0 if it was not."""
    alone_s: float = 0.0
    """How long it was silent while another was not."""

    @property
    def busy_s(self) -> float:
        """How long a processor has been busy with it since its last progress."""
        return max(0.0, self.heartbeat.cpu_s - self.cpu_s) if self.heartbeat else 0.0

    def is_busy(self, now: float) -> bool:
        """Whether it has just made progress, or a processor has been busy with it since then."""
        return self.busy_s >= BUSY * (now - self.since)

    @property
    def has_read(self) -> bool:
        """Whether it has finished the reads of a step, though it may not have reported it."""
        return self.steps > 0 or (self.heartbeat is not None and self.heartbeat.steps > 0)

    def reads_busily(self, now: float) -> bool:
        """Whether it does something that may wait, and keeps a processor busy with it instead."""
        if (
            self.heartbeat is None
            or self.heartbeat.phase in OF_A_STEP
            or self.heartbeat.phase in WAITING
        ):
            return False
        return self.is_busy(now)
