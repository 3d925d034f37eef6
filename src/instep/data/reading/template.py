"""The process that loader processes are forked from, with a dataset that nothing has read.

A dataset may open its file at the first read, and an open file must not be shared through a
fork. The process that trains may read meanwhile, and a loader process that is killed is
replaced in the middle of an epoch. So this process is forked at the start, as an untouched
copy, and does nothing but fork. Where a fork of this process hangs, it is an interpreter of its
own instead (`fresh.py`). A fork that fails is retried: there may be room for a process a moment
later.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection

from instep.data.reading.process import Slot, Work, detach_from_parent, run_and_exit, serve
from instep.data.samples.last_read import Page, Pages
from instep.errors import DataError, PeerError

_REQUEST = struct.Struct("<cqq")
"""`s` (start), number, how many there are; or `w` (wait), pid, 0."""
_ANSWER = struct.Struct("<q")
"""The pid, or the error number below 0; the exit status of the process waited for."""

_TIMEOUT_S = 5.0
"""Without an answer for so long, the process was stopped: forking and reaping are quick."""

PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""How long to wait before each further attempt at a fork that failed. Their sum is less than
what training may wait for a read (`control/watch.py`)."""

Say = Callable[[str], object]
"""Is called with a sentence for the terminal of the run."""


Begin = Callable[[], tuple[int, socket.socket]]
"""Starts a process that serves forks; its pid, and our end of its connection."""


def forked(work: Work, pages: Pages) -> tuple[int, socket.socket]:
    """Start it as a fork of this process.

    Args:
        work: of the processes that it forks; all it refers to is as of now.
        pages: where they record what they read.

    Raises:
        OSError: there is no room for it.
    """
    sys.stdout.flush()  # else both processes would print what is buffered
    sys.stderr.flush()
    end, theirs = socket.socketpair()
    parent = os.getpid()
    # a signal between fork and `serve_forks` would be handled by a second copy of the parent
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        pid = os.fork()
        if pid == 0:
            run_and_exit(lambda: serve_forks(theirs, lambda: work, pages, parent))
        return pid, end
    except OSError:
        end.close()
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        theirs.close()


class Template:
    """A process that forks others for this one.

    Args:
        begin: starts it.
        say: called with a sentence at each fork that failed and is retried.

    Raises:
        DataError: it cannot be started.
    """

    def __init__(self, begin: Begin, say: Say) -> None:
        self._begin, self._say = begin, say
        self.pid = _fork_with_retries(self._start, say)

    def _start(self) -> int:
        pid, self._end = self._begin()
        self._end.settimeout(_TIMEOUT_S)
        return pid

    def start(self, number: int, of: int, connection: Connection, files: list[int]) -> int:
        """Fork loader process `number` of `of`; its pid.

        Args:
            number: of the process.
            of: how many there may be.
            connection: its end.
            files: for its stack, then its slots.

        Raises:
            PeerError: the template process is gone.
            DataError: no other process can be started.
        """
        files = [connection.fileno(), *files]

        def fork() -> int:
            pid = self._request(_REQUEST.pack(b"s", number, of), files)
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            return pid

        return _fork_with_retries(fork, self._say)

    def ending(self, pid: int) -> str:
        """Wait for the end of a process; how it ended, such as `was killed by SIGKILL`."""
        try:
            return ended_with(self._request(_REQUEST.pack(b"w", pid, 0), []))
        except PeerError:
            return "ended"

    def _request(self, request: bytes, files: list[int]) -> int:
        try:
            if socket.send_fds(self._end, [request], files) == len(request):
                answer = self._end.recv(_ANSWER.size, socket.MSG_WAITALL)
                if len(answer) == _ANSWER.size:
                    return int(_ANSWER.unpack(answer)[0])
        except TimeoutError:
            self._kill()  # and with it those that it has forked
        except OSError:
            pass
        raise PeerError(f"the process that forks loader processes (pid {self.pid}) is gone.")

    def close(self) -> None:
        """End it, and wait for that; a second call does nothing."""
        if self._end.fileno() < 0:
            return
        self._end.close()
        self._kill()  # it may have been stopped; what it has forked has ended, or ends with it
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def _fork_with_retries(fork: Callable[[], int], say: Say) -> int:
    """The pid of a fork that is retried after pauses that grow."""
    for pause_s in PAUSES_S:
        try:
            return fork()
        except OSError as error:
            say(
                f"a loader process could not be forked ({error.strerror}); retrying in "
                f"{pause_s:g} s."
            )
            time.sleep(pause_s)
    try:
        return fork()
    except OSError as error:
        raise DataError(
            f"a loader process could not be forked: {error.strerror}, tried {len(PAUSES_S) + 1} "
            "times. Set data.loaders to 0 or to a smaller number."
        ) from error


def ended_with(status: int) -> str:
    """How a process ended, as the end of a sentence."""
    if status < 0:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def serve_forks(end: socket.socket, made: Callable[[], Work], pages: Pages, parent: int) -> None:
    """Fork and wait on request, until the other side closes its end.

    Args:
        end: of the connection to the process that asks.
        made: returns the work; called in each loader process.
        pages: where they record what they read.
        parent: the process that asks; without it this one ends.
    """
    detach_from_parent(end.fileno(), parent)
    own = os.getpid()
    while True:
        request, files, _, _ = socket.recv_fds(end, _REQUEST.size, 8)
        if len(request) < _REQUEST.size:
            return
        what, first, second = _REQUEST.unpack(request)
        if what == b"w":
            end.sendall(_ANSWER.pack(_wait_for(first)))
            continue
        page = pages.free()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or 1)
        if pid == 0:
            run_and_exit(partial(_become_loader, files, made, own, first, second, page))
        if pid > 0:
            pages.assign(page, pid)
        for file in files:
            os.close(file)
        end.sendall(_ANSWER.pack(pid))


def _become_loader(
    files: list[int],
    made: Callable[[], Work],
    parent: int,
    number: int,
    of: int,
    page: Page | None,
) -> None:
    detach_from_parent(files[0], parent)
    slots = [Slot(file) for file in files[2:]]
    serve(Connection(files[0]), slots, files[1], made, number, of, page)


def _wait_for(pid: int) -> int:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return -1
