"""Where slices are read: at the moment they are wanted, or ahead in one thread.

A reader hands out a ticket for every slice and gives the batch for the ticket.
`processes.Pool` is the third of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from instep.data import breadcrumb
from instep.data.fetch import Slice
from instep.data.threads import asked_here, cpu_clock

Work = Callable[[Slice], Any]


class Reader(Protocol):
    """Tickets are taken in the order in which they were handed out."""

    ahead: int
    """Slices to submit before the first is taken."""

    def submit(self, part: Slice) -> Any:
        """Ask for a slice; returns its ticket."""

    def take(self, ticket: Any) -> Any:
        """The batch, when it is ready; an error of the work is raised here."""

    def drop(self, tickets: Iterable[Any]) -> None:
        """These are no longer wanted."""

    def close(self) -> None:
        """Nothing runs after this returns; a second call does nothing."""


class Inline:
    """Reads a slice when it is taken, where it is taken."""

    ahead = 0

    def __init__(self, work: Work) -> None:
        self._work = work

    def submit(self, part: Slice) -> Slice:
        return part

    def take(self, ticket: Slice) -> Any:
        return self._work(ticket)

    def drop(self, tickets: Iterable[Slice]) -> None:
        pass

    def close(self) -> None:
        pass


class Ahead:
    """Reads a few slices ahead in one thread, which ends with `close`."""

    ahead = 4

    def __init__(self, work: Work) -> None:
        self._work = work
        self._trail = breadcrumb.trail(getattr(work, "name", breadcrumb.DATASETS[0]))
        self._trail.ahead = True
        self._clock: Callable[[], float] = lambda: 0.0
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="instep-loader", initializer=self._begin
        )

    def _begin(self) -> None:
        self._clock = cpu_clock()

    def _read(self, part: Slice) -> Any:
        with asked_here():
            return self._work(part)

    @property
    def cpu_s(self) -> float:
        """What its thread has used so far; may be asked by any thread."""
        return self._clock()

    def submit(self, part: Slice) -> Future[Any]:
        return self._thread.submit(self._read, part)

    def take(self, ticket: Future[Any]) -> Any:
        self._trail.ahead = False
        try:
            return ticket.result()
        finally:
            self._trail.ahead = True

    def drop(self, tickets: Iterable[Future[Any]]) -> None:
        for ticket in tickets:
            ticket.cancel()

    def close(self) -> None:
        self._trail.ahead = False
        self._thread.shutdown(wait=True, cancel_futures=True)
