"""Which rows sparse gradients have: these, and no others, an optimizer for them moves.

A row may have a gradient of exactly zero, and such an optimizer moves it nevertheless, by what it
remembers of the row. So ranks tell each other which rows they have beside the sum, which travels
dense: four bytes for each row of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm


class SparseRows:
    """Of the sparse gradients of a step."""

    def __init__(self) -> None:
        self._here: dict[int, Tensor] = {}
        self.agreed: dict[int, Tensor] = {}
        """By parameter: above 0 for each row that a rank had [rows]; after `agree`."""

    def add(self, slot: int, gradient: Tensor) -> None:
        """This rank has a sparse gradient of this parameter."""
        self._of(slot, gradient)[gradient._indices()[0]] = 1.0

    def add_values(self, slot: int, values: Tensor) -> None:
        """This rank has the rows in which not all is zero."""
        self._of(slot, values)[_filled(values)] = 1.0

    def _of(self, slot: int, like: Tensor) -> Tensor:
        if slot not in self._here:
            self._here[slot] = torch.zeros(len(like), dtype=torch.float32, device=like.device)
        return self._here[slot]

    def agree(self, slots: Iterable[int], parameters: Sequence[Tensor], comm: Comm) -> None:
        """Tell all ranks; every one calls it.

        Args:
            slots: the parameters of which all gradients were sparse, on any rank.
            parameters: all.

        Raises:
            PeerError: a rank went away.
        """
        self.agreed = {slot: self._of(slot, parameters[slot]) for slot in slots}
        self._here = {}
        for work in [comm.all_reduce(rows) for rows in self.agreed.values()]:
            work.wait()

    def forget(self) -> None:
        """The step is over."""
        self._here, self.agreed = {}, {}


def with_rows(total: Tensor, had: Tensor | None) -> Tensor:
    """A sum as a sparse tensor: with the rows that a rank had, and those that are not zero."""
    there = _filled(total)
    if had is not None:
        there |= had.to(total.device) > 0
    rows = there.nonzero().T
    return torch.sparse_coo_tensor(
        rows, total[there], total.shape, is_coalesced=True, check_invariants=False
    )


def _filled(values: Tensor) -> Tensor:
    """[rows] bool: not all of a row is zero."""
    return values.unsqueeze(-1).flatten(1).ne(0).any(1)
