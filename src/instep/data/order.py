"""Which samples a step takes: a keyed permutation computed position by position.

The order of an epoch is a function of (seed, epoch) and never stored: a small
Feistel network over a grid of `rows * columns >= samples` cells gives the
sample at a position, and the few cells without a sample are skipped (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"). So a batch out of a
billion samples costs as much as one out of a thousand, at any position of the
epoch, for any number of workers.

This is a shuffle, not encryption. It knows no datasets and no torch. `key` is
the mixer of integers behind every keyed draw in instep.
"""

from __future__ import annotations

from functools import lru_cache
from math import isqrt
from typing import Any, NamedTuple, Protocol

import numpy as np

LARGEST = 1 << 40
"""Samples that one order can hold."""

BLOCK = 1024
"""Positions computed together and cached: numpy takes hardly longer than for one batch."""

_FEW, _ROUNDS_FOR_FEW, _ROUNDS = 256, 16, 6
"""A small grid mixes slowly: 6 rounds leave the orders of 30 samples visibly uneven, 16 do not."""

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Indices = np.ndarray[Any, np.dtype[np.int64]]
Words = np.ndarray[Any, np.dtype[np.uint64]]

_SPREAD, _FOLD = np.uint64(_FIRST), np.uint64(_SECOND)
_HALF, _LOW = np.uint64(32), np.uint64(16)


def key(seed: int, *parts: int) -> int:
    """Mix integers into one key, the same on every machine.

    Args:
        seed: of the job; like `parts`, any integer, taken modulo 2**64.
        parts: the purpose of the draw, such as epoch and sample. Their number and
            order matter.

    Returns:
        A key of 63 bits, at least 0: valid as any seed and as int64. The
        mixer is the finaliser of SplitMix64 (Steele et al. 2014).
    """
    state = _mixed(seed)
    for part in parts:
        # the factor keeps a part that equals the seed from cancelling it
        state = _mixed((state * _SECOND) ^ _mixed(part))
    return state >> 1


def keys(seed: int, *parts: int | Indices) -> Words:
    """`key` for arrays of parts, which broadcast: [...] uint64 with the bits of `key`."""
    state = np.array([_mixed(seed)], np.uint64)
    for part in parts:
        words = np.atleast_1d(np.asarray(part)).astype(np.uint64)
        state = _mixed_words((state * _FOLD) ^ _mixed_words(words))
    return state >> np.uint64(1)


def _mixed(word: int) -> int:
    word = (word + _GOLDEN) & _WORD
    word = ((word ^ (word >> 30)) * _FIRST) & _WORD
    word = ((word ^ (word >> 27)) * _SECOND) & _WORD
    return word ^ (word >> 31)


