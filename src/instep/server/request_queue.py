"""Which workers have asked the server for a lease, and what they are answered.

A worker has one question at a time, and of its connections only the newest counts. What a push does
is not known here, nor are files or generations. Way in: `Desk.take_in`, then `Desk.answer`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from instep.errors import PeerError
from instep.server.commits import Commits
from instep.server.door import Door, Guest
from instep.server.tensor_channel import LOOK_S, Ask, Grant

TOLD = 1000
"""Complete steps that are remembered for workers that do not know of them."""


class _Waits(NamedTuple):
    """A worker that has asked."""

    ask: Ask
    counted: bool
    since: float


class Desk:
    """The server's side of all its connections.

    Args:
        door: where workers connect.
        commits: has the leases.
        take: commits what a worker has pushed, if it counts; returns whether it does.
        frozen: gives the parameters that are not trained, as bytes.
    """

    def __init__(
        self,
        door: Door,
        commits: Commits,
        take: Callable[[Guest, Ask], bool],
        frozen: Callable[[], list[Tensor]],
    ) -> None:
        self._door, self._commits, self._take, self._frozen = door, commits, take, frozen
        self._complete = deque[tuple[int, float, float | None]](maxlen=TOLD)
        self._guests: dict[int, Guest] = {}  # the newest of each worker
        self._asking: dict[Guest, _Waits] = {}

    def next(self) -> tuple[Guest, Ask | None] | None:
        """What arrives next, for `take_in`; None if nothing does for a while."""
        return self._door.next(LOOK_S)

    def take_in(self, arrived: tuple[Guest, Ask | None] | None) -> None:
        """Take in this, and all that has arrived meanwhile."""
        while arrived is not None:
            self._arrived(*arrived)
            arrived = self._door.next(0.0)

    def _arrived(self, guest: Guest, ask: Ask | None) -> None:
        before = self._guests.get(guest.worker)
        if ask is None:
            self._asking.pop(guest, None)
            if before is guest:
                del self._guests[guest.worker]
                self._commits.leave(guest.worker)
            return
        if before is not guest and before is not None:  # its connection broke, and it came again
            self._asking.pop(before, None)
            before.close()
            self._commits.leave(guest.worker)  # so what was sent before, and comes now, is late
        self._guests[guest.worker] = guest
        if ask.frozen:
            guest.answer(Grant(False, []), self._frozen())
            return
        try:
            if ask.token >= 0:
                counted = self._take(guest, ask)
            else:
                counted = self._commits.counted(guest.worker, ask.unsure)
        except PeerError:  # this server is cut off; nobody would answer
            guest.close()
            raise
        self._asking[guest] = _Waits(ask, counted, time.monotonic())

    def answer(self) -> None:
        """Give leases to all that have asked, as far as there are any."""
        now = time.monotonic()
        for guest, (ask, counted, since) in list(self._asking.items()):
            granted = self._commits.grant(guest.worker, now)
            if granted is None:
                return
            del self._asking[guest]
            (token, unit, *_), given = granted
            grant = Grant(counted, self._unknown(ask), token, *unit, now - since, since=given.since)
            guest.answer(grant, given.flats)

    def _unknown(self, ask: Ask) -> list[tuple[int, float, float | None]]:
        """The complete steps that a worker does not know of."""
        found = []
        for each in reversed(self._complete):
            if each[0] <= ask.known:
                break
            found.append(each)
        return found[::-1]

    def completed(self, step: int, loss: float, norm: float | None) -> None:
        """A step is complete: workers are told with their next answer."""
        self._complete.append((step, loss, norm))

    def end(self, step: int, rule: str, *, finite: bool) -> None:
        """Answer everybody, from now on, that the run is over.

        Args:
            step: the last one.
            rule: by which it has ended.
            finite: whether its loss was.
        """
        end = Grant(True, [*self._complete], step=step, ends=rule, finite=finite)

        def tell(guest: Guest, _: Ask) -> bool:
            guest.answer(end)
            return True

        self._door.end(tell)
        for guest in self._asking:
            guest.answer(end)
        self._asking.clear()

    def close(self) -> None:
        """Close all connections, and let nobody in."""
        self._door.close()
        for guest in self._guests.values():
            guest.close()
