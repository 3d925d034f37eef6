"""The process that loader processes are forked from, with a dataset that nobody has read.

A dataset may open its file at the first read, and what it has opened must not
go through a fork. The process that trains may read for itself meanwhile, and a
loader process that is killed is replaced in the middle of an epoch; so a copy
of everything is set aside at the start. It does nothing but fork; a fork that fails
is tried again, as there may be room for a process a moment later.
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
from typing import NoReturn

from instep.data.breadcrumb import Pages
from instep.data.child import Slot, Work, leave_the_family, leaving, serve
from instep.errors import DataError, PeerError

_ASK = struct.Struct("<cqq")
"""`s`, number, how many there are; or `w`, pid, 0."""
_ANSWER = struct.Struct("<q")
"""The pid, or the error number below 0; the status of who was waited for."""

_SILENT_S = 5.0
"""Who gives no answer for so long was stopped: forking, and waiting for one that ends, is quick."""

PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
"""How long to wait before each further attempt at a fork that failed; in all less than who
trains may wait for a read (`control/watch.py`)."""

Say = Callable[[str], object]
"""Takes a sentence for whoever watches the run."""


class Template:
    """A process that forks others for this one.

    Args:
        work: of the processes that it forks; all it refers to is as of now.
        pages: where they leave word of what they read.
        say: takes a sentence at each fork that failed and is tried again.

    Raises:
        DataError: it cannot be started.
    """

    def __init__(self, work: Work, pages: Pages, say: Say) -> None:
        self._say = say
        self.pid = _patiently(lambda: self._fork(work, pages), say)

    def _fork(self, work: Work, pages: Pages) -> int:
        sys.stdout.flush()  # else both processes would print what is waiting
        sys.stderr.flush()
        self._end, theirs = socket.socketpair()
        self._end.settimeout(_SILENT_S)
        parent = os.getpid()
        # a signal between fork and `_serve` would be handled by a second copy of the parent
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            pid = os.fork()
            if pid == 0:
                _serve(theirs, work, pages, parent)
            return pid
        except OSError:
            self._end.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()

    def start(self, number: int, of: int, end: socket.socket, slots: list[Slot]) -> int:
        """Fork loader process `number` of `of`; its pid.

        Raises:
            PeerError: this process is no more.
            DataError: no other process can be started.
        """
        files = [end.fileno(), *(slot.fileno() for slot in slots)]

        def fork() -> int:
            pid = self._asked(_ASK.pack(b"s", number, of), files)
            if pid < 0:
                raise OSError(-pid, os.strerror(-pid))
            return pid

        return _patiently(fork, self._say)

    def ending(self, pid: int) -> str:
        """Wait for a process that is ending; what it ended with."""
        try:
            return ended_with(self._asked(_ASK.pack(b"w", pid, 0), []))
        except PeerError:
            return "ended"

    def _asked(self, request: bytes, files: list[int]) -> int:
        try:
            if socket.send_fds(self._end, [request], files) == len(request):
                answer = self._end.recv(_ANSWER.size, socket.MSG_WAITALL)
                if len(answer) == _ANSWER.size:
                    return int(_ANSWER.unpack(answer)[0])
        except TimeoutError:
            self._kill()  # and with it those that it has forked
        except OSError:
            pass
        raise PeerError(f"the process that forks loader processes (pid {self.pid}) is no more.")

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


def _patiently(fork: Callable[[], int], say: Say) -> int:
    """The pid of a fork, of which further attempts are made after pauses that grow."""
    for pause_s in PAUSES_S:
        try:
            return fork()
        except OSError as error:
            say(
                f"a loader process could not be forked ({error.strerror}); it is tried again in "
                f"{pause_s:g} s."
            )
            time.sleep(pause_s)
    try:
        return fork()
    except OSError as error:
        raise DataError(
            f"a loader process could not be forked: {error.strerror}, tried {len(PAUSES_S) + 1} "
            "times. Set data.loaders = 0, or to fewer."
        ) from error


def ended_with(status: int) -> str:
    """The end of a process, as the end of a sentence."""
    if status < 0:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _serve(end: socket.socket, work: Work, pages: Pages, parent: int) -> NoReturn:
    with leaving() as left:
        leave_the_family(end, parent)
        own = os.getpid()
        while True:
            request, files, _, _ = socket.recv_fds(end, _ASK.size, 8)
            if len(request) < _ASK.size:
                break
            what, first, second = _ASK.unpack(request)
            if what == b"w":
                end.sendall(_ANSWER.pack(_waited(first)))
                continue
            page = pages.free()
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                theirs, slots = socket.socket(fileno=files[0]), [Slot(file) for file in files[1:]]
                serve(theirs, slots, work, own, first, second, page)
            if pid > 0:
                pages.give(page, pid)
            for file in files:
                os.close(file)
            end.sendall(_ANSWER.pack(pid))
        left.code = 0
    raise AssertionError("not reached")


def _waited(pid: int) -> int:
    try:
        return os.waitpid(pid, 0)[1]
    except ChildProcessError:
        return -1