def _mixed_words(words: Words) -> Words:
    words = words + np.uint64(_GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * _SPREAD
    words = (words ^ (words >> np.uint64(27))) * _FOLD
    return words ^ (words >> np.uint64(31))


class AnyOrder(Protocol):
    """Which sample is at a position of an epoch: a permutation of all samples for each epoch.

    One with an attribute `gaps` that is true has positions without a sample: a number below 0.
    """

    def indices(self, epoch: int, first: int, stop: int, /) -> Indices:
        """The samples at positions [first, stop) of an epoch, [stop - first] int64."""


class Order:
    """The keyed permutation of every epoch.

    Args:
        samples: size of the dataset, from 1 to `LARGEST`.
        seed: of the job.
    """

    def __init__(self, samples: int, seed: int) -> None:
        assert 1 <= samples <= LARGEST, f"an order of {samples} samples"
        self.samples = samples
        self.seed = seed
        rows = isqrt(samples - 1) + 1
        self._rows, self._columns = np.uint64(rows), np.uint64(-(-samples // rows))
        self._cached = (-1, -1, np.empty(0, dtype=np.int64))  # epoch, block, its samples

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """The samples at positions [first, stop) of an epoch.

        Args:
            epoch: counts from 0.
            first: 0 or more.
            stop: `first` or more, and `samples` at most.

        Returns:
            [stop - first] int64. Over the whole epoch every sample of
            `0..samples-1` occurs once; another epoch or seed has another order.
        """
        assert 0 <= first <= stop <= self.samples, f"positions {first} to {stop}"
        number = first // BLOCK
        begin = number * BLOCK
        if stop > begin + BLOCK:
            return self._computed(epoch, first, stop)
        cached_epoch, cached_number, block = self._cached  # read once: threads may share an order
        if (cached_epoch, cached_number) != (epoch, number):
            block = self._computed(epoch, begin, min(begin + BLOCK, self.samples))
            self._cached = (epoch, number, block)
        return block[first - begin : stop - begin].copy()

    def of(self, epoch: int, positions: Indices) -> Indices:
        """The samples at any positions of an epoch, [count] int64."""
        return self._at(epoch, positions.astype(np.uint64))

    def _computed(self, epoch: int, first: int, stop: int) -> Indices:
        return self._at(epoch, np.arange(first, stop, dtype=np.uint64))

    def _at(self, epoch: int, positions: Words) -> Indices:
        rounds = _ROUNDS_FOR_FEW if self.samples < _FEW else _ROUNDS
        keys = _round_keys(key(self.seed, epoch), rounds)
        cells = self._moved(positions, keys)
        while (outside := cells >= self.samples).any():
            cells[outside] = self._moved(cells[outside], keys)
        return cells.astype(np.int64)

    def _moved(self, cells: Words, keys: tuple[np.uint64, ...]) -> Words:
        row, column = np.divmod(cells, self._columns)
        for even, odd in zip(keys[::2], keys[1::2], strict=True):
            row = _shifted(row, column, even, self._rows)
            column = _shifted(column, row, odd, self._columns)
        row *= self._columns
        row += column
        return row


@lru_cache(maxsize=8)
def _round_keys(start: int, rounds: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(key(start, number)) for number in range(rounds))


def _shifted(values: Words, by: Words, round_key: np.uint64, size: np.uint64) -> Words:
    """`values`, below `size`, each rotated modulo `size` by a hash of its partner in `by`."""
    words = by + round_key
    words *= _SPREAD
    words ^= words >> _HALF
    words *= _FOLD
    words >>= _LOW  # the high bits are the good ones, and the sum below must not overflow
    words += values
    words %= size
    return words


class Position(NamedTuple):
    """The global batch of a step: positions [first, stop) of `epoch`."""

    epoch: int
    first: int
    stop: int

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where its micro-batches begin, and where the last one ends; empty where they are even."""
        return ()

    @property
    def size(self) -> int:
        """Samples in it."""
        return self.stop - self.first

    def micro_batch(self, number: int, of: int) -> tuple[int, int]:
        """Positions [first, stop) of one of its `of` micro-batches, from 0; perhaps empty."""
        if self.cuts:
            return self.cuts[number], self.cuts[number + 1]
        return micro_batch(self.first, self.stop, number, of)


class CutPosition(Position):
    """A global batch whose micro-batches are not simply as many samples each.

    Args:
        epoch, first, stop: as above.
        cuts: where each micro-batch begins, and where the last one ends.
    """

    _cuts: tuple[int, ...]

    def __new__(cls, epoch: int, first: int, stop: int, cuts: tuple[int, ...] = ()) -> CutPosition:
        """Make one."""
        self = super().__new__(cls, epoch, first, stop)
        self._cuts = cuts
        return self

    @property
    def cuts(self) -> tuple[int, ...]:
        """Those that were given."""
        return self._cuts


def steps_in_epoch(samples: int, global_batch: int) -> int:
    """Steps that take every sample once; the last one may take fewer."""
    return -(-samples // global_batch)


def position(step: int, samples: int, global_batch: int) -> Position:
    """The global batch of a step.

    Args:
        step: counts from 1, over all epochs.
        samples: size of the dataset.
        global_batch: samples of a step; the last one of an epoch takes what is left.
    """
    epoch, number = divmod(step - 1, steps_in_epoch(samples, global_batch))
    first = number * global_batch
    return Position(epoch, first, min(first + global_batch, samples))


def micro_batch(first: int, stop: int, number: int, of: int) -> tuple[int, int]:
    """Part `number`, from 0, of positions [first, stop) split into `of` even parts.

    Returns:
        (first, stop) of the part. The parts are contiguous, follow each other
        and differ by one sample at most; some are empty where there are fewer
        samples than parts.
    """
    size = stop - first
    return first + size * number // of, first + size * (number + 1) // of
