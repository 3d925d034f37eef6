"""Loader processes: forked, so that a dataset needs no pickle and no second import.

Headers travel as msgpack over a socket, tensors through memory that parent and
child share and use again. Fork them early: a process without threads, process
groups or an open CUDA context forks fast and cleanly.

A process that is killed is replaced and its slices are read again, which gives
the same batches (`fetch.py`). That may happen any number of times, as long as
slices get read; one on which several processes in a row were lost is an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterable
from typing import Any

import msgspec

from instep.data import wire
from instep.data.child import Reply, Slot, Task, receive, send, serve
from instep.data.fetch import Slice
from instep.data.readers import Work
from instep.errors import DataError, SpecError

_SLOTS = 2
"""Batches that each process may be ahead."""

_MOST_LOST = 5
"""Processes in a row that may end on one slice: the next would meet the same."""

_GRACE_S = 1.0
"""How long `close` waits for a process in the middle of a slice before it kills it."""


class Pool:
    """A reader (see `readers.py`) that reads in processes.

    Args:
        work: slice to batch; runs in the children, with all it refers to as of now.
        processes: 1 or more.

    Raises:
        SpecError: this system cannot fork.
    """

    def __init__(self, work: Work, processes: int) -> None:
        if not hasattr(os, "fork"):
            raise SpecError(
                f"data.loaders = {processes}: loader processes need a system that can fork, "
                f"which {sys.platform} is not. Set data.loaders = 0."
            )
        self.ahead = processes * _SLOTS - 1
        self._submitted = 0
        self._batches: dict[int, Any] = {}
        self._dropped: set[int] = set()
        self._children: list[_Child] = []
        try:
            for _ in range(processes):
                self._children.append(_Child(work))
        except DataError:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process numbers of the children as they are now."""
        return [child.pid for child in self._children]

    def submit(self, part: Slice) -> int:
        """Ask for a slice; waits while its process has no room for another batch."""
        ticket = self._submitted
        child = self._owner(ticket)
        while not child.has_room:
            self._receive(child)
        self._submitted += 1
        child.post(ticket, part)
        return ticket

    def take(self, ticket: int) -> Any:
        """The batch of a ticket, in memory of its own.

        Raises:
            DataError: what the work raised, or several processes in a row ended on it.
        """
        while ticket not in self._batches:
            self._receive(self._owner(ticket))
        batch = self._batches.pop(ticket)
        if isinstance(batch, DataError):
            raise batch
        return batch

    def drop(self, tickets: Iterable[int]) -> None:
        """What is under way is read to its end and thrown away."""
        for ticket in tickets:
            if ticket in self._batches:
                del self._batches[ticket]
            else:
                self._dropped.add(ticket)

    def close(self) -> None:
        """End all children and wait for them."""
        for child in self._children:
            child.hang_up()
        for child in self._children:
            child.end()
        self._children = []

    def _owner(self, ticket: int) -> _Child:
        return self._children[ticket % len(self._children)]

    def _receive(self, child: _Child) -> None:
        reply, slot = child.receive()
        if reply.ticket in self._dropped:
            self._dropped.discard(reply.ticket)
        elif reply.error:
            error = DataError(reply.error)
            error.__cause__ = RuntimeError(f"in a loader process:\n{reply.trace}")
            self._batches[reply.ticket] = error
        else:
            tensors = wire.read(reply.places, slot.room(reply.size)) if reply.places else []
            self._batches[reply.ticket] = wire.unpack(reply.skeleton, tensors)


class _Child:
    """The parent's side of one process."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._slots = [Slot() for _ in range(_SLOTS)]
        self._under_way: dict[int, Task] = {}
        self._lost = 0  # processes that have ended since the last reply
        self._ending = ""
        self._start()

    @property
    def has_room(self) -> bool:
        return len(self._under_way) < _SLOTS

    def post(self, ticket: int, part: Slice) -> None:
        used = {task.slot for task in self._under_way.values()}
        slot = next(number for number in range(_SLOTS) if number not in used)
        self._under_way[ticket] = Task(ticket, slot, part)
        self._send(self._under_way[ticket])

    def receive(self) -> tuple[Reply, Slot]:
        """The next reply, and where its tensors are until the next `post`."""
        while (body := receive(self._stream)) is None:
            self._replace()
        self._lost = 0
        reply = msgspec.msgpack.decode(body, type=Reply)
        return reply, self._slots[self._under_way.pop(reply.ticket).slot]

    def hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self._end.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        if not self._ending:
            self._end.settimeout(_GRACE_S)
            try:
                while self._end.recv(1 << 16):
                    pass
            except TimeoutError:
                os.kill(self.pid, signal.SIGKILL)
            except ConnectionError:
                pass
            _ending_of(self.pid)
        self._disconnect()
        for slot in self._slots:
            slot.close()

    def _start(self) -> None:
        sys.stdout.flush()  # else both processes would print what is waiting
        sys.stderr.flush()
        self._end, theirs = socket.socketpair()
        parent = os.getpid()
        # a signal between fork and `serve` would be handled by a second copy of the parent
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            self.pid = os.fork()
            if self.pid == 0:
                serve(theirs, self._slots, self._work, parent)
        except OSError as error:
            self._ending = "could not be started"
            raise DataError(
                f"a loader process {self._ending}: {error.strerror}. "
                "Set data.loaders = 0, or to fewer."
            ) from error
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self._stream = self._end.makefile("rb")

    def _replace(self) -> None:
        if not self._ending:
            self._ending = _ending_of(self.pid)
        self._lost += 1
        if self._lost >= _MOST_LOST:
            part = min(self._under_way.values(), key=lambda task: task.ticket).part
            raise DataError(
                f"{self._lost} loader processes in a row ended while they read the samples at "
                f"positions {part.first} to {part.stop - 1} of epoch {part.epoch + 1}; the last "
                f"(pid {self.pid}) {self._ending}. Killed by SIGKILL often means that memory ran "
                "out: set data.loaders = 0, or to fewer."
            )
        self._ending = ""
        self._disconnect()
        self._start()
        for task in self._under_way.values():
            self._send(task)

    def _send(self, task: Task) -> None:
        with contextlib.suppress(ConnectionError):  # noticed by `receive`
            send(self._end, task)

    def _disconnect(self) -> None:
        self._stream.close()
        self._end.close()


def _ending_of(pid: int) -> str:
    """Wait for a child that is ending; what it ended with."""
    try:
        _, status = os.waitpid(pid, 0)
    except ChildProcessError:  # somebody else was told
        return "ended"
    code = os.waitstatus_to_exitcode(status)
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
