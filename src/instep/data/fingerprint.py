"""By what a dataset is known again: its length, and the contents of some of its samples.

The samples are keyed by the job's seed, so that every start takes the same, and
are read with keyed generators. Some are read twice, at another moment and among
others: a sample that then holds something else is not repeatable, as its draws
come from a place that no key reaches.

Whoever finds another content reads all of it again before it counts: a sample that
does not repeat may have done so by chance when it was read twice, or was read once.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

from instep.data.fetch import Fetch
from instep.data.order import Order, key

SAMPLES, LEAST, _TWICE = 32, 4, 8
_LIMIT_S = 0.5
"""Dear samples: when this is used up, those that were read by then do; `LEAST` at least."""

_READINGS, _READINGS_S = 16, 2.0
"""Further readings before another content counts, and for how long the next is begun. A sample
that is flipped every other time looks the same in all of them once in 65,000 times."""

Clock = Callable[[], float]

_OF_FINGERPRINT = 5


class Fingerprint(NamedTuple):
    """What one reading of a dataset showed."""

    samples: int
    """Its length."""
    contents: list[tuple[int, int]]
    """(index, content) of keyed samples that could be read; `contents.content_of`."""
    differed: list[int]
    """Those that held something else when they were read again."""

    def plain(self) -> list[Any]:
        """As it travels between processes."""
        return [self.samples, [list(each) for each in self.contents], self.differed]

    @classmethod
    def of(cls, plain: list[Any]) -> Fingerprint:
        """From what `plain` gave."""
        samples, contents, differed = plain
        return cls(samples, [(index, content) for index, content in contents], differed)

    @property
    def digest(self) -> str:
        """The contents as one short word, for messages."""
        word = 0
        for pair in self.contents:
            word = key(word, *pair)
        return f"{word:016x}"

    def compared(self, other: Fingerprint) -> list[int]:
        """Samples whose contents can be: that both have read, and that always repeated."""
        known, unsure = dict(other.contents), {*self.differed, *other.differed}
        return [index for index, _ in self.contents if index in known and index not in unsure]

    def changes(self, other: Fingerprint) -> list[int]:
        """Those of them that hold something else in the other."""
        mine, theirs = dict(self.contents), dict(other.contents)
        return [index for index in self.compared(other) if mine[index] != theirs[index]]

    def same_as(self, other: Fingerprint) -> bool:
        """Whether nothing shows that it is another dataset."""
        return self.samples == other.samples and not self.changes(other)

    def with_another(self, reading: Fingerprint) -> Fingerprint:
        """This one, after the same dataset was read once more."""
        mine, theirs = dict(self.contents), dict(reading.contents)
        differed = {*self.differed, *reading.differed}
        differed |= {index for index in mine.keys() & theirs if mine[index] != theirs[index]}
        return self._replace(differed=sorted(differed))


def known_again(
    read: Callable[[], Fingerprint], before: Fingerprint, clock: Clock = time.perf_counter
) -> Fingerprint:
    """Read a dataset that was read before; if it seems to be another, until that is certain.

    Args:
        read: takes its fingerprint.
        before: what it was then.
        clock: in seconds.
    """
    now, began = read(), clock()
    for _ in range(_READINGS):
        if before.samples != now.samples or before.same_as(now) or clock() - began > _READINGS_S:
            break
        now = now.with_another(read())
    return now


def fingerprint(fetch: Fetch, clock: Clock = time.perf_counter) -> Fingerprint:
    """Read the samples of a dataset that tell it from others; the generators are left alone."""
    began = clock()
    order = Order(fetch.samples, key(fetch.seed, _OF_FINGERPRINT))
    contents: list[tuple[int, int]] = []
    for index in order.indices(0, 0, min(SAMPLES, fetch.samples)).tolist():
        if len(contents) >= LEAST and clock() - began > _LIMIT_S:
            break
        with suppress(Exception):  # one that cannot be read is told of when its step comes
            contents.append((index, fetch.content(index)))
    differed = []
    for index, content in reversed(contents[:_TWICE]):
        with suppress(Exception):
            if fetch.content(index) != content:
                differed.append(index)
    return Fingerprint(fetch.samples, contents, differed)
