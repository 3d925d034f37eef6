"""A host of a preparation and its workers, as the master remembers them. Way in: `Host`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from instep.comm.protocol.hub import Peer
from instep.prepare.messages import Beat, Task
from instep.prepare.workers.files import Arrivals


class HostWorker:
    """A worker on a host; `Worker`."""

    def __init__(self, near: bool, send: Callable[[msgspec.Struct], None]) -> None:
        self.task: Task | None = None
        self.at, self.near, self.blamed = Beat(), near, True
        self.ended, self.how, self.printed = False, "", ""
        self.send = send

    def give(self, task: Task) -> None:
        """Give it a task."""
        self.task = task
        self.send(task)

    def close(self) -> None:
        """Its host has seen to it."""


@dataclass
class Host:
    """A host that may be there, with its workers."""

    peer: Peer | None = None
    silent_s: float = 0.0
    workers: dict[int, tuple[HostWorker, Arrivals]] = field(default_factory=dict)
    tries: int = 0
    due: float = 0.0
    """When to start it."""
    late: float = 0.0
    """When to start it again, if it has not come until then."""
    given_up: bool = False
