"""Loader processes: forked, so that a dataset needs no pickle and no second import.

Headers travel as msgpack over a socket, tensors through memory that parent and
child share and use again. Fork them early: a process without threads, process
groups or an open CUDA context forks fast and cleanly, and nobody has read from
its dataset. All come from one process that is kept for that (`template.py`).

A process that is killed is replaced and its slices are read again, which gives
the same batches (`fetch.py`). That may happen any number of times, as long as
slices get read. Each leaves word of what it reads: a sample at which three in a row
have ended counts as one that cannot be read. Where they leave no word, a slice on
which several in a row were lost is an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from instep.comm.messages import Whereabouts
from instep.data import breadcrumb, wire
from instep.data.breadcrumb import Pages, at_a_read, reading
from instep.data.child import Reply, Slot, Task, Work, receive, send
from instep.data.fetch import Fetch, Slice
from instep.data.template import Say, Template
from instep.data.unreadable import MOST_CRASHES, TO_SKIP
from instep.errors import DataError, PeerError, SpecError

_SLOTS = 2
"""Batches that each process may be ahead."""

_MOST_LOST = 5
"""Processes in a row that may end on one slice: the next would meet the same."""

_GRACE_S = 1.0
"""How long `close` waits for a process in the middle of a slice before it kills it."""


class Pool:
    """A reader (see `readers.py`) that reads in processes.

    Args:
        work: of the children, with all it refers to as of now.
        processes: 1 or more.
        of: how many there may come to be, with `grow`.
        unread: whether nobody has read from the dataset in this process until now;
            asked where the process that forks the others is killed.
        say: takes a sentence at each fork that failed and is tried again.

    Raises:
        SpecError: this system cannot fork.
        DataError: no process can be started.
    """

    def __init__(
        self,
        work: Work,
        processes: int,
        *,
        of: int = 0,
        unread: Callable[[], bool] = lambda: True,
        say: Say = lambda text: None,
    ) -> None:
        if not hasattr(os, "fork"):
            raise SpecError(
                f"data.loaders = {processes}: loader processes need a system that can fork, "
                f"which {sys.platform} is not. Set data.loaders = 0."
            )
        self._work, self._unread, self._of, self._say = work, unread, of or processes, say
        self._submitted = 0
        self._batches: dict[int, Any] = {}
        self._dropped: set[int] = set()
        self._children: list[_Child] = []
        self._pages = Pages(self._of)  # before the fork of those who share them
        self._template = Template(work, self._pages, say)
        breadcrumb.follow(self._pages)
        self.grow(processes)

    def grow(self, processes: int) -> None:
        """Have so many processes; nothing may be under way.

        Raises:
            DataError: no other can be started.
        """
        assert processes <= self._of, f"{processes} of {self._of}"
        try:
            while len(self._children) < processes:
                number, fetch = len(self._children), self._work.fetch
                self._children.append(_Child(self._fork, self._ending, number, fetch))
        except DataError:
            self.close()
            raise
        self.ahead = processes * _SLOTS - 1

    def _fork(self, number: int, end: socket.socket, slots: list[Slot]) -> int:
        try:
            return self._template.start(number, self._of, end, slots)
        except PeerError as error:
            if not self._unread():
                raise DataError(
                    f"{error} Another cannot be made, as the dataset has been read here since."
                ) from error
            self._template.close()
            self._template = Template(self._work, self._pages, self._say)
        try:
            return self._template.start(number, self._of, end, slots)
        except PeerError as error:
            raise DataError(str(error)) from error

    def _ending(self, pid: int) -> tuple[str, Whereabouts | None]:
        return self._template.ending(pid), self._pages.take(pid)

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
            DataError: what the work raised, or several processes in a row ended on it; it
                names the sample at which they did, if that is known.
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
        breadcrumb.unfollow(self._pages)
        self._template.close()

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

    def __init__(
        self,
        fork: Callable[[int, socket.socket, list[Slot]], int],
        ending: Callable[[int], tuple[str, Whereabouts | None]],
        number: int,
        fetch: Fetch | None,
    ) -> None:
        self._fork, self._ending_of, self._number, self._fetch = fork, ending, number, fetch
        self._slots = [Slot() for _ in range(_SLOTS)]
        self._under_way: dict[int, Task] = {}
        self._lost = 0  # processes that have ended since the last reply
        self._at: dict[int, int] = {}  # how many of them, by the sample that they read
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
        self._got_past()
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
            self._ending_of(self.pid)
        self._disconnect()
        for slot in self._slots:
            slot.close()

    def _start(self) -> None:
        self._end, theirs = socket.socketpair()
        self._stream = self._end.makefile("rb")
        try:
            self.pid = self._fork(self._number, theirs, self._slots)
        except DataError:
            self._ending = "could not be started"
            self._disconnect()
            for slot in self._slots:
                slot.close()
            raise
        finally:
            theirs.close()

    def _got_past(self) -> None:
        """A slice was read: what was suspected of losses before it was not the reason."""
        self._lost = 0
        if self._at and self._fetch is not None:
            for sample in self._at:
                self._fetch.note(sample, None)
            self._at.clear()

    def _judge(self, place: Whereabouts) -> None:
        """Count an end at a sample; leave it out at the third, or say so."""
        assert self._fetch is not None
        sample = place.sample
        self._fetch.note(sample, "")  # from now on it is read by itself
        # of many in one call it may have been another
        self._at[sample] = 0 if place.count > 1 else self._at.get(sample, 0) + 1
        if (times := self._at[sample]) < MOST_CRASHES:
            return
        if not self._fetch.skip:
            memory = " It may be that memory ran out." if "SIGKILL" in self._ending else ""
            raise DataError(
                f"a loader process (pid {self.pid}) {self._ending} {reading(place)}.{memory} It "
                f"happened {times} times at this sample.{TO_SKIP}"
            )
        cause = f"each of {times} processes that read it {self._ending}"
        self._fetch.note(sample, cause)
        del self._at[sample]
        self._lost = 0

    def _replace(self) -> None:
        self._lost += 1
        if not self._ending:
            self._ending, place = self._ending_of(self.pid)
            if self._fetch is not None and at_a_read(place):
                self._judge(place)
        if self._lost >= _MOST_LOST:
            part = min(self._under_way.values(), key=lambda task: task.ticket).part
            which = (
                "the first samples"
                if part.epoch < 0
                else (
                    f"the samples at positions {part.first} to {part.stop - 1} of epoch "
                    f"{part.epoch + 1}"
                )
            )
            raise DataError(
                f"{self._lost} loader processes in a row ended while they read {which}; the last "
                f"(pid {self.pid}) {self._ending}. Killed by SIGKILL often means that memory ran "
                "out: set data.loaders = 0, or to fewer."
            )
        self._ending = ""
        self._disconnect()
        self._start()
        for task in self._under_way.values():
            self._send(task)

    def _send(self, task: Task) -> None:
        if self._fetch is not None:
            task.marks = self._fetch.marks
        with contextlib.suppress(ConnectionError):  # noticed by `receive`
            send(self._end, task)

    def _disconnect(self) -> None:
        self._stream.close()
        self._end.close()
