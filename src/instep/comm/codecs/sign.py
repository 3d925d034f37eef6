"""A thirtieth of the bytes: the sign of each value, and the mean magnitude of its block.

As in EF-signSGD (Karimireddy et al. 2019, arXiv:1901.09847), by blocks. A block of zeros is sent as
zeros; a single zero is sent as the mean, and what is left makes up for it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from instep.comm.codecs.blocks import Blocks
from instep.comm.codecs.kernels import SMALLEST, add_signs, encode_signs


class Sign(Blocks):
    """Eight signs in each byte, the first one in the lowest bit."""

    bits = 1

    def coded(self, rows: Tensor, key: int = 0, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The signs, with what all values of a block have on average."""
        scales = rows.abs().mean(1, keepdim=True, dtype=torch.float64)
        scales = scales.masked_fill_(scales < SMALLEST, 0.0).float()
        broken = scales.isfinite().logical_not_()
        scales.masked_fill_(broken, torch.nan)
        negative = rows < 0
        left = torch.where(negative, rows + scales, rows - scales).masked_fill_(broken, 0.0)
        return scales, _packed(negative.masked_fill(broken, False).flatten()), left

    def levels(self, packed: Tensor, count: int) -> Tensor:
        """1 and -1."""
        negative = (packed.unsqueeze(1) >> _places(packed)) & 1
        return 1 - 2 * negative.flatten()[:count].float()

    def _encode_here(self, values: Any, scales: Any, packed: Any, left: Any, key: int) -> None:
        encode_signs(values, self.block, scales, packed, left)

    def _add_here(self, total: Any, packed: Any, scales: Any, weight: float) -> None:
        add_signs(total, packed, scales, self.block, weight)


def _places(like: Tensor) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=like.device)


def _packed(bits: Tensor) -> Tensor:
    eights = pad(bits.to(torch.uint8), (0, -len(bits) % 8)).view(-1, 8)
    return (eights << _places(bits)).sum(1, dtype=torch.uint8)
