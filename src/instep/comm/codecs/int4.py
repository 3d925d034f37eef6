"""An eighth of the bytes: 4 bits for each value, in 15 levels."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from instep.comm.codecs.blocks import Levels
from instep.comm.codecs.kernels import add_halves, draw_halves, encode_halves

_SENT = ~0xFFFF
"""Of the bits of a float32, those that bfloat16 has."""


class Int4(Levels):
    """Two levels in each byte. A value is off by at most 1/14 of the largest of its block,
    and 1/128 of that more.

    Blocks are shorter than with more levels: with 1,024 values, training took more steps. So that
    the scales take no more room, they are sent as bfloat16, rounded up.
    """

    bits = 4
    scale_type = torch.bfloat16

    def __init__(self, *, block: int = 64, rounding: str = "nearest", seed: int = 0) -> None:
        super().__init__(block=block, rounding=rounding, seed=seed)

    @cached_property
    def largest(self) -> float:
        """As of `Levels`, as it can be sent."""
        largest = torch.tensor(super().largest, dtype=torch.float32)
        return float((largest.view(torch.int32) & _SENT).view(torch.float32))

    def sent(self, scales: Tensor) -> Tensor:
        """Rounded up to bfloat16."""
        return ((scales.view(torch.int32) + ~_SENT) & _SENT).view(torch.float32)

    def pack(self, levels: Tensor) -> Tensor:
        """8 more than each level, the first one in the low half."""
        low, high = pad(levels + 8, (0, len(levels) % 2), value=8.0).view(-1, 2).unbind(1)
        return (low + 16 * high).to(torch.uint8)

    def levels(self, packed: Tensor, count: int) -> Tensor:
        """From both halves of each byte."""
        pairs = torch.stack([packed & 15, packed >> 4], 1).flatten()
        return pairs[:count].float() - 8

    def _encode_here(self, values: Any, scales: Any, packed: Any, left: Any, key: int) -> None:
        given = values, values.view("int32"), self.block, self.top, self.largest
        if self.unbiased:
            draw_halves(*given, scales, packed, left, *self._halves(key))
        else:
            encode_halves(*given, scales, packed, left)

    def _add_here(self, total: Any, packed: Any, scales: Any, weight: float) -> None:
        add_halves(total, packed, scales, self.block, weight)
