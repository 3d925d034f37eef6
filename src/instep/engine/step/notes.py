"""What workers tell each other beside the gradient: numbers that travel with it, and are summed.

Every worker fills places of its own, or adds to a common one; after the sum
each holds the same. A further note is a further name where `Notes` is made
(`agreement.py`). What a note means, this file does not know.
"""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor


class Notes:
    """The layout of the notes of one step, equal on every worker.

    Args:
        sizes: name of each note to how many numbers it has.
    """

    def __init__(self, **sizes: int) -> None:
        self._sizes = sizes
        self.size = sum(sizes.values())
        """Numbers of all notes together."""

    def blank(self) -> dict[str, list[float]]:
        """Notes in which nothing is said yet: zeros, which a sum passes over."""
        return {name: [0.0] * size for name, size in self._sizes.items()}

    def pack(self, notes: dict[str, list[float]]) -> Tensor:
        """Notes as one tensor, [size] float64, in the order of the layout."""
        assert [len(notes[name]) for name in self._sizes] == list(self._sizes.values()), notes
        values = [value for name in self._sizes for value in notes[name]]
        return torch.tensor(values, dtype=torch.float64)

    def unpack(self, summed: Tensor) -> dict[str, list[float]]:
        """What `pack` gave on every worker, summed over them, by name."""
        values = iter(summed.tolist())
        return {name: list(islice(values, size)) for name, size in self._sizes.items()}
