"""The spare of a fork server: it sleeps until the server has ended, and then serves in its place.

The two watch each other: one that was stopped, or hangs, is killed by the other. How workers are
forked is not known here. Way in: `Spare`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import time
from collections.abc import Callable, Mapping

from instep.comm.protocol.connection import HEARTBEAT_S
from instep.errors import PeerError
from instep.system.environment import END
from instep.system.lease import Lease
from instep.system.limits import FLOOR_S
from instep.system.processes import SPARE, Watched, is_stopped, name_process, wait_readable

_WORKER, _GONE = struct.Struct("ii"), -1
"""What a server sends its spare: a pid, and the number of its worker."""


class Spare:
    """The spare of this process, as it sees it; another is forked where it has ended."""

    def __init__(self) -> None:
        self.pid = 0
        """The process; 0 if none could be forked."""
        self._life = -1  # open as long as this server lives; it sends its spare the workers
        self._stopped_at: float | None = None
        self._shown_at = 0.0

    def fork(
        self,
        workers: Mapping[int, int],
        hang_up: Callable[[], None],
        serve: Callable[[Mapping[int, tuple[int, Watched]]], None],
    ) -> None:
        """Fork one that sleeps until this process has ended, and then serves in its place.

        Args:
            workers: number of each by process.
            hang_up: closes the connection to the master, in the spare.
            serve: called in the spare, with number and handle of the workers by process.
        """
        theirs, self._life = os.pipe()
        server, self._stopped_at = os.getpid(), None
        self.pid = 0  # the one before is gone, and its number may be another's
        try:
            self.pid = os.fork()
        except OSError:  # it has to do without
            os.close(theirs)
            return
        if self.pid:
            os.close(theirs)
            os.set_blocking(self._life, False)
            for pid, number in workers.items():
                self.tell(pid, number)
            return
        try:
            os.close(self._life)
            signal.set_wakeup_fd(-1)
            signal.signal(END, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            hang_up()
            name = name_process(SPARE)
            left = _wait_for_end(theirs, server)
            os.close(theirs)
            name_process(name)
            serve(left)
        except PeerError:
            pass  # no master is left either
        finally:
            os._exit(0)

    def watch(self) -> None:
        """Show it that this process lives; end it where it was stopped, for another to be forked.

        It only waits, so it can hang in no other way.
        """
        now = time.monotonic()
        if not self.pid or now - self._shown_at < HEARTBEAT_S:
            return
        self._shown_at = now
        self.tell_end(0)
        if not is_stopped(self.pid):
            self._stopped_at = None
        elif self._stopped_at is None:
            self._stopped_at = now
        elif now - self._stopped_at > FLOOR_S:
            os.kill(self.pid, signal.SIGKILL)  # our child, not reaped yet

    def tell(self, pid: int, number: int) -> None:
        """Make a worker known to the spare."""
        with contextlib.suppress(OSError):  # it is gone, or stopped
            os.write(self._life, _WORKER.pack(pid, number))

    def tell_end(self, pid: int) -> None:
        """Make the end of a worker known to the spare."""
        self.tell(pid, _GONE)

    def leave(self) -> None:
        """Close the pipe to it: in a worker, or when it has ended."""
        os.close(self._life)


def _wait_for_end(pipe: int, server: int) -> dict[int, tuple[int, Watched]]:
    """Wait until the server at the other end has ended; its workers then, by process.

    With handles made at that moment: until a master answers, a number may be another's. A
    server that says nothing for too long is ended.
    """
    workers: dict[int, int] = {}
    lease = Lease(server, time.monotonic())
    while True:
        if not wait_readable([pipe], HEARTBEAT_S):
            if lease.turn(time.monotonic()) and os.getppid() == server:
                os.kill(server, signal.SIGKILL)
            continue
        data = os.read(pipe, 512 * _WORKER.size)
        if not data:
            break
        lease.renew(time.monotonic())
        for pid, number in _WORKER.iter_unpack(data):
            workers[pid] = number
    return {pid: (n, Watched(pid)) for pid, n in workers.items() if n != _GONE}
