"""Starts commands of instep as forks of a process that has imported instep and torch already.

That process (`cli/preloaded.py`) is started once. It gets a command together with its locked file:
as long as either end has that open, the command counts as one that lives. If the process is lost,
commands that it had not begun have ended, as any that are killed; the next ones are started
without it until there is another. Way in: `WarmStarts`.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from instep import detached
from instep.system.lease import Lease
from instep.system.processes import start_with_retries

LONGEST_PAUSE_S = 60.0
"""Before another process is begun there is a pause, which grows up to this."""

WELL_S = 60.0
"""After so long the next pause is the first again."""


class WarmStart(msgspec.Struct):
    """A command that a process which has imported all is to become."""

    words: list[str]
    """Its words after `instep`."""
    log: str
    """The file that its output is appended to."""


class WarmStarts:
    """Starts commands, and keeps the process that they are forks of."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._signs = -1
        self._lease: Lease
        self._began = self._due = 0.0
        self._pause_s = 0.5
        self.look()

    def start(self, words: Sequence[str], lock: Path, log: Path) -> subprocess.Popen[bytes] | None:
        """Start a command, unless one that has this file locked lives.

        Returns:
            Its process, if it is a child of this one.

        Raises:
            OSError: it cannot be started.
        """
        if self._socket is None:
            return detached.start(words, lock, log)
        descriptor = detached.locked(lock)
        if descriptor is None:
            return None
        try:
            note = msgspec.json.encode(WarmStart([*words], str(log)))
            socket.send_fds(self._socket, [note], [descriptor])
            return None
        except OSError:  # it has just ended, or takes nothing
            self._drop()
        finally:
            os.close(descriptor)
        return detached.start(words, lock, log)

    def look(self) -> None:
        """Replace the process if it has ended, or gives no sign of life."""
        now = time.monotonic()
        if self._process is None:
            if now >= self._due:
                self._begin(now)
            return
        with suppress(BlockingIOError):
            while os.read(self._signs, 1 << 12):
                self._lease.renew(now)
        if self._process.poll() is not None or self._lease.turn(now):
            self._drop()

    def close(self) -> None:
        """End the process; what it has started continues."""
        self._drop()

    def _begin(self, now: float) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._signs, signs = os.pipe()
        os.set_blocking(self._signs, False)
        numbers = [theirs.fileno(), signs]
        try:
            self._process = start_with_retries(
                [sys.executable, "-P", "-m", "instep.cli.preloaded", *map(str, numbers)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=numbers,
                start_new_session=True,
            )
        except OSError:
            ours.close()
            os.close(self._signs)
            self._put_off(now)
            return
        finally:
            theirs.close()
            os.close(signs)
        ours.setblocking(False)
        self._socket, self._began = ours, now
        self._lease = Lease(self._process.pid, now)

    def _put_off(self, now: float) -> None:
        self._pause_s = 0.5 if now - self._began > WELL_S else self._pause_s
        self._due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def _drop(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if self._socket is not None:
            self._socket.close()
        os.close(self._signs)
        self._process = self._socket = None
        self._put_off(time.monotonic())
