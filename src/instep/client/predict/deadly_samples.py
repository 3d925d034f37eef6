"""Samples whose reading kills a worker: found out by where workers died, and skipped if asked for.

A process that dies in a decoder raises nothing, but its page tells which sample it was reading
(`data/samples/last_read.py`). Pure: the master of predictions says what happened.
"""

from __future__ import annotations

from instep.comm.protocol.messages import Mark, Whereabouts
from instep.data.samples.last_read import describe_read, is_reading
from instep.data.samples.unreadable import MAX_CRASHES


class DeadlySamples:
    """What is known of samples at which workers have died.

    Args:
        skip: skip one that has killed `MAX_CRASHES` of them.
    """

    def __init__(self, *, skip: bool) -> None:
        self._skip = skip
        self._crashes: dict[int, int] = {}
        self._causes: dict[int, str] = {}
        self.changes = 0
        """How often the marks have changed; a worker knows those of its start."""
        self.needed: dict[int, int] = {}
        """By batch, how many changes a worker has to know to be given it."""

    @property
    def marks(self) -> list[Mark]:
        """For a new worker: samples to skip, and samples to read alone (with an empty cause)."""
        return [
            Mark(dataset="validation", sample=sample, cause=self._causes.get(sample, ""))
            for sample in self._crashes
        ]

    def learn(self, batch: int, place: Whereabouts | None, how: str) -> bool:
        """A worker died at a batch; whether a mark makes it worth to try the batch once more.

        Args:
            batch: its number.
            place: where the process was, if that is known.
            how: it died.
        """
        if not self._skip or not is_reading(place):
            return False
        alone = place.count == 1
        new = place.sample not in self._crashes
        for sample in range(place.sample, place.sample + place.count):
            self._crashes[sample] = self._crashes.get(sample, 0) + alone
        found = alone and self._crashes[place.sample] >= MAX_CRASHES
        if found:
            self._causes[place.sample] = f"{how} {describe_read(place)}, {MAX_CRASHES} times"
        self.changes += 1
        self.needed[batch] = self.changes
        return found or (new and not alone)

    @staticmethod
    def said(place: Whereabouts | None) -> str:
        """`, while it read sample 512`, or nothing."""
        return f", {describe_read(place)}" if is_reading(place) else ""
