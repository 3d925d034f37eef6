"""Loader processes: forked, so that a dataset needs no pickle and no second import.

Headers travel as msgpack over a connection, tensors through shared memory that is reused.
All processes are forked by one that is set apart early (`template.py`): a process without
threads, process groups or an open CUDA context, in which nothing has read the dataset.

A process that can never go on, as it waits for a thread that the fork has not copied, is
noticed (`stuck.py`), and so is one that has been at one read for very long. Then all processes
come from an interpreter of their own (`fresh.py`); where that does not give the same sample, this
process reads.

A process that is killed is replaced and its slices are read again, which gives the same
batches (`fetch.py`), any number of times as long as slices get read. Each process records
what it reads: a sample at which three in a row have died counts as unreadable. Where they
died outside of a read, a slice on which several in a row were lost is an error.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from instep.comm.protocol.messages import Whereabouts
from instep.data.reading import wire
from instep.data.reading.fetch import Fetch, Slice
from instep.data.reading.fresh import Packed
from instep.data.reading.process import STOP, Reply, Slot, Task, Work, receive
from instep.data.reading.stuck import HUNG_S, IDLE_S, LOOK_S, StuckWatch
from instep.data.reading.template import Say, Template, forked
from instep.data.reading.threads import ask_stack, deepest_line
from instep.data.samples import last_read
from instep.data.samples.contents import content_of
from instep.data.samples.last_read import Pages, describe_read, is_reading
from instep.data.samples.unreadable import MAX_CRASHES, SKIP_HINT
from instep.errors import DataError, PeerError, SpecError

_SLOTS = 2
"""Batches that each process may be ahead."""

_MAX_LOST = 5
"""Processes in a row that may die on one slice: the next would meet the same."""

_GRACE_S = 1.0
"""How long `close` waits for a process in the middle of a slice before it kills it."""

_FIRST = Slice(0, 0, 1)


class Stuck(Exception):
    """A loader process can never go on; the text says where it waits."""


class Pool:
    """A reader (see `readers.py`) that reads in processes.

    Args:
        work: of the processes, with all it refers to as of now.
        processes: 1 or more.
        of: how many there may come to be, with `grow`.
        unread: whether nothing has read from the dataset in this process so far;
            asked where the process that forks the others is killed.
        say: called with a sentence at each fork that failed and is retried.

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
        self._parts: dict[int, Slice] = {}  # by ticket, those not taken yet
        self._batches: dict[int, Any] = {}
        self._packed: Packed | None = None  # once forks of this process have hung
        self.reads_here = False
        """Whether this process reads, as no other can."""
        self.trouble = ""
        """Why loader processes are no forks of this one; empty if they are."""
        self._dropped: set[int] = set()
        self._loaders: list[_LoaderProcess] = []
        self._pages = Pages(self._of)  # before the fork of those that share them
        self._template = Template(self._begin, say)
        last_read.add_loader_pages(self._pages)
        self.grow(processes)

    def grow(self, processes: int) -> None:
        """Have this many processes; no slice may be outstanding.

        Raises:
            DataError: no other can be started.
        """
        assert processes <= self._of, f"{processes} of {self._of}"
        try:
            while (number := len(self._loaders)) < processes:
                self._loaders.append(self._loader(number))
        except DataError:
            self.close()
            raise
        self.ahead = processes * _SLOTS - 1

    def _loader(self, number: int) -> _LoaderProcess:
        return _LoaderProcess(
            self._fork, self._ending, self._reads, number, self._work.fetch, self._say
        )

    def _reads(self, pid: int) -> Whereabouts | None:
        """What a living process reads at the moment."""
        return self._pages.current_reads().get(pid)

    def _begin(self) -> tuple[int, socket.socket]:
        if self._packed is not None:
            return self._packed.begin(self._pages)
        return forked(self._work, self._pages)

    def _fork(self, number: int, connection: Connection, files: list[int]) -> int:
        try:
            return self._template.start(number, self._of, connection, files)
        except PeerError as error:
            if not self._unread() and self._packed is None:
                raise DataError(
                    f"{error} Another cannot be made, as the dataset has been read here since."
                ) from error
            self._template.close()
            self._template = Template(self._begin, self._say)
        try:
            return self._template.start(number, self._of, connection, files)
        except PeerError as error:
            raise DataError(str(error)) from error

    def _ending(self, pid: int) -> tuple[str, Whereabouts | None]:
        return self._template.ending(pid), self._pages.collect(pid)

    @property
    def pids(self) -> list[int]:
        """Process numbers of the loader processes as they are now."""
        return [loader.pid for loader in self._loaders]

    def submit(self, part: Slice) -> int:
        """Ask for a slice; waits while its process has no room for another batch."""
        ticket = self._submitted
        while not self.reads_here and not self._owner(ticket).has_room:
            self._receive(self._owner(ticket))
        self._submitted += 1
        self._parts[ticket] = part
        if not self.reads_here:
            self._owner(ticket).post(ticket, part)
        return ticket

    def take(self, ticket: int) -> Any:
        """The batch of a ticket, in memory of its own.

        Raises:
            DataError: what reading raised, or several processes in a row died on it; names
                the sample at which they did, if that is known.
        """
        while ticket not in self._batches and not self.reads_here:
            self._receive(self._owner(ticket))
        part = self._parts.pop(ticket)
        batch = self._batches.pop(ticket) if ticket in self._batches else self._work.read(part)
        if isinstance(batch, DataError):
            raise batch
        return batch

    def drop(self, tickets: Iterable[int]) -> None:
        """Outstanding slices are still read, and thrown away."""
        for ticket in tickets:
            self._parts.pop(ticket, None)
            if ticket in self._batches:
                del self._batches[ticket]
            elif not self.reads_here:
                self._dropped.add(ticket)

    def close(self) -> None:
        """End all processes and wait for them."""
        self._end_loaders()
        last_read.remove_loader_pages(self._pages)
        self._pages.close()

    def _end_loaders(self) -> None:
        for loader in self._loaders:
            loader.ask_to_end()
        for loader in self._loaders:
            loader.end()
        self._loaders = []
        self._template.close()

    def _owner(self, ticket: int) -> _LoaderProcess:
        return self._loaders[ticket % len(self._loaders)]

    def _receive(self, loader: _LoaderProcess) -> None:
        try:
            reply, slot = loader.receive()
        except Stuck as stuck:
            self._leave_forks(str(stuck))
            return
        if reply.ticket in self._dropped:
            self._dropped.discard(reply.ticket)
        elif reply.error:
            error = DataError(reply.error)
            error.__cause__ = RuntimeError(f"in a loader process:\n{reply.trace}")
            self._batches[reply.ticket] = error
        else:
            tensors = wire.read(reply.places, slot.room(reply.size)) if reply.places else []
            self._batches[reply.ticket] = wire.unpack(reply.skeleton, tensors)

    def _leave_forks(self, where: str) -> None:
        """Have an interpreter of its own start all processes, or read here."""
        self.trouble = f"a loader process could not continue: {where}"
        self._say(
            f"{self.trouble}. A fork copies no threads of a library. Now processes are started "
            "that are not forked from the worker; set data.loaders = 0 to read in the worker."
        )
        self._template.close()  # and with it those that it has forked
        try:
            if self._packed is not None:
                raise DataError("it was not forked from the worker")
            self._packed = Packed(self._work)
            self._template = Template(self._begin, self._say)
            self._compare()
            for loader in self._loaders:
                loader.start_again()
        except (DataError, Stuck) as error:
            self.reads_here = True
            self._end_loaders()
            self._dropped.clear()
            self._say(f"no loader process can read the dataset: {error}. The worker reads it.")

    def _compare(self) -> None:
        """Read the first sample in a process without a fork and in this one.

        Raises:
            DataError: they differ: the process does not know all that the dataset needs.
            Stuck: that process cannot go on either.
        """
        loader = self._loader(0)
        try:
            loader.post(0, _FIRST)
            reply, slot = loader.receive()
            there = _contents(reply, slot)
        finally:
            loader.end()
        if isinstance(there, DataError):
            raise there
        if there != content_of(self._work.read(_FIRST)[0]):
            raise DataError("it read another first sample than this process")


