"""The hosts that this process started: which have ended, and those that are to be started again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from instep.comm.endpoint import Endpoint
from instep.comm.messages import HostEnded
from instep.launch.base import Launcher
from instep.plain_file import read_plain
from instep.store.folder import host_log


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

    def ends(self) -> Iterator[HostEnded]:
        """Those that have ended by themselves, once each."""
        for number in self._numbers:
            code = self._launcher.ended(number)
            if code is not None and code >= 0 and number not in self._ended:
                self._ended.add(number)
                detail = last_line(host_log(self._logs, number))
                yield HostEnded(code=code, detail=detail, number=number)

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
