"""A dataset's fingerprint: its length, and the contents of some of its samples.

The samples are chosen by the job's seed, so that every start reads the same ones, with keyed
generators. Some are read twice, at another moment and in another order: a sample that then
holds something else is not repeatable, because it draws from a source that no key controls.

Before a changed content counts, all of it is read again (`confirmed_fingerprint`): a sample
that is not repeatable may have repeated by chance when it was read twice, or was read once.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

from instep.data.order import Order, key

SAMPLES, LEAST, _TWICE = 32, 4, 8
_LIMIT_S = 0.5
"""Time limit for slow samples: those read by then suffice, `LEAST` at least."""

_READINGS, _READINGS_S = 16, 2.0
"""Further readings before a changed content counts, and the time after which none is begun. A
sample that is flipped at random every other time looks the same in all of them once in 65,000
times."""

Clock = Callable[[], float]

_OF_FINGERPRINT = 5

REMEDY = "Draw from a global generator, or move the random part into Recipe.augment"
"""For a dataset that is not repeatable."""


class Fingerprint(NamedTuple):
    """What one reading of a dataset showed."""

    samples: int
    """Its length."""
    contents: list[tuple[int, int]]
    """(index, content) of the samples that could be read; `contents.content_of`."""
    differed: list[int]
    """Those that held something else when they were read again."""

    def to_plain(self) -> list[Any]:
        """As plain data, to send to another process."""
        return [self.samples, [list(each) for each in self.contents], self.differed]

    @classmethod
    def from_plain(cls, plain: list[Any]) -> Fingerprint:
        """The inverse of `to_plain`."""
        samples, contents, differed = plain
        return cls(samples, [(index, content) for index, content in contents], differed)

    @property
    def digest(self) -> str:
        """The contents as 16 hexadecimal digits, for messages."""
        mixed = 0
        for pair in self.contents:
            mixed = key(mixed, *pair)
        return f"{mixed:016x}"

    def comparable(self, other: Fingerprint) -> list[int]:
        """Samples whose contents can be compared: both have read them, and they always repeated."""
        known, unsure = dict(other.contents), {*self.differed, *other.differed}
        return [index for index, _ in self.contents if index in known and index not in unsure]

    def changes(self, other: Fingerprint) -> list[int]:
        """The comparable samples that hold something else in the other."""
        mine, theirs = dict(self.contents), dict(other.contents)
        return [index for index in self.comparable(other) if mine[index] != theirs[index]]

    def same_as(self, other: Fingerprint) -> bool:
        """Whether nothing shows that it is another dataset."""
        return self.samples == other.samples and not self.changes(other)

    def merged_with(self, reading: Fingerprint) -> Fingerprint:
        """This one, after another reading of the same dataset."""
        mine, theirs = dict(self.contents), dict(reading.contents)
        differed = {*self.differed, *reading.differed}
        differed |= {index for index in mine.keys() & theirs if mine[index] != theirs[index]}
        return self._replace(differed=sorted(differed))


def confirmed_fingerprint(
    read: Callable[[], Fingerprint], before: Fingerprint, clock: Clock = time.perf_counter
) -> Fingerprint:
    """The fingerprint of a dataset that was read before; if it differs, read until that is certain.

    Args:
        read: takes the fingerprint.
        before: the earlier one.
        clock: in seconds.
    """
    now, began = read(), clock()
    for _ in range(_READINGS):
        if before.samples != now.samples or before.same_as(now) or clock() - began > _READINGS_S:
            break
        now = now.merged_with(read())
    return now


def fingerprint(
    samples: int,
    seed: int,
    content: Callable[[int], int],
    clock: Clock = time.perf_counter,
    among: Sequence[int] | None = None,
) -> Fingerprint:
    """Take the fingerprint of a dataset.

    Args:
        samples: its length.
        seed: of the job.
        content: reads a sample of epoch 0 with keyed generators; raises where it cannot.
        clock: in seconds.
        among: samples that are read; any of the dataset if None.
    """
    began, most = clock(), samples if among is None else len(among)
    order = Order(max(1, most), key(seed, _OF_FINGERPRINT))
    contents: list[tuple[int, int]] = []
    for place in order.indices(0, 0, min(SAMPLES, most)).tolist():
        index = place if among is None else among[place]
        if len(contents) >= LEAST and clock() - began > _LIMIT_S:
            break
        with suppress(Exception):  # an unreadable one is reported when its step comes
            contents.append((index, content(index)))
    differed = []
    for index, before in reversed(contents[:_TWICE]):
        with suppress(Exception):
            if content(index) != before:
                differed.append(index)
    return Fingerprint(samples, contents, differed)
