"""Which rows sparse gradients have: these, and no others, an optimizer for them moves.

A row may have a gradient of exactly zero, and such an optimizer moves it nevertheless, by what it
remembers of the row. So ranks tell each other which rows they have beside the sum, which travels
dense.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm


class SparseRows:
    """Of the sparse gradients of a step."""

    def __init__(self) -> None:
        self._here: dict[int, Tensor | None] = {}  # by parameter; None for all rows
        self._agreed: dict[int, Tensor] = {}

    def add(self, slot: int, gradient: Tensor) -> None:
        """This rank has a gradient of this parameter."""
        if not gradient.is_sparse:
            self._here[slot] = None
            return
        some = self._here.setdefault(slot, torch.zeros(len(gradient), device=gradient.device))
        if some is not None:
            some[gradient._indices()[0]] = 1.0

    def agree(self, parameters: Sequence[Tensor], marks: Sequence[float], comm: Comm) -> None:
        """Tell all ranks; every one calls it.

        Args:
            parameters: all.
            marks: of each; no whole number where a rank had a sparse gradient.

        Raises:
            PeerError: a rank went away.
        """
        every = {slot: parameters[slot] for slot, mark in enumerate(marks) if mark % 1}
        found = {slot: torch.zeros(len(each), device=each.device) for slot, each in every.items()}
        for slot, rows in found.items():
            here = self._here.get(slot, rows)
            rows.copy_(here) if here is not None else rows.fill_(1.0)
        for work in [comm.all_reduce(rows) for rows in found.values()]:
            work.wait()
        self._agreed, self._here = found, {}

    def of(self, slot: int, total: Tensor) -> Tensor:
        """The sum, with the rows that a rank had, and those in which there is something else."""
        there = total.flatten(1).ne(0).any(1)
        if slot in self._agreed:
            there |= self._agreed[slot] != 0
        rows = there.nonzero().T
        return torch.sparse_coo_tensor(
            rows, total[there], total.shape, is_coalesced=True, check_invariants=False
        )

    def forget(self) -> None:
        """The step is over."""
        self._here, self._agreed = {}, {}
