"""The three global generators that a dataset may draw from: torch, numpy, random.

They belong to the process, not to a sample. So a dataset that draws from them is
noticed by comparing states (`Watch`), and read with all three set from the
sample's key. Only the generators of the CPU are touched.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch


class Generators(NamedTuple):
    """The states of the three, as they were at one moment."""

    of_torch: torch.Tensor
    of_numpy: tuple[Any, ...]
    of_random: tuple[Any, ...]

    def same(self, other: Generators) -> bool:
        """Whether nothing was drawn between the two moments."""
        return (
            torch.equal(self.of_torch, other.of_torch)
            and self.of_random == other.of_random
            and np.array_equal(self.of_numpy[1], other.of_numpy[1])
            and self.of_numpy[2:] == other.of_numpy[2:]
        )


def states() -> Generators:
    """Read the three states; nothing is drawn."""
    return Generators(torch.get_rng_state(), _numpy_state(), random.getstate())


def set_from(number: int) -> None:
    """Set the three from one key of 63 bits; numpy from its lower 32, for a sixth of the time."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


@contextmanager
def kept() -> Iterator[Generators]:
    """Give the three back as they were found; yields the states at the start."""
    before = states()
    try:
        yield before
    finally:
        torch.set_rng_state(before.of_torch)
        np.random.set_state(before.of_numpy)
        random.setstate(before.of_random)


class Watch:
    """Whether one of the three was drawn from, cheap enough to ask after each slice.

    numpy makes its state known in 45 us, one number at a time. Its memory is
    compared instead, which holds all of the state but the second half of a pair
    of gaussians; where one is left over, the state is asked for after all.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._address = 0
        self._nothing_left = b""  # numpy's memory at a moment when no gaussian was left over
        self._of_numpy: tuple[Any, ...] | bytes = b""

    def begin(self) -> None:
        """Remember the three as they are."""
        self._of_torch, self._of_random = torch.get_rng_state(), random.getstate()
        words = self._words()
        if words != self._nothing_left:
            state = _numpy_state()
            if state[3]:
                self._of_numpy = state
                return
            self._nothing_left = words
        self._of_numpy = words

    def moved(self) -> bool:
        """Whether one of them is not as it was at `begin`."""
        if isinstance(self._of_numpy, bytes):
            numpy_moved = self._words() != self._of_numpy
        else:
            now = _numpy_state()
            numpy_moved = now[2:] != self._of_numpy[2:] or bool((now[1] != self._of_numpy[1]).any())
        return (
            numpy_moved
            or not torch.equal(torch.get_rng_state(), self._of_torch)
            or random.getstate() != self._of_random
        )

    def give_back(self) -> None:
        """Set the three as they were at `begin`."""
        torch.set_rng_state(self._of_torch)
        random.setstate(self._of_random)
        state = self._of_numpy
        if isinstance(state, bytes):
            *key, place = np.frombuffer(state, np.uint32)
            state = ("MT19937", np.asarray(key, np.uint32), int(place), 0, 0.0)
        np.random.set_state(state)

    def _words(self) -> bytes:
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if source is not self._source:
            assert isinstance(source, np.random.MT19937), f"numpy draws from {source!r}"
            self._source, self._address = source, source.ctypes.state_address
        return ctypes.string_at(self._address, _WORDS_BYTES)


_WORDS_BYTES = 4 * (624 + 1)
"""A Mersenne Twister in memory: 624 words, and the place among them."""


def _numpy_state() -> tuple[Any, ...]:
    # the argument asks for the tuple form, whose fields are compared
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)
    return state
