"""The membership of a worker that is in no run: nobody is connected, and what it tells is kept.

With it a `Training` can be built in this process, as in a worker, and tried. It takes no step. Way
in: `LoneMember`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from instep.comm.protocol.connection import MasterConnection
from instep.engine.member import Member
from instep.engine.membership import GenerationLease
from instep.job.spec import JobSpec

NO_RUN = Path("/nonexistent/instep-check")
"""The folder of a run that there is none of; nothing writes into it before a first step."""


class LoneMember(Member):
    """Worker 0 of a new run, without a master.

    Args:
        job: what it would train.
        tell: called with the name and the fields of each event.
    """

    def __init__(self, job: JobSpec, tell: Callable[[str, dict[str, Any]], None]) -> None:
        # not that of Member, which connects to a master
        self.job, self.number, self.role = job, 0, "check"  # no worker: it forks no readers
        self.run, self.sees_run = NO_RUN, False
        self.scratch = Path(tempfile.gettempdir())
        self.phases, self.started, self.last_step = {}, 0.0, 0
        self.checkpoint, self.known, self.restarts = None, b"", 0
        self.recovers = self.complete = self.together = self.holds = False
        self.others_have_state = False
        self.marks, self.form, self.forwarder, self.credentials = (), None, None, None
        self.token, self.address, self.outside = "", "127.0.0.1", "127.0.0.1"
        self.phase = "check"
        self._next, self._regroup, self._leaving = None, -1, False
        self.lease = GenerationLease(cast(MasterConnection, SimpleNamespace(lapsed=False)))
        self._tell = tell

    def _listen(self) -> None:
        """Nobody sends anything."""

    def emit(self, name: str, **fields: Any) -> None:
        """Tell an event to the maker of this."""
        self._tell(name, fields)

    def warn(self, text: str) -> None:
        """Tell a warning as an event."""
        self._tell("warning", {"text": text})

    def remember(self, what: bytes) -> None:
        """There are no other processes."""
        self.known = what
