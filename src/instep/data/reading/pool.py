"""Loader processes: forked, so that a dataset needs no pickle and no second import.

Headers travel as msgpack over a connection, tensors through shared memory that is reused.
All processes are forked by one that is set apart early (`template.py`): a process without
threads, process groups or an open CUDA context, in which nothing has read the dataset.

A process that can never go on, as it waits for a thread that the fork has not copied, is
noticed (`stuck.py`), and so is one that has been at one read for very long. Then all processes
come from an interpreter of their own (`fresh.py`), as they do where the process that forks them was
killed and this one has read meanwhile; where that does not give the same sample, this process
reads.

A process that is killed is replaced and its slices are read again, which gives the same
batches (`fetch.py`), any number of times as long as slices get read. Each process records
what it reads: a sample at which three in a row have died counts as unreadable. Where they
died outside of a read, a slice on which several in a row were lost is an error.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from instep.comm.protocol.messages import Whereabouts
from instep.data.reading import wire
from instep.data.reading.fetch import Slice
from instep.data.reading.fresh import Packed
from instep.data.reading.loader_process import SLOTS, LoaderProcess, NoFork, Stuck
from instep.data.reading.process import Reply, Slot, Work
from instep.data.reading.template import Say, Template, forked
from instep.data.samples import last_read
from instep.data.samples.contents import content_of
from instep.data.samples.last_read import Pages
from instep.errors import DataError, PeerError, SpecError

_FIRST = Slice(0, 0, 1)

_MOST_TEMPLATES = 5
"""Templates in a row that are gone before they have forked: then it is no chance."""


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
        self._loaders: list[LoaderProcess] = []
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
        except NoFork as error:
            self.close()
            raise DataError(f"{error}.") from error
        self.ahead = processes * SLOTS - 1

    def _loader(self, number: int) -> LoaderProcess:
        return LoaderProcess(
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
        for _ in range(_MOST_TEMPLATES - 1):
            try:
                return self._template.start(number, self._of, connection, files)
            except PeerError as error:
                if not self._unread() and self._packed is None:
                    gone = f"the process that forks loader processes (pid {self._template.pid})"
                    raise NoFork(
                        f"{gone} is gone, and the dataset has been read here since"
                    ) from error
                self._template.close()
                self._template = Template(self._begin, self._say)
        try:
            return self._template.start(number, self._of, connection, files)
        except PeerError as error:
            raise DataError(f"{error} So were {_MOST_TEMPLATES - 1} before it.") from error

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

    def _owner(self, ticket: int) -> LoaderProcess:
        return self._loaders[ticket % len(self._loaders)]

    def _receive(self, loader: LoaderProcess) -> None:
        try:
            reply, slot = loader.receive()
        except Stuck as stuck:
            self.trouble = f"a loader process could not continue: {stuck}"
            self._leave_forks(f"{self.trouble}. A fork copies no threads of a library")
            return
        except NoFork as gone:
            self.trouble = str(gone)
            self._leave_forks(self.trouble)
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

    def _leave_forks(self, why: str) -> None:
        """Have an interpreter of its own start all processes, or read here."""
        self._say(
            f"{why}. Now processes are started that are not forked from the worker; set "
            "data.loaders = 0 to read in the worker."
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
