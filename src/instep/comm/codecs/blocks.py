"""Blocks of values that share a float32 scale: what `int8`, `int4` and `sign` have in common.

The payload is the scales, then the values in a few bits each. A block with a value that is not
finite has a scale of NaN, and decodes to NaN as a whole. On the CPU compiled loops do the work
(`kernels.py`); the same in torch's operations is for CUDA, and says what the loops must do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from instep.comm.codecs.base import CUT
from instep.comm.codecs.kernels import SMALLEST
from instep.errors import SpecError

_SMALLEST_BLOCK = 16


class Blocks(ABC):
    """A scale for each block, and `bits` for each value; deterministic.

    Args:
        block: how many values share a scale; a power of two.

    Raises:
        SpecError: it is none, or too small or too large.
    """

    linear = False
    segmentable = True
    unbiased = False
    fixed_size = True
    bits: int

    def __init__(self, *, block: int = 1024) -> None:
        whole = isinstance(block, int) and not isinstance(block, bool)
        if not (whole and _SMALLEST_BLOCK <= block <= CUT and block & (block - 1) == 0):
            raise SpecError(
                f"sync.codec_options.block = {block!r}: needs a power of two from "
                f"{_SMALLEST_BLOCK} to {CUT}: so many values share a scale."
            )
        self.block = block

    def size(self, count: int) -> int:
        """Four bytes for each block, and the bits of all values."""
        return 4 * self._blocks(count) + -(-count * self.bits // 8)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Scale, round, and leave the rest."""
        scales, packed = self._parts(out, values.numel())
        if values.device.type == "cpu":
            rest = torch.empty(0) if left is None else left
            self._encode_here(values.numpy(), scales.numpy(), packed.numpy(), rest.numpy())
        else:
            for piece, blocks, places in self._pieces(values.numel()):
                scale, levels, rest = self.coded(self._rows(values[piece]))
                scales[blocks].copy_(scale.flatten())
                packed[places].copy_(levels)
                if left is not None:
                    left[piece].copy_(rest.flatten())
        return self.size(values.numel())

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add level times scale."""
        scales, packed = self._parts(payload, total.numel())
        if total.device.type == "cpu":
            self._add_here(total.numpy(), packed.numpy(), scales.numpy(), weight)
        else:
            for piece, blocks, places in self._pieces(total.numel()):
                rows = self._rows(total[piece])
                levels = self.levels(packed[places], rows.numel()).view_as(rows)
                rows += (weight * levels) * scales[blocks].unsqueeze(1)

    @abstractmethod
    def coded(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of whole blocks: the scales [blocks, 1], the packed levels [bytes], and what is left.

        Args:
            rows: [blocks, width] float32.
        """

    @abstractmethod
    def levels(self, packed: Tensor, count: int) -> Tensor:
        """So many levels from their bytes: [count] float32."""

    @abstractmethod
    def _encode_here(self, values: Any, scales: Any, packed: Any, left: Any) -> None:
        """By a compiled loop."""

    @abstractmethod
    def _add_here(self, total: Any, packed: Any, scales: Any, weight: float) -> None:
        """By a compiled loop."""

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _parts(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Scales [blocks] and packed levels [bytes], as views."""
        middle = 4 * self._blocks(count)
        return payload[:middle].view(torch.float32), payload[middle : self.size(count)]

    def _pieces(self, count: int) -> Iterator[tuple[slice, slice, slice]]:
        """Values, their blocks and their bytes: of all whole blocks, then of a shorter one."""
        whole = count // self.block
        edge = whole * self.block
        if whole:
            yield slice(0, edge), slice(0, whole), slice(0, edge * self.bits // 8)
        if edge < count:
            yield slice(edge, count), slice(whole, None), slice(edge * self.bits // 8, None)

    def _rows(self, piece: Tensor) -> Tensor:
        return piece.view(-1, min(self.block, piece.numel()))


class Levels(Blocks):
    """Each block cut into even levels, from minus to plus its largest magnitude (Dettmers et al.
    2022, arXiv:2110.02861, have uneven levels).

    Values are rounded to the nearest level. What is left is at most half the distance of two. A
    block without a value of `top` times 1.2e-38 or more is sent as zeros, because its scale would
    lose precision.
    """

    @property
    def top(self) -> int:
        """The largest level."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def largest(self) -> float:
        """A larger scale, times `top`, would be infinite."""
        most = torch.tensor(torch.finfo(torch.float32).max / self.top)
        return float(torch.nextafter(most, torch.tensor(0.0)))

    def coded(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The levels nearest to the values."""
        scales = rows.abs().amax(1, keepdim=True) / self.top
        broken = scales.isfinite().logical_not_()
        scales = scales.masked_fill_(scales < SMALLEST, 1.0).clamp_(max=self.largest)
        scales.masked_fill_(broken, torch.nan)
        levels = torch.round(rows / scales).masked_fill_(broken, 0.0)
        left = (rows - levels * scales).masked_fill_(broken, 0.0)
        return scales, self.pack(levels.flatten()), left

    @abstractmethod
    def pack(self, levels: Tensor) -> Tensor:
        """The bytes of whole numbers from -`top` to `top`: [bytes] uint8."""
