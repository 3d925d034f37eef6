"""Blocks of values that share a scale: what `int8`, `int4` and `sign` have in common.

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
_WORD = 0xFFFFFFFFFFFFFFFF


class Blocks(ABC):
    """A scale for each block, and `bits` for each value.

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
    scale_type = torch.float32
    """Of the scales in the payload."""

    def __init__(self, *, block: int = 1024) -> None:
        whole = isinstance(block, int) and not isinstance(block, bool)
        if not (whole and _SMALLEST_BLOCK <= block <= CUT and block & (block - 1) == 0):
            raise SpecError(
                f"sync.codec_options.block = {block!r}: needs a power of two from "
                f"{_SMALLEST_BLOCK} to {CUT}: so many values share a scale."
            )
        self.block = block

    def size(self, count: int) -> int:
        """The scales of all blocks, and the bits of all values."""
        return self._scale_bytes(count) + -(-count * self.bits // 8)

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Scale, round, and leave the rest."""
        scales, packed = self._parts(out, values.numel())
        if values.device.type == "cpu":
            rest = values.new_empty(0) if left is None else left
            given = values.numpy(), _numbers(scales), packed.numpy(), rest.numpy()
            self._encode_here(*given, key)
        else:
            for piece, blocks, places in self._pieces(values.numel()):
                scale, levels, rest = self.coded(self._rows(values[piece]), key, piece.start)
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
            self._add_here(total.numpy(), packed.numpy(), _numbers(scales), weight)
        else:
            for piece, blocks, places in self._pieces(total.numel()):
                rows = self._rows(total[piece])
                levels = self.levels(packed[places], rows.numel()).view_as(rows)
                rows += (weight * levels) * scales[blocks].unsqueeze(1)

    @abstractmethod
    def coded(self, rows: Tensor, key: int = 0, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """Of whole blocks: the scales [blocks, 1], the packed levels [bytes], and what is left.

        Args:
            rows: [blocks, width] float32.
            key: as for `encode`.
            first: where among the values of the payload they begin.
        """

    @abstractmethod
    def levels(self, packed: Tensor, count: int) -> Tensor:
        """So many levels from their bytes: [count] float32."""

    @abstractmethod
    def _encode_here(self, values: Any, scales: Any, packed: Any, left: Any, key: int) -> None:
        """By a compiled loop."""

    @abstractmethod
    def _add_here(self, total: Any, packed: Any, scales: Any, weight: float) -> None:
        """By a compiled loop."""

    def _blocks(self, count: int) -> int:
        return -(-count // self.block)

    def _scale_bytes(self, count: int) -> int:
        return self.scale_type.itemsize * self._blocks(count)

    def _parts(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Scales [blocks] and packed levels [bytes], as views."""
        middle = self._scale_bytes(count)
        return payload[:middle].view(self.scale_type), payload[middle : self.size(count)]

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

    Values are rounded to the nearest level, and what is left is at most half the distance of two;
    or at random to one of the two beside it, so that the mean over all keys is the value. A
    block without a value of `top` times 1.2e-38 or more is sent as zeros, because its scale would
    lose precision.

    Args:
        block: how many values share a scale; a power of two.
        rounding: `nearest` or `random`.
        seed: another one draws other numbers.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(self, *, block: int = 1024, rounding: str = "nearest", seed: int = 0) -> None:
        super().__init__(block=block)
        if rounding not in ("nearest", "random"):
            raise SpecError(
                f"sync.codec_options.rounding = {rounding!r}: needs to be 'nearest' or 'random'."
            )
        self.unbiased, self._seed = rounding == "random", seed

    @property
    def top(self) -> int:
        """The largest level."""
        return (1 << (self.bits - 1)) - 1

    @cached_property
    def largest(self) -> float:
        """A larger scale, times `top`, would be infinite."""
        most = torch.tensor(torch.finfo(torch.float32).max / self.top, dtype=torch.float32)
        return float(torch.nextafter(most, torch.zeros_like(most)))

    def coded(self, rows: Tensor, key: int = 0, first: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        """The levels nearest to the values, or beside them."""
        scales = rows.abs().amax(1, keepdim=True) / self.top
        broken = scales.isfinite().logical_not_()
        scales = self.sent(scales.masked_fill_(scales < SMALLEST, 1.0)).clamp_(max=self.largest)
        scales.masked_fill_(broken, torch.nan)
        levels = rows / scales
        if self.unbiased:
            levels += _drawn(rows, first, *self._halves(key))
            levels.floor_().clamp_(-self.top, self.top)
        levels = levels.round_().masked_fill_(broken, 0.0)
        left = (rows - levels * scales).masked_fill_(broken, 0.0)
        return scales, self.pack(levels.flatten()), left

    def sent(self, scales: Tensor) -> Tensor:
        """The smallest scales that can be sent and are not below these: [...] float32."""
        return scales

    def _halves(self, key: int) -> tuple[int, int]:
        """32 bits each of key and seed, mixed (the finalizer of SplitMix64)."""
        x = (key + 0x9E3779B97F4A7C15 * (self._seed + 1)) & _WORD
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & _WORD
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & _WORD
        x ^= x >> 31
        return x & 0xFFFFFFFF, x >> 32

    @abstractmethod
    def pack(self, levels: Tensor) -> Tensor:
        """The bytes of whole numbers from -`top` to `top`: [bytes] uint8."""


def _numbers(scales: Tensor) -> Any:
    """Seen as what loops take: those of bfloat16 as their bits."""
    return (scales.view(torch.uint16) if scales.dtype == torch.bfloat16 else scales).numpy()


def _drawn(rows: Tensor, first: int, low: int, high: int) -> Tensor:
    """A number above 0 and below 1 for each value: what `kernels._rounded` draws."""
    x = torch.arange(first, first + rows.numel(), device=rows.device).view_as(rows) ^ low
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15) ^ high) * 0x846CA68B & 0xFFFFFFFF
    return ((x >> 16).float() + 0.5) * 2.0**-16
