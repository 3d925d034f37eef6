"""Notes of workers beside the gradient: numbers that travel with it, and are summed.

Every worker fills places of its own, or adds to a common one; after the sum
each holds the same. A further note is a further name where `Notes` is made
(`agreement.py`). What a note means, this file does not know.
"""

from __future__ import annotations

from itertools import accumulate, chain, pairwise

import numpy as np
import torch
from torch import Tensor


class Notes:
    """The layout of the notes of one step, equal on every worker.

    Args:
        sizes: name of each note to how many numbers it has.
    """

    def __init__(self, **sizes: int) -> None:
        self._sizes = list(sizes.items())
        ends = pairwise(accumulate(sizes.values(), initial=0))
        self._places = [(name, slice(*each)) for name, each in zip(sizes, ends, strict=True)]
        self.size = sum(sizes.values())
        """Numbers of all notes together."""

    def blank(self) -> dict[str, list[float]]:
        """Notes in which nothing is said yet: zeros, which a sum passes over."""
        return {name: [0.0] * size for name, size in self._sizes}

    def pack(self, notes: dict[str, list[float]]) -> Tensor:
        """Notes of `blank` that were filled in, as one tensor, [size] float64."""
        values = [*chain.from_iterable(notes.values())]
        assert len(values) == self.size, notes
        return torch.from_numpy(np.array(values, np.float64))  # three times as fast as torch.tensor

    def unpack(self, summed: Tensor) -> dict[str, list[float]]:
        """Numbers that `pack` gave on every worker, summed over them, by name."""
        values = summed.tolist()
        return {name: values[place] for name, place in self._places}
