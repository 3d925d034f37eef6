"""The process that loader processes are forked from, with a dataset that nobody has read.

A dataset may open its file at the first read, and what it has opened must not
go through a fork. The process that trains may read for itself meanwhile, and a
loader process that is killed is replaced in the middle of an epoch; so a copy
of everything is set aside at the start. It does nothing but fork.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
from typing import NoReturn

from instep.data.child import Slot, Work, leave_the_family, leaving, serve
from instep.errors import DataError, PeerError

_ASK = struct.Struct("<cqq")
"""`s`, number, how many there are; or `w`, pid, 0."""
_ANSWER = struct.Struct("<q")
"""The pid, or the error number below 0; the status of who was waited for."""

_SILENT_S = 5.0
"""Who gives no answer for so long was stopped: forking, and waiting for one that ends, is quick."""


class Template:
    """A process that forks others for this one.

    Args:
        work: of the processes that it forks; all it refers to is as of now.

    Raises:
        DataError: it cannot be started.
    """

    def __init__(self, work: Work) -> None:
        sys.stdout.flush()  # else both processes would print what is waiting
        sys.stderr.flush()
        self._end, theirs = socket.socketpair()
        self._end.settimeout(_SILENT_S)
        parent = os.getpid()
        # a signal between fork and `_serve` would be handled by a second copy of the parent
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                _serve(theirs, work, parent)
        except OSError as error:
            self._end.close()
            raise refused(error) from error
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
        pid = self._asked(_ASK.pack(b"s", number, of), files)
        if pid < 0:
            raise refused(OSError(-pid, os.strerror(-pid)))
        return pid

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


def refused(error: OSError) -> DataError:
    """What is told where no process can be started."""
    return DataError(
        f"a loader process could not be started: {error.strerror}. "
        "Set data.loaders = 0, or to fewer."
    )


def ended_with(status: int) -> str:
    """The end of a process, as the end of a sentence."""
    if status < 0:
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


def _serve(end: socket.socket, work: Work, parent: int) -> NoReturn:
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
            try:
                pid = os.fork()
            except OSError as error:
                pid = -(error.errno or 1)
            if pid == 0:
                theirs, slots = socket.socket(fileno=files[0]), [Slot(file) for file in files[1:]]
                serve(theirs, slots, work, own, first, second)
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
