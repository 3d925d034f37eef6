"""A quarter of the bytes: 8 bits for each value, in 255 levels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.comm.codecs.blocks import Levels
from instep.comm.codecs.kernels import add_bytes, draw_bytes, encode_bytes


class Int8(Levels):
    """A level in each byte. A value is off by at most 1/254 of the largest of its block."""

    bits = 8

    def pack(self, levels: Tensor) -> Tensor:
        """As signed bytes."""
        return levels.to(torch.int8).view(torch.uint8)

    def levels(self, packed: Tensor, count: int) -> Tensor:
        """From signed bytes."""
        return packed.view(torch.int8).float()

    def _encode_here(self, values: Any, scales: Any, packed: Any, left: Any, key: int) -> None:
        given = values, values.view("int32"), self.block, self.top, self.largest
        if self.unbiased:
            draw_bytes(*given, scales, packed.view("int8"), left, *self._halves(key))
        else:
            encode_bytes(*given, scales, packed.view("int8"), left)

    def _add_here(self, total: Any, packed: Any, scales: Any, weight: float) -> None:
        add_bytes(total, packed.view("int8"), scales, self.block, weight)
