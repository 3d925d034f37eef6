"""A quarter of the bytes: 8 bits for each value, and one float32 scale for each block of 256.

A block is cut into 255 even levels, from minus to plus its largest magnitude (Dettmers
et al. 2022, arXiv:2110.02861, use blocks of 2,048 with uneven levels). Values are rounded to the
nearest level, so the rest must be carried over (error feedback). It is at most half a level,
1/254 of the largest magnitude of the block.

The payload is the scales, then the levels. A block with a value that is not finite has a scale of
NaN, and decodes to NaN as a whole. A block without a value of 1.5e-36 or more is sent as zeros,
because its scale would lose precision.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK = 256
LEVELS = 127

_SMALLEST = torch.finfo(torch.float32).tiny
"""Scales below it have lost bits of their precision, and may be flushed to zero."""

_LARGEST = float(
    torch.nextafter(torch.tensor(torch.finfo(torch.float32).max / LEVELS), torch.tensor(0.0))
)
"""A larger scale, times 127, would be infinite."""

_CHUNK = 1 << 17
"""Values that are coded at a time on the CPU, so that they stay in its cache between the passes."""


class Int8:
    """Blocks of 8-bit integers with a scale; deterministic."""

    linear = False
    segmentable = True
    unbiased = False
    fixed_size = True

    def size(self, count: int) -> int:
        """One byte for each value, four for each block."""
        return 4 * _blocks(count) + count

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Scale, round, and leave the rest."""
        scales, levels = _halves(out, values.numel())
        for piece, blocks in _pieces(values):
            rows, scale = _rows(values[piece]), scales[blocks].unsqueeze(1)
            rest = torch.empty_like(rows) if left is None else _rows(left[piece])
            _encode(rows, scale, _rows(levels[piece]), rest, leave=left is not None)
        return self.size(values.numel())

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add level times scale."""
        scales, levels = _halves(payload, total.numel())
        for piece, blocks in _pieces(total):
            scale = scales[blocks].unsqueeze(1)
            _rows(total[piece]).addcmul_(_rows(levels[piece]), scale, value=weight)


def _encode(values: Tensor, scales: Tensor, levels: Tensor, rest: Tensor, *, leave: bool) -> None:
    """[blocks, width], and scales [blocks, 1]. `rest` is room to compute in, first of all."""
    torch.amax(torch.abs(values, out=rest), 1, keepdim=True, out=scales)
    scales.div_(LEVELS)
    broken = scales.isfinite().logical_not_()
    scales.masked_fill_(scales < _SMALLEST, 1.0).clamp_(max=_LARGEST)
    torch.div(values, scales, out=rest).round_()
    any_broken = bool(broken.any())
    if any_broken:
        scales.masked_fill_(broken, torch.nan)
        rest.masked_fill_(broken, 0.0)
    levels.copy_(rest)
    if leave:
        torch.addcmul(values, rest, scales, value=-1.0, out=rest)
        if any_broken:
            rest.masked_fill_(broken, 0.0)


def _blocks(count: int) -> int:
    return -(-count // BLOCK)


def _halves(payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Scales [blocks] and levels [count], as views."""
    middle = 4 * _blocks(count)
    scales, levels = payload[:middle], payload[middle : middle + count]
    return scales.view(torch.float32), levels.view(torch.int8)


def _pieces(flat: Tensor) -> Iterator[tuple[slice, slice]]:
    """Which values to code at a time, and their blocks: whole ones, then a shorter."""
    count = flat.numel()
    whole = count // BLOCK * BLOCK
    step = _CHUNK if flat.device.type == "cpu" else max(whole, 1)
    for first in range(0, whole, step):
        stop = min(first + step, whole)
        yield slice(first, stop), slice(first // BLOCK, stop // BLOCK)
    if whole < count:
        yield slice(whole, count), slice(whole // BLOCK, None)


def _rows(piece: Tensor) -> Tensor:
    return piece.view(-1, min(BLOCK, piece.numel()))
