"""Where the hosts of a pool join its scheduler: who is in reach, and what each is told.

A host that is silent, or whose connection breaks, is out of reach, and nothing more: its processes
need no scheduler. Way in: `HostGate`.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from instep import detached
from instep.comm.protocol import messages as m
from instep.launch.gate import Gate
from instep.launch.join_folder import JoinFolder
from instep.pool.hosts.free_places import places_taken
from instep.pool.jobs import RUNNING, STOPPING, HostAway, HostSeen, HostSpec, PoolState

SILENT_S = 3.0
"""A host that is silent for so long is out of reach."""

AGAIN_S = 10.0
"""A command that starts `instep host` is run at most so often."""


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
        self._gate = Gate(address, self._names, folder, say)
        self._heard: dict[str, float] = {}  # of those that are in reach
        self._workers: dict[str, Mapping[str, int]] = {}  # as those said last that are connected
        self._told: dict[str, dict[str, str]] = {}
        self._turned = time.monotonic()
        self._tried: dict[str, float] = {}

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
            if isinstance(message, m.Attending):
                self._workers[name] = message.workers
            known, is_new = self._workers.get(name), name not in self._heard
            if known is not None:
                self._heard[name] = now
                if is_new or isinstance(message, m.Attending):
                    yield HostSeen(name, known)
        for name, heard in [*self._heard.items()]:
            if now - heard > SILENT_S:
                del self._heard[name]
                yield HostAway(name)

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

    def start_missing(self, folder: Path) -> None:
        """Start `instep host` on hosts that are not there and have a command for that.

        Args:
            folder: for the files that these commands have locked, and their output.
        """
        now, missing = time.monotonic(), {*self._gate.missing}
        for number, (name, host) in enumerate(self._hosts.items()):
            late = now - self._tried.get(name, float("-inf")) > AGAIN_S
            if not (host.start and late and name in missing):
                continue
            self._tried[name] = now
            before = shlex.split(host.start)
            token_file = str(self._folder.token_file(number).resolve())
            words = ["host", "--join", self.address, "--token-file", token_file, "--stay"]
            with suppress(OSError):  # it is tried again
                folder.mkdir(exist_ok=True)
                lock, log = folder / f"{number}.lock", folder / f"{number}.log"
                command = [*before, sys.executable, "-P", "-m", "instep", *words]
                detached.start_program(command, lock, log)

    @property
    def address(self) -> str:
        """Where hosts join."""
        return f"{self._gate.address.host}:{self._gate.address.port}"

    def close(self) -> None:
        """Leave the hosts; their processes go on."""
        self._gate.drop_all()
