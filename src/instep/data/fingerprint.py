"""By what a dataset is known again: its length, and the contents of some of its samples.

The samples are keyed by the job's seed, so that every start takes the same, and
are read with keyed generators. Some are read twice, at another moment and among
others: a sample that then holds something else is not repeatable, as its draws
come from a place that no key reaches.
"""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any, NamedTuple

from instep.data.fetch import Fetch
from instep.data.order import Order, key

SAMPLES, _TWICE, _LEAST = 32, 8, 4
_LIMIT_S = 0.5
"""Dear samples: when this is used up, those that were read by then do."""

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

    def same_as(self, other: Fingerprint) -> bool:
        """Whether nothing shows that it is another dataset.

        Contents that are not repeatable show nothing, nor do samples that one of the two
        alone has read.
        """
        known = dict(other.contents)
        unsure = self.differed or other.differed
        return self.samples == other.samples and (
            bool(unsure)
            or all(known.get(index, content) == content for index, content in self.contents)
        )


def fingerprint(fetch: Fetch) -> Fingerprint:
    """Read the samples of a dataset that tell it from others; the generators are left alone."""
    began = time.perf_counter()
    order = Order(fetch.samples, key(fetch.seed, _OF_FINGERPRINT))
    contents: list[tuple[int, int]] = []
    for index in order.indices(0, 0, min(SAMPLES, fetch.samples)).tolist():
        if len(contents) >= _LEAST and time.perf_counter() - began > _LIMIT_S:
            break
        with suppress(Exception):  # one that cannot be read is told of when its step comes
            contents.append((index, fetch.content(index)))
    differed = []
    for index, content in reversed(contents[:_TWICE]):
        with suppress(Exception):
            if fetch.content(index) != content:
                differed.append(index)
    return Fingerprint(fetch.samples, contents, differed)
