"""Which batches have no predictions yet, who gets which next, and where workers were lost.

Pure: the master of predictions (`master.py`) says what happened, and carries out what
follows.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from instep.client.predict.deadly_samples import DeadlySamples
from instep.comm.protocol.messages import Whereabouts
from instep.words import plural

IN_HAND = 4
"""Turns that a replica has at most, so that its processes can read ahead."""

MOST_OWN, MOST_KILLED = 3, 10
"""After so many workers were lost at one batch, by themselves or by SIGKILL, none is started."""

START = -1
"""Stands for a batch where a worker was lost before it could predict."""


class PredictBatches:
    """The batches of one dataset.

    Args:
        done: those that have a part already.
        size: samples of a batch.
        skip: whether samples that kill who reads them are skipped.
    """

    def __init__(self, done: Iterable[int], size: int, *, skip: bool) -> None:
        self.done, self.size, self.samples = set(done), size, 0
        self.before = len(self.done)
        """How many had a part at first."""
        self.deadly = DeadlySamples(skip=skip)
        self._left: deque[int] = deque()
        self._own, self._killed = Counter[int](), Counter[int]()

    def count(self, samples: int) -> None:
        """The length of the dataset is known."""
        self.samples = samples
        self.done &= set(range(self.total))
        self.before = len(self.done)
        self._left = deque(n for n in range(self.total) if n not in self.done)

    @property
    def total(self) -> int:
        """Batches of the dataset; 0 while its length is not known."""
        return -(-self.samples // self.size)

    @property
    def complete(self) -> bool:
        """Whether every batch has a part."""
        return self.samples > 0 and len(self.done) == self.total

    def take(self, has: int, replicas: int, marks: int, size: int = 1) -> list[list[int]]:
        """Turns for a replica, of the first batches that are left; it may get none.

        Args:
            has: how many it has in hand.
            replicas: that share what is left.
            marks: changes of the marks of samples that it knows.
            size: batches of a turn, which it computes side by side; the last may have fewer.
        """
        fair = max(1, min(IN_HAND, len(self._left) // (replicas * size)))
        taken: list[int] = []
        passed: list[int] = []
        while self._left and len(taken) < (fair - has) * size:
            number = self._left.popleft()
            knows = self.deadly.needed.get(number, 0) <= marks
            if number not in self.done:  # else by one whose replica was lost before it said so
                (taken if knows else passed).append(number)
        self._left.extendleft(reversed(passed))
        return [taken[first : first + size] for first in range(0, len(taken), size)]

    def give_back(self, numbers: Iterable[int]) -> None:
        """A replica was lost with these in hand; they come first."""
        self._left.extendleft(sorted((n for n in numbers if n not in self.done), reverse=True))

    # ---- where workers were lost

    def starts(self) -> None:
        """A worker has got ready."""
        del self._own[START], self._killed[START]

    def lost(self, at: int, how: str, place: Whereabouts | None, *, own: bool, dies: bool) -> bool:
        """A worker was lost at a batch.

        Args:
            at: the number of the batch, or `START`.
            how: as a sentence.
            place: which sample it read, if that is known.
            own: whether by itself, and not by a SIGKILL from elsewhere.
            dies: whether what it did is the cause, and it was not stopped from elsewhere.

        Returns:
            Whether that has happened too often.
        """
        (self._own if own else self._killed)[at] += 1
        if dies and self.deadly.learn(at, place, how):
            del self._own[at]
        return self._own[at] >= MOST_OWN or self._killed[at] >= MOST_KILLED

    def times(self, at: int) -> int:
        """How often one was lost there that was not killed from elsewhere."""
        return self._own[at]

    @property
    def most_times(self) -> int:
        """The same, of the batch where it was most often."""
        return max(self._own.values(), default=0)

    def said(self, at: int) -> str:
        """How often and where, for an error: `3 workers ended at batch 2 (samples 16 to 23)`."""
        count = self._own[at] + self._killed[at]
        where = "while they got ready"
        if at != START:
            last = min((at + 1) * self.size, self.samples) - 1
            where = f"at batch {at} (samples {at * self.size} to {last})"
        return f"{plural(count, 'worker')} ended {where}"
