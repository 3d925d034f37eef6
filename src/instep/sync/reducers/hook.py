"""Sum buckets by a function of the user's: what others call a communication hook.

A codec with a method `reduce` gets this reducer. It is called for one bucket after the other, in
their order, by one thread, so that calls which talk several times cannot wait for each other.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.sync.reducers.residuals import Residuals


class Reduces(Protocol):
    """What a user writes. It may have an attribute `carries`: whether it leaves something for the
    next step; false if left out."""

    def reduce(self, values: Tensor, comm: Comm, *, key: int, left: Tensor | None) -> None:
        """Make `values` their sum over the ranks, with the same bits on every rank.

        Args:
            values: [n] float32, this rank's part of a bucket; weighted, so that the sum over the
                ranks is the mean gradient. What was left before is added already.
            comm: the ranks; every rank makes the same calls.
            key: the number of the commit.
            left: [n] float32, zeros, where it `carries`: what of `values` is not in the sum, and
                is to be added in the next step.
        """


class Hook(Residuals[Reduces]):
    """A `Reducer` that calls `reduce` of its codec."""

    @staticmethod
    def kinds(codec: Reduces) -> tuple[str, ...]:
        """What is left, if it says so."""
        return ("residual",) if getattr(codec, "carries", False) else ()

    def _forget(self) -> None:
        super()._forget()
        self._key = 0

    @torch.no_grad()
    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Keep it: nobody may talk while a pass is under way, but in the order of the buckets."""
        self._taken(number, flat)
        self._key = key

    @torch.no_grad()
    def finish(self) -> None:
        """Call it for each bucket. All ranks have staged what is left before one continues."""
        assert self._is_complete(), "each bucket begins first"
        for number, values in enumerate(self._flats):
            if (left := self._add_left(number, values)) is not None:
                left.zero_()
            self._leave_out(number)
            self._codec.reduce(values, self._comm, key=self._key, left=left)
            self._leave_out(number)
        self._still_carry_residuals()
        self._stage()
        if self._carries:
            self._comm.all_reduce(
                torch.zeros(1, dtype=torch.float32, device=self._slots[0].device)
            ).wait()