def _contents(reply: Reply, slot: Slot) -> int | DataError:
    """What a batch holds, or why there is none."""
    if reply.error:
        return DataError(reply.error)
    tensors = wire.read(reply.places, slot.room(reply.size)) if reply.places else []
    return content_of(wire.unpack(reply.skeleton, tensors)[0])


class _LoaderProcess:
    def __init__(
        self,
        fork: Callable[[int, Connection, list[int]], int],
        ending: Callable[[int], tuple[str, Whereabouts | None]],
        reads: Callable[[int], Whereabouts | None],
        number: int,
        fetch: Fetch,
        say: Say,
    ) -> None:
        self._fork, self._ending_of, self._number, self._fetch = fork, ending, number, fetch
        self._reads, self._named = reads, False
        self._say, self._stack = say, last_read.memory_file()
        self._slots = [Slot() for _ in range(_SLOTS)]
        self._outstanding: dict[int, Task] = {}
        self._lost = 0  # processes that have died since the last reply
        self._crashes: dict[int, int] = {}  # how many of them, by the sample that they read
        self._ending = ""
        self._start()

    @property
    def has_room(self) -> bool:
        return len(self._outstanding) < _SLOTS

    def post(self, ticket: int, part: Slice) -> None:
        used = {task.slot for task in self._outstanding.values()}
        slot = next(number for number in range(_SLOTS) if number not in used)
        self._outstanding[ticket] = Task(ticket, slot, part)
        self._send(self._outstanding[ticket])

    def receive(self) -> tuple[Reply, Slot]:
        """The next reply, and where its tensors are until the next `post`."""
        while (body := self._message()) is None:
            self._replace()
        self._clear_suspects()
        reply = msgspec.msgpack.decode(body, type=Reply)
        return reply, self._slots[self._outstanding.pop(reply.ticket).slot]

    def _message(self) -> bytes | None:
        watch = StuckWatch()
        while not self._connection.poll(LOOK_S):
            match watch.turn(self.pid, time.monotonic(), self._reads(self.pid)):
                case "stuck":
                    raise Stuck(f"it waits for a lock that no thread of it holds{self._place()}")
                case "hung":
                    raise Stuck(f"it has waited for {HUNG_S:g} s in one read{self._place()}")
                case "idle" if not self._named:
                    self._named = True  # of slow storage once is enough
                    self._say(
                        f"loader process {self.pid} has waited for {IDLE_S:g} s{self._place()}. If "
                        "that never ends, set data.loaders = 0."
                    )
        return receive(self._connection)

    def _place(self) -> str:
        """Where its thread is, as the end of a sentence."""
        line = deepest_line(ask_stack(self.pid, self._stack))
        return f" ({line})" if line else ""

    def start_again(self) -> None:
        """Start another process for the same slices, after the one before was killed."""
        self._ending_of(self.pid)
        self._lost, self._ending = 0, ""
        self._connection.close()
        self._start()
        for task in self._outstanding.values():
            self._send(task)

    def ask_to_end(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.send_bytes(STOP)

    def end(self) -> None:
        if not self._ending:
            try:
                while self._connection.poll(_GRACE_S):
                    self._connection.recv_bytes()
                os.kill(self.pid, signal.SIGKILL)
            except (EOFError, OSError):
                pass
            self._ending_of(self.pid)
        self._release()

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        try:
            files = [self._stack, *(slot.file for slot in self._slots)]
            self.pid = self._fork(self._number, theirs, files)
        except DataError:
            self._ending = "could not be started"
            self._release()
            raise
        finally:
            theirs.close()

    def _release(self) -> None:
        self._connection.close()
        for slot in self._slots:
            slot.close()
        if self._stack >= 0:
            os.close(self._stack)
        self._stack = -1

    def _clear_suspects(self) -> None:
        """A slice was read: samples suspected of crashes before it did not cause them."""
        self._lost = 0
        for sample in self._crashes:
            self._fetch.note(sample, None)
        self._crashes.clear()

    def _count_crash(self, place: Whereabouts) -> None:
        """Count a crash at a sample; at the third, skip the sample or raise."""
        sample = place.sample
        self._fetch.note(sample, "")  # from now on it is read alone
        # of many in one call it may have been another
        self._crashes[sample] = 0 if place.count > 1 else self._crashes.get(sample, 0) + 1
        if (times := self._crashes[sample]) < MAX_CRASHES:
            return
        if not self._fetch.skip:
            memory = " Memory may have run out." if "SIGKILL" in self._ending else ""
            raise DataError(
                f"a loader process (pid {self.pid}) {self._ending} {describe_read(place)}."
                f"{memory} It happened {times} times at this sample.{SKIP_HINT}"
            )
        self._fetch.note(sample, f"each of {times} processes that read it {self._ending}")
        del self._crashes[sample]
        self._lost = 0

    def _replace(self) -> None:
        self._lost += 1
        if not self._ending:
            self._ending, place = self._ending_of(self.pid)
            if is_reading(place):
                self._count_crash(place)
        if self._lost >= _MAX_LOST:
            part = min(self._outstanding.values(), key=lambda task: task.ticket).part
            positions = f"positions {part.first} to {part.stop - 1} of epoch {part.epoch + 1}"
            which = "the first samples" if part.epoch < 0 else f"the samples at {positions}"
            raise DataError(
                f"{self._lost} loader processes in a row died while they read {which}; the last "
                f"(pid {self.pid}) {self._ending}. SIGKILL often means that memory ran out: set "
                "data.loaders to 0 or to a smaller number."
            )
        self._ending = ""
        self._connection.close()
        self._start()
        for task in self._outstanding.values():
            self._send(task)

    def _send(self, task: Task) -> None:
        task.marks, task.changes = self._fetch.marks, self._fetch.told.changes
        with contextlib.suppress(OSError):  # `receive` notices
            self._connection.send_bytes(msgspec.msgpack.encode(task))
