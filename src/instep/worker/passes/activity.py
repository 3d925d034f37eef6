"""The present phase of a worker: its own thread says it, and that of the heartbeat reads it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from instep.data.loader import Read


class Activity:
    """The phase that a worker is in."""

    def __init__(self) -> None:
        self.phase = "building"

    def enter(self, phase: str) -> None:
        """Be in another phase from here on."""
        self.phase = phase

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Be in another phase in this context; an error leaves it too."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this context a pass only waits for other workers; one that is lost in it, waits on."""
        before, self.phase = self.phase, "exchange"
        yield
        self.phase = before

    def loading(self, reads: Iterator[Read]) -> Iterator[Read]:
        """Wait for each read in the phase `loading`: then the loader processes are watched."""
        while True:
            with self.during("loading"):
                read = next(reads, None)
            if read is None:
                return
            yield read
