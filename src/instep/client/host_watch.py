"""The hosts that this process started: which end, and which are to be started or ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import HostEnded, HostsLeave
from instep.launch.base import Elastic, Launcher, Placing
from instep.plain_file import read_plain
from instep.store.folder import host_log

LEAVING_S = 0.5
"""Seconds between two questions which machines are about to go."""


class HostWatch:
    """Watches them for the master.

    Args:
        launcher: has started them.
        numbers: theirs.
        endpoint: what each needs to reach the master.
        logs: folder for what they print.
    """

    def __init__(
        self,
        launcher: Launcher,
        numbers: Collection[int],
        endpoint: Callable[[int], Endpoint],
        logs: Path,
    ) -> None:
        self._launcher, self._numbers = launcher, numbers
        self._endpoint, self._logs = endpoint, logs
        self._ended: set[int] = set()  # those that have ended by themselves
        self._leaving: list[int] = []  # those whose machines are about to go
        self._leaving_at = 0.0  # when that was asked last

    @property
    def gives_back(self) -> bool:
        """Whether hosts that are not needed may be ended."""
        return isinstance(self._launcher, Elastic)

    @property
    def places(self) -> list[int] | None:
        """Workers that there is room for on each host, as it is now; None: any number."""
        return self._launcher.places() if isinstance(self._launcher, Placing) else None

    def events(self) -> Iterator[HostEnded | HostsLeave]:
        """Those that have ended by themselves, once each; and those whose machines are about to go,
        again and again, as another master does not know."""
        for number in self._numbers:
            code = self._launcher.ended(number)
            if code is not None and code >= 0 and number not in self._ended:
                self._ended.add(number)
                detail = last_line(host_log(self._logs, number))
                yield HostEnded(code=code, detail=detail, number=number)
        now = time.monotonic()
        if isinstance(self._launcher, Elastic) and now - self._leaving_at > LEAVING_S:
            self._leaving_at, before = now, self._leaving
            self._leaving = sorted(self._launcher.leaving())
            if self._leaving or before:
                yield HostsLeave(numbers=self._leaving)

    def give_back(self, number: int) -> None:
        """End a host that has no workers."""
        if isinstance(self._launcher, Elastic):
            self._launcher.give_back(number)

    def start(self, numbers: Iterable[int]) -> None:
        """Start hosts that the master misses: they are gone, and no replacement has connected."""
        for number in numbers:
            if number not in self._numbers:
                continue
            if self._launcher.ended(number) is not None:
                self._ended.discard(number)
                self._launcher.start(self._endpoint(number), self._logs)
            else:
                self._launcher.end_if_stopped(number)  # then it will be started at the next request


def last_line(log: Path) -> str:
    """The last line of a log that has words; empty if there is none."""
    lines: list[str] = []
    with suppress(OSError):
        lines = read_plain(log).decode(errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
