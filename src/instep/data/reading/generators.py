"""The three global random generators that a dataset may draw from: torch, numpy, random.

They belong to the process, not to a sample. A dataset that draws from them is detected by
comparing states (`DrawDetector`), and is then read with all three seeded from the sample's
key. Only the CPU's generators are touched.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_STATE_BYTES = 4 * (624 + 1)
"""A Mersenne Twister in memory: 624 words, and the position among them."""


def seed_all(number: int) -> None:
    """Seed the three from one key of 63 bits; numpy from its lower 32, for a sixth of the time."""
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


@contextmanager
def preserved() -> Iterator[DrawDetector]:
    """Restore the three at the end of the context; yields their states at its start."""
    before = DrawDetector()
    try:
        yield before
    finally:
        before.restore()


class DrawDetector:
    """Remembers the three states, and says cheaply whether any was drawn from since.

    numpy needs 45 us to return its state, one number at a time. Its memory is compared
    instead, which holds the whole state except the second half of a pair of gaussians;
    where such a half is pending, numpy is asked after all.
    """

    def __init__(self) -> None:
        self._source: Any = None
        self._address = 0
        self._no_gaussian = b""  # numpy's memory at a moment when no gaussian was pending
        self._of_numpy: tuple[Any, ...] | bytes = b""
        self.remember()

    def remember(self) -> None:
        """Remember the three as they are."""
        self._of_torch, self._of_random = torch.get_rng_state(), random.getstate()
        memory = self._memory()
        if memory != self._no_gaussian:
            state = _numpy_state()
            if state[3]:
                self._of_numpy = state
                return
            self._no_gaussian = memory
        self._of_numpy = memory

    def drawn(self) -> bool:
        """Whether one of them has changed since `remember`."""
        return self.drawn_beside_torch() or not torch.equal(torch.get_rng_state(), self._of_torch)

    def drawn_beside_torch(self) -> bool:
        """The same of numpy's and Python's alone."""
        if isinstance(self._of_numpy, bytes):
            numpy_drew = self._memory() != self._of_numpy
        else:
            now = _numpy_state()
            numpy_drew = now[2:] != self._of_numpy[2:] or bool((now[1] != self._of_numpy[1]).any())
        return numpy_drew or random.getstate() != self._of_random

    def restore(self) -> None:
        """Set the three as they were at `remember`."""
        torch.set_rng_state(self._of_torch)
        random.setstate(self._of_random)
        state = self._of_numpy
        if isinstance(state, bytes):
            *key, position = np.frombuffer(state, np.uint32)
            state = ("MT19937", np.asarray(key, np.uint32), int(position), 0, 0.0)
        np.random.set_state(state)

    def _memory(self) -> bytes:
        source = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if source is not self._source:
            assert isinstance(source, np.random.MT19937), f"numpy draws from {source!r}"
            self._source, self._address = source, source.ctypes.state_address
        return ctypes.string_at(self._address, _STATE_BYTES)


def _numpy_state() -> tuple[Any, ...]:
    # the argument asks for the tuple form, whose fields are compared
    state = np.random.get_state(legacy=True)
    assert isinstance(state, tuple)
    return state
