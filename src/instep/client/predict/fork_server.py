"""The fork server of a master that lives in the client: started, watched, replaced.

The server's spare takes its place if it ends (`launch/spare.py`); if both are gone,
another one is started here. What it is asked for is not decided here.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from instep.client.host_watch import last_line
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Peer
from instep.comm.protocol.messages import Adopt, Heartbeat, Signal, StartWorker
from instep.errors import RunError
from instep.launch.local import LocalLauncher
from instep.store.folder import host_log
from instep.system.lease import Lease
from instep.system.limits import FLOOR_S
from instep.system.processes import Watched

SPARE_S = 2.0
"""How long the spare of a lost fork server may take to connect."""

MOST_SERVERS = 5
"""Fork servers that are started without one worker that gets ready."""


@dataclass
class OwnServer:
    """Keeps one fork server alive.

    Args:
        board: where it connects.
        logs: folder for what it and the workers print.
        say: prints a line.
    """

    board: Switchboard
    logs: Path
    say: Callable[[str], None]
    peer: Peer | None = None
    """Its connection; None while there is none."""
    started: int = 0
    """How many were started since a worker got ready."""
    _launcher: LocalLauncher = field(default_factory=LocalLauncher)
    _lease: Lease | None = None
    _lost: float = 0.0
    _stopped: dict[int, float] = field(default_factory=dict)

    def start(self) -> None:
        """Start one.

        Raises:
            RunError: it cannot be started, or that has not helped before.
        """
        self.started += 1
        if self.started > MOST_SERVERS:
            raise RunError(f"fork servers end again and again: {self._last_line()}")
        self._launcher.start(self.board.endpoint, self.logs)
        self._lost = time.monotonic()

    def connects(self, peer: Peer, pid: int, now: float, workers: list[tuple[int, int]]) -> None:
        """It has introduced itself; `workers` (number and pid each) are there already."""
        self.peer, self._lease = peer, Lease(pid, now, first_s=math.inf)
        self._stopped.clear()
        if workers:
            self.board.hub.send(peer, Adopt(workers=workers))

    def leaves(self) -> None:
        """Its connection has closed."""
        self.peer, self._lease, self._lost = None, None, time.monotonic()

    def fork(self, number: int) -> None:
        """Have it start a worker."""
        assert self.peer is not None, "no fork server is there"
        log = str(self.logs / f"worker-{number}.log")
        self.board.hub.send(self.peer, StartWorker(number=number, log=log))

    def take(self, now: float, message: object, known: Iterable[int]) -> None:
        """It has sent a message; workers that were stopped before they could connect are killed.

        Args:
            now: on the monotonic clock.
            message: from it.
            known: processes of workers that have connected, which have leases.
        """
        if self._lease is not None:
            self._lease.renew(now)
        if not isinstance(message, Heartbeat):
            return
        unknown = set(message.stopped) - set(known)
        self._stopped = {pid: self._stopped.get(pid, now) for pid in unknown}
        for pid, since in self._stopped.items():
            if now - since > FLOOR_S and self.peer is not None:
                self.board.hub.send(self.peer, Signal(pid=pid, signals=[signal.SIGKILL]))

    def watch(self, now: float) -> None:
        """Kill it if it hangs, start another if none is left.

        Raises:
            RunError: it has ended by itself, or again and again.
        """
        if self.peer is not None and self._lease is not None:
            if how := self._lease.turn(now):
                self.say(f"the fork server (pid {self._lease.pid}) is replaced: {how}")
                server = Watched(self._lease.pid)
                server.signal(signal.SIGKILL)
                server.close()
                self.board.hub.drop(self.peer)
                self.leaves()
            return
        code, away_s = self._launcher.ended(), now - self._lost
        if code is not None and code >= 0:  # it gave up by itself, and its spare with it
            raise RunError(f"the fork server ended with code {code}: {self._last_line()}")
        if away_s < SPARE_S:
            return
        if code is not None:
            self.start()
        else:
            self._launcher.end_if_stopped()

    def stop(self) -> None:
        """End it and all that it has started."""
        self._launcher.stop()

    def _last_line(self) -> str:
        return last_line(host_log(self.logs, 0)) or "it has printed nothing."
