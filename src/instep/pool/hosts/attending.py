"""A machine of a pool: a host of each run that the scheduler wants on it.

For each run there is a process of its own, `instep host --join` at the client of that run, with the
certificate that this machine has. It ends with all that it has started when its run's client does,
and needs neither the scheduler nor this process: who comes here next finds it by the file that it
has locked. How many workers a run has here is counted among the processes of this machine.
Way in: `Attendance`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

from instep import detached
from instep.plain_file import PRIVATE, read_plain, replace_plain
from instep.system.environment import SCHEDULERS
from instep.system.processes import MEMBERS, stat_fields

COUNT_S = 0.2
"""Between two counts of processes."""

WAIT_S = 60.0
"""How long a process waits for the client of its run; if that is still wanted it begins again."""

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 5.0)
"""Before a process of a run is started once more; the last one repeats."""


class StartsCommands(Protocol):
    """Starts commands of instep, such as `detached.warm.WarmStarts`."""

    def start(self, words: Sequence[str], lock: Path, log: Path) -> object:
        """Start one, unless one that has this file locked lives."""

    def look(self) -> None:
        """Look after whatever it needs."""

    def close(self) -> None:
        """Start no more; what was started goes on."""


class _Process(NamedTuple):
    pid: int
    name: str
    parent: int
    group: int


class Attendance:
    """The runs of which this machine is a host.

    Args:
        token_file: with which it has joined the pool; what is kept of runs is beside it.
        make: what starts the processes, once a scheduler asks for something.
    """

    def __init__(self, token_file: Path, make: Callable[[], StartsCommands]) -> None:
        self._token_file, self._make = token_file, make
        self._commands: StartsCommands | None = None
        self._folder = token_file.with_name(f"{token_file.name}.runs")
        self._wanted: dict[str, str] = {}
        self._starts = Counter[str]()
        self._due: dict[str, float] = {}
        self._ending: dict[str, int] = {}  # process that was asked to end
        self._groups: dict[str, set[int]] = {}  # of the fork servers of each run
        self._workers: dict[str, int] = {}
        self._counted = float("-inf")
        self.leaving = False
        """Whether this machine will soon be gone."""

    def listen(self) -> None:
        """Take the signals of schedulers for the word that this machine will soon be gone."""

        def heard(*_: object) -> None:
            self.leaving = True

        for number in SCHEDULERS:
            signal.signal(number, heard)

    def want(self, runs: Mapping[str, str]) -> None:
        """Be a host of these runs, and of no others; each has the address of its client."""
        if self._commands is None:
            self._commands = self._make()
        before, self._wanted = self._wanted, {n: gate for n, gate in runs.items() if _is_name(n)}
        for name, gate in self._wanted.items():
            if before.get(name) != gate:
                self._starts[name] = 0

    def turn(self) -> Mapping[str, int]:
        """Start and end what is missing or too much; workers of each run that have not ended."""
        if (commands := self._commands) is None:
            return {}
        commands.look()
        with suppress(OSError):  # no room on the disk; it is tried again
            self._folder.mkdir(mode=0o700, exist_ok=True)
        now = time.monotonic()
        if now - self._counted >= COUNT_S:
            self._counted = now
            known = {path.stem for path in self._folder.glob("*.lock")}
            self._count(known)
            for name in sorted(known | self._wanted.keys()):
                self._settle(commands, name, now)
        return self._workers

    def close(self) -> None:
        """Look after nothing any more; the processes go on."""
        if self._commands is not None:
            self._commands.close()

    def _settle(self, commands: StartsCommands, name: str, now: float) -> None:
        """Start or end the process of a run, as it is wanted."""
        lock, gate = self._file(name, "lock"), self._wanted.get(name)
        pid = detached.pid_of(lock)
        if detached.lives(lock):
            if gate != self._gate_of(name) and pid is not None and self._ending.get(name) != pid:
                self._ending[name] = pid  # the client that it has joined is gone
                detached.interrupt_it(lock)
        elif gate is None:
            if not self._workers.get(name):
                self._forget(name)
        elif now >= self._due.get(name, 0.0):
            self._due[name] = now + PAUSES_S[min(self._starts[name], len(PAUSES_S) - 1)]
            self._starts[name] += 1
            words = ["host", "--join", gate, "--token-file", str(self._token_file)]
            words += ["--wait", f"{WAIT_S:g}"]  # its client may have just ended, and this too
            with suppress(OSError):  # it is tried again
                replace_plain(self._file(name, "gate"), gate, PRIVATE)
                commands.start(words, lock, self._file(name, "log"))

    def _count(self, known: set[str]) -> None:
        """Count the workers of each run."""
        processes = [*_processes()]
        clients = {detached.pid_of(self._file(name, "lock")): name for name in known}
        for process in processes:
            if process.parent in clients and clients[process.parent] in known:
                self._groups.setdefault(clients[process.parent], set()).add(process.group)
        named = {p.pid: p for p in processes if p.name == MEMBERS["worker"]}
        # their forks, such as loaders, have their name
        workers = Counter(p.group for p in named.values() if p.parent not in named)
        found = {name: sum(workers[g] for g in self._groups.get(name, ())) for name in known}
        self._workers = {name: count for name, count in found.items() if count}

    def _forget(self, name: str) -> None:
        for kind in ("lock", "gate"):
            self._file(name, kind).unlink(missing_ok=True)
        self._groups.pop(name, None)
        self._ending.pop(name, None)
        self._due.pop(name, None)
        del self._starts[name]

    def _gate_of(self, name: str) -> str | None:
        """The client that the process of a run was started for."""
        with suppress(OSError, UnicodeDecodeError):
            return read_plain(self._file(name, "gate")).decode()
        return None

    def _file(self, name: str, kind: str) -> Path:
        return self._folder / f"{name}.{kind}"


def _is_name(name: str) -> bool:
    return bool(name) and "/" not in name and not name.startswith(".")


def _processes() -> Iterator[_Process]:
    """Processes of this machine that have not ended."""
    if sys.platform != "linux":
        import psutil

        for process in psutil.process_iter(["pid", "name", "ppid", "status"]):
            about = process.info
            with suppress(OSError):
                if about["status"] != psutil.STATUS_ZOMBIE:
                    group = os.getpgid(about["pid"])
                    yield _Process(about["pid"], about["name"], about["ppid"], group)
        return
    for number in os.listdir("/proc"):
        if not number.isdecimal():
            continue
        fields = stat_fields(int(number))
        if len(fields) > 2 and fields[0] not in "ZX":
            name = ""
            with suppress(OSError):
                name = Path(f"/proc/{number}/comm").read_text().strip()
            yield _Process(int(number), name, int(fields[1]), int(fields[2]))
