"""Where the hosts of a pool join its scheduler: who is in reach, and what each is told.

A host that is silent, or whose connection breaks, is out of reach, and nothing more: its processes
need no scheduler. Way in: `HostGate`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from instep import detached
from instep.comm.protocol import messages as m
from instep.launch.gate import Gate
from instep.launch.join_folder import JoinFolder
from instep.pool.hosts.demand import HostsInVain, IdleHosts, asked_for, idle_s
from instep.pool.hosts.free_places import places_taken
from instep.pool.jobs import RUNNING, STOPPING, HostAway, HostSeen, HostSpec, PoolState

SILENT_S = 3.0
"""A host that is silent for so long is out of reach."""

END_S = 5.0
"""In which a machine that is told to end does so."""

SHELLS = frozenset(("autossh", "clush", "pdsh", "plink", "rsh", "slogin", "ssh"))
"""Commands that have a shell of another machine read their words."""

AGAIN_S = 10.0
"""A command that starts `instep host` is run at most so often."""


GONE = "INSTEP_GONE"
"""Variable of a command that starts `instep host`: a file to make once its machine is gone, with
all that ran there."""


class HostGate:
    """Hosts of a pool, as they come and go.

    Args:
        address: of this machine, and a port, on which to listen.
        hosts: by name, in the order of their numbers.
        folder: of their certificates.
        say: told of those that are refused.

    Raises:
        SpecError: nothing can listen there.
    """

    def __init__(
        self,
        address: tuple[str, int],
        hosts: Mapping[str, HostSpec],
        folder: JoinFolder,
        say: Callable[[str], None],
    ) -> None:
        self._names, self._hosts, self._folder = [*hosts], hosts, folder
        self._gate, self._say = Gate(address, self._names, folder, say), say
        self._heard: dict[str, float] = {}  # of those that are in reach
        self._workers: dict[str, Mapping[str, int]] = {}  # as those said last that are connected
        self._told: dict[str, dict[str, str]] = {}
        self._turned = time.monotonic()
        self._tried: dict[str, float] = {}
        self._own: dict[str, subprocess.Popen[bytes]] = {}  # that this process has started
        limits_s = {name: idle_s(host) for name, host in hosts.items()}
        self._idle, self._vain = IdleHosts(limits_s), HostsInVain(limits_s)
        self._gone: set[Path] = set()  # files that say so, until that is in the journal
        self._leaving: set[str] = set()  # that have said so, or are given back

    def turn(self) -> Iterator[HostSeen | HostAway]:
        """Take in what has arrived."""
        now = time.monotonic()
        busy, self._turned = max(0.0, now - self._turned - SILENT_S / 3), now
        for name in self._heard:  # this process was busy, or stopped
            self._heard[name] += busy
        for number, message in self._gate.turn(0.0):
            name = self._names[number]
            if message is None:
                self._told.pop(name, None)
                self._workers.pop(name, None)
                if self._heard.pop(name, None) is not None:
                    yield HostAway(name)
                continue
            if isinstance(message, m.Joined):
                self._told.pop(name, None)
                self._workers.pop(name, None)
                self._leaving.discard(name)
            if isinstance(message, m.Attending):
                self._workers[name] = message.workers
                self._leaving |= {name} if message.leaving else set()
            known, is_new = self._workers.get(name), name not in self._heard
            if known is not None:
                self._heard[name] = now
                if is_new or isinstance(message, m.Attending):
                    yield HostSeen(name, known, name in self._leaving)
        for name, heard in [*self._heard.items()]:
            if now - heard > SILENT_S:
                del self._heard[name]
                yield HostAway(name)

    def gone(self, folder: Path) -> Iterator[HostSeen | HostAway]:
        """Take in which machines are gone for good, with all that ran there; once, and again by
        another scheduler until `noted` was called.

        Args:
            folder: as of `start_missing`.
        """
        for number, name in enumerate(self._names):
            said = folder / f"{number}.gone"
            if said not in self._gone and said.is_file():
                self._gone.add(said)
                yield HostSeen(name, {}, leaving=True)
                yield HostAway(name)

    def noted(self) -> None:
        """Forget what was taken in: it is in the journal."""
        for said in self._gone:
            with suppress(OSError):  # it is said once more
                said.unlink()
        self._gone.clear()

    def attend(self, state: PoolState, gate_of: Callable[[str], str]) -> None:
        """Tell each host of which runs it is to be one, where that has changed.

        Args:
            state: of the pool.
            gate_of: where the client of a job's run listens; empty if it does not yet.
        """
        missing = {*self._gate.missing}
        wanted: dict[str, dict[str, str]] = {name: {} for name in self._names}
        for job_id, places in places_taken(state).items():
            job = state.jobs.get(job_id)
            if job is not None and job.status in (RUNNING, STOPPING) and (gate := gate_of(job_id)):
                for name in places:
                    wanted[name][job_id] = gate
        for number, name in enumerate(self._names):
            if name not in missing and self._told.get(name) != wanted[name]:
                self._told[name] = wanted[name]
                self._gate.send(number, m.Attend(runs=wanted[name]))

    def start_missing(self, folder: Path, state: PoolState) -> None:
        """Start `instep host` on hosts that are not there and have a command for that; of those on
        demand where jobs wait for it, or are.

        Args:
            folder: for the files that these commands have locked, and their output.
            state: of the pool.
        """
        now, missing = time.monotonic(), {*self._gate.missing}
        needed = self._vain.due(asked_for(state, time.time()), now)
        needed |= {name for places in places_taken(state).values() for name in places}
        for number, (name, host) in enumerate(self._hosts.items()):
            late = now - self._tried.get(name, float("-inf")) > AGAIN_S
            if not (host.start and late and name in missing):
                continue
            if host.idle and name not in needed:
                self._ask_no_more(folder / f"{number}.lock", name)
                continue
            self._tried[name] = now
            token_file = str(self._folder.token_file(number).resolve())
            words = ["host", "--join", self.address, "--token-file", token_file, "--stay"]
            with suppress(OSError):  # it is tried again
                folder.mkdir(exist_ok=True)
                lock, log = folder / f"{number}.lock", folder / f"{number}.log"
                command = there(host.start, [sys.executable, "-P", "-m", "instep", *words])
                gone = {GONE: str((folder / f"{number}.gone").resolve())}
                if (process := detached.start_program(command, lock, log, gone)) is not None:
                    self._own[name] = process

    def _ask_no_more(self, lock: Path, name: str) -> None:
        """End a command that has not brought its host yet, such as one that waits in a queue."""
        if detached.lives(lock):
            self._tried[name] = time.monotonic()
            detached.interrupt_all(lock)

    def give_back(self, state: PoolState) -> Iterator[HostSeen]:
        """End hosts on demand on which nothing has run for some time.

        First the pool is told that nothing is to run there, and then the host to leave.

        Args:
            state: of the pool.
        """
        now = time.monotonic()
        for name in self._idle.find(state, now):
            if not state.hosts[name].leaving:
                self._leaving.add(name)
                self._vain.given_back(name, now, ran=name in self._idle.ran)
                yield HostSeen(name, self._workers.get(name, {}), leaving=True)
            elif name in self._told:  # once on each connection
                del self._told[name]
                self._gate.send(self._names.index(name), m.Leave())

    def end_started(self, folder: Path) -> None:
        """End `instep host` where the scheduler has started it; the runs there go on.

        Each is told so; what has not ended by then is ended by the process that was started here.

        Args:
            folder: as of `start_missing`.
        """
        missing, ours = {*self._gate.missing}, dict[str, Path]()
        for number, (name, host) in enumerate(self._hosts.items()):
            lock = folder / f"{number}.lock"
            if host.start and detached.lives(lock):
                ours[name] = lock
                self._gate.send(number, m.Leave())
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline and any(
            detached.lives(lock) for name, lock in ours.items() if name not in missing
        ):
            for _ in self._gate.turn(0.05):
                pass
        for name, lock in ours.items():
            if detached.lives(lock):
                detached.interrupt_all(lock)
                self._say(
                    f"{name}: its `instep host` did not answer; the command that started it is "
                    "ended. If it is still there, end it there"
                )
        for process in self._own.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline + END_S - time.monotonic()))

    @property
    def address(self) -> str:
        """Where hosts join."""
        return f"{self._gate.address.host}:{self._gate.address.port}"

    def close(self) -> None:
        """Leave the hosts; their processes go on."""
        self._gate.drop_all()


def there(start: str, words: Sequence[str]) -> list[str]:
    """The words of a command that runs another one on a host.

    Args:
        start: the command that does so, as of `HostSpec`.
        words: of the other one; quoted where a shell reads them there, as with ssh.
    """
    before = shlex.split(start)
    if any(Path(word).name in SHELLS for word in before):
        return [*before, *map(shlex.quote, words)]
    return [*before, *words]
