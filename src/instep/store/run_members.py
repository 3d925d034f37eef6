"""The workers and servers of a run, and how its groups changed, read from its events."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from instep.store.run_files import Event, Records


class RunMembers:
    """The processes that took part in a run.

    Args:
        events: of the run, oldest first.
        steps: [records] of `STEPS`.
        ledger: [records] of `LEDGER`.
        wanted: workers that the job asks for.
    """

    def __init__(
        self, events: Sequence[Event], steps: Records, ledger: Records, wanted: int
    ) -> None:
        self._events, self._recorded, self._wanted = events, (steps, ledger), wanted
        self.generations = [e for e in events if e["event"] == "generation_started"]
        """`generation_started` events: each change of the members."""
        self._last: Event = self.generations[-1] if self.generations else {}
        self.failures = [e for e in events if e["event"] == "worker_failed"]
        """`worker_failed` events."""

    @cached_property
    def numbers(self) -> list[int]:
        """Every worker and server in any record, in order."""
        recorded = {int(w) for records in self._recorded for w in np.unique(records["worker"])}
        seen = {"worker_joined", "worker_ready", "worker_failed", "traffic"}
        return sorted(recorded | {int(e["worker"]) for e in self._events if e["event"] in seen})

    @cached_property
    def servers(self) -> frozenset[int]:
        """Those that are parameter servers: they hold parameters and get no work."""
        joined = [e for e in self._events if e["event"] == "worker_joined"]
        roles = {int(e["worker"]): e.get("role") for e in joined}
        return frozenset(number for number, role in roles.items() if role == "server")

    @property
    def team(self) -> int:
        """How many workers computed at the end: those of the last generation."""
        members = self._last.get("members")
        if isinstance(members, int):
            return members
        return len({*members} - self.servers) if members else self._wanted

    @property
    def servers_at_the_end(self) -> int:
        """How many parameter servers the last generation had."""
        members = self._last.get("members")
        return len({*members} & self.servers) if isinstance(members, list) else 0
