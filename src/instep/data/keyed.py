"""The three global generators that a dataset may draw from: torch, numpy, random.

They belong to the process, not to a sample. So a dataset that draws from them is
noticed by comparing states, and read with all three set from the sample's key.
Only the generators of the CPU are touched.
"""

from __future__ import annotations

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
    # the argument asks for the tuple form, whose fields `same` compares
    of_numpy = np.random.get_state(legacy=True)
    assert isinstance(of_numpy, tuple)
    return Generators(torch.get_rng_state(), of_numpy, random.getstate())


def set_from(number: int) -> None:
    """Set the three from one key of 63 bits."""
    torch.default_generator.manual_seed(number)
    np.random.seed([number & 0xFFFFFFFF, number >> 32])
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
