"""The first server's connections to the others: one question at a time, to all of them.

A server that was lost has another process soon, which is told the last update (`meet`). It knows no
leases and no parameters. With one server there is nobody to ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from torch import Tensor

from instep.errors import PeerError, WorkerError
from instep.server.connect import AGAIN_S
from instep.server.messages import Be, Question, ServerAnswer
from instep.server.tensor_channel import Line


class Others:
    """All servers but the first.

    Args:
        count: how many.
        reach: connects to one of them, counted from 1; waits for it.
        waits: called now and then while one is waited for; what it raises is raised there.
        at: course and number of the last update.
        first: number of this process; those of the others follow.
    """

    def __init__(
        self,
        count: int,
        reach: Callable[[int], Line],
        waits: Callable[[], None],
        at: Callable[[], tuple[int, int]],
        first: int = 0,
    ) -> None:
        self._reach, self._waits, self._at = reach, waits, at
        self._first = first
        self._lines: list[Line | None] = [None] * count

    @property
    def count(self) -> int:
        """How many there are."""
        return len(self._lines)

    def meet(self, *, idle: bool = False) -> None:
        """If one is not there, wait for it, and have all be at the last update.

        Args:
            idle: whether nothing else has happened: then look whether one has left.

        Raises:
            WorkerError: one has lost its part.
            PeerError: as from `waits`.
        """
        for place, line in enumerate(self._lines if idle else ()):
            if line is not None and not line.idle:
                self._drop(place)
        while None in self._lines:
            for place, line in enumerate(self._lines):
                if line is None:
                    self._lines[place] = self._reach(place + 1)
            told = self.ask(Be(*self._at()))
            if told is None:
                time.sleep(AGAIN_S)
            elif gone := [place for place, each in enumerate(told, 1) if not each.fine]:
                raise lost(self._first + gone[0], self.count + 1)

    def must(
        self,
        question: Question,
        meanwhile: Callable[[], object] = lambda: None,
        bodies: Sequence[Sequence[Tensor]] = (),
    ) -> list[ServerAnswer]:
        """As `ask`, again until all have answered."""
        while (told := self.ask(question, meanwhile, bodies)) is None:
            self.meet()
        return told

    def ask(
        self,
        question: Question,
        meanwhile: Callable[[], object] = lambda: None,
        bodies: Sequence[Sequence[Tensor]] = (),
    ) -> list[ServerAnswer] | None:
        """Ask all of them; None if one is not there. It may have done what it was asked.

        Args:
            question: the same for all.
            meanwhile: called once all are asked.
            bodies: what those of the answers are written into.
        """
        told = list[ServerAnswer | None]()
        try:
            asked = [self._ask(place, question) for place in range(self.count)]
            meanwhile()
            for place, there in enumerate(asked):
                told.append(self._told(place, bodies[place] if bodies else ()) if there else None)
        except BaseException:
            self.close()  # answers may be on their way
            raise
        return None if None in told else [each for each in told if each is not None]

    def _ask(self, place: int, question: Question) -> bool:
        line = self._lines[place]
        if line is None:
            return False
        try:
            line.send(question, ())
        except PeerError:
            self._drop(place)
            return False
        return True

    def _told(self, place: int, body: Sequence[Tensor]) -> ServerAnswer | None:
        line = self._lines[place]
        assert line is not None, "it was asked"
        try:
            return line.receive(ServerAnswer, body, self._waits)
        except PeerError:
            self._drop(place)
            self._waits()  # raises again, where it was this that did
            return None

    def _drop(self, place: int) -> None:
        line, self._lines[place] = self._lines[place], None
        if line is not None:
            line.close()

    def close(self) -> None:
        """Close all connections; `meet` makes new ones."""
        for place in range(self.count):
            self._drop(place)


def lost(number: int, servers: int) -> WorkerError:
    """What to raise where no process has the part of the server with this number."""
    which = "the server" if servers == 1 else f"server {number}, one of {servers},"
    return WorkerError(
        f"{which} was lost with the memory of its host, or its fork server, or that memory was "
        f"damaged (it has a checksum), and no other process has its parameters. {_RESUME}"
    )


def halfway(servers: int) -> WorkerError:
    """What to raise where an update was made by some servers, and cannot be taken back."""
    return WorkerError(
        f"not all of {servers} servers have made the last update, as one was lost or was behind, "
        f"and those that have cannot go back: there was no memory for copies. {_RESUME}"
    )


_RESUME = "Resume the run: it continues from the newest checkpoint."
