"""Callers that have yet to prove what they are: how many there may be, and who has to go.

Parts that listen where strangers can call keep them here: master, forwarders, parameter servers.
Nothing here knows of connections or proofs. Way in: `Unproven`.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")

NO_MORE_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Why nobody can be accepted for a moment."""


class Unproven(Generic[T]):
    """Callers, the oldest first. One more than `most` takes the place of the oldest.

    Safe to use from several threads.

    Args:
        most: how many there may be.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._callers: dict[T, None] = {}

    def add(self, caller: T) -> list[T]:
        """One more; returns those that have to go for it."""
        self._callers[caller] = None
        gone = []
        while len(self._callers) > self.most and (oldest := next(iter(self), None)) is not None:
            if self.remove(oldest):
                gone.append(oldest)
        return gone

    def remove(self, caller: T) -> bool:
        """It has proved what it is, or is gone; whether it was still among them."""
        try:
            del self._callers[caller]
        except KeyError:
            return False
        return True

    def clear(self) -> list[T]:
        """All have to go; returns them."""
        return [caller for caller in self if self.remove(caller)]

    def __len__(self) -> int:
        return len(self._callers)

    def __iter__(self) -> Iterator[T]:
        return iter(list(self._callers))
