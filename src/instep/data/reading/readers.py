"""Readers: where slices are read. At the moment they are wanted, or ahead in one thread.

A reader hands out a ticket for every slice and gives the batch for the ticket.
`pool.Pool`, which reads in processes, is the third reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from instep.data.reading.fetch import Slice
from instep.data.reading.threads import answer_stack_signals, cpu_clock
from instep.data.samples import last_read

Work = Callable[[Slice], Any]


class Reader(Protocol):
    """Tickets are taken in the order in which they were handed out."""

    ahead: int
    """Slices to submit before the first is taken."""

    def submit(self, part: Slice) -> Any:
        """Ask for a slice; returns its ticket."""

    def take(self, ticket: Any) -> Any:
        """The batch, when it is ready; an error of reading it is raised here."""

    def drop(self, tickets: Iterable[Any]) -> None:
        """These are no longer wanted."""

    def close(self) -> None:
        """Nothing runs after this returns; a second call does nothing."""


class Inline:
    """Reads a slice when it is taken, in the thread that takes it."""

    ahead = 0

    def __init__(self, work: Work) -> None:
        self.take = work

    def submit(self, part: Slice) -> Slice:
        return part

    def drop(self, tickets: Iterable[Slice]) -> None:
        pass

    def close(self) -> None:
        pass


class Ahead:
    """Reads a few slices ahead in one thread, which ends with `close`."""

    ahead = 4

    def __init__(self, work: Work) -> None:
        self._work = work
        self._current = last_read.current_read(getattr(work, "name", last_read.DATASETS[0]))
        self._current.ahead = True
        self._clock: Callable[[], float] = lambda: 0.0
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="instep-loader", initializer=self._begin
        )

    def _begin(self) -> None:
        self._clock = cpu_clock()

    def _read(self, part: Slice) -> Any:
        with answer_stack_signals():
            return self._work(part)

    @property
    def cpu_s(self) -> float:
        """What its thread has used so far; any thread may call it."""
        return self._clock()

    def submit(self, part: Slice) -> Future[Any]:
        return self._thread.submit(self._read, part)

    def take(self, ticket: Future[Any]) -> Any:
        self._current.ahead = False
        try:
            return ticket.result()
        finally:
            self._current.ahead = True

    def drop(self, tickets: Iterable[Future[Any]]) -> None:
        for ticket in tickets:
            ticket.cancel()

    def close(self) -> None:
        self._current.ahead = False
        self._thread.shutdown(wait=True, cancel_futures=True)
