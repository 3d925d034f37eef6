"""The few values of the largest magnitudes, and their places: about 17 bits for each of them.

Of every 4,096 values the same number is chosen (as in DeMo: Peng et al. 2024, arXiv:2411.19870), so
a payload has a fixed size. It is, for all chunks: a scale in bfloat16, the chosen values in 8 bits,
and their places (`places.py`). On the CPU compiled loops do the work (`sparse_kernels.py`); the
same in torch's operations is for CUDA, and says what the loops must do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.codecs.base import CUT
from instep.comm.codecs.kernels import SMALLEST
from instep.comm.codecs.places import bytes_of, packed, unpacked
from instep.comm.codecs.sparse_kernels import (
    LARGEST_SCALE,
    MAGNITUDE,
    TOP,
    add_chosen,
    encode_largest,
)
from instep.errors import SpecError


class TopK:
    """The largest of each chunk; of equal magnitudes, the first. What is not sent is left.

    A chunk with a value that is not finite decodes to NaN as a whole.

    Args:
        density: which share of the values is sent, from 1 / 4,096 to 1; of a shorter chunk at
            least one.

    Raises:
        SpecError: it is out of these bounds.
    """

    linear = False
    segmentable = True
    unbiased = False
    fixed_size = True

    def __init__(self, *, density: float = 0.01) -> None:
        number = isinstance(density, (int, float)) and not isinstance(density, bool)
        if not (number and 1 / CUT <= density <= 1):
            raise SpecError(
                f"sync.codec_options.density = {density!r}: needs a number from 1/{CUT} "
                "(0.000245) to 1: which share of the values is sent."
            )
        self.density = density
        self.low = int(math.log2(1 / density))
        """How many bits of a place are stored as they are."""

    def chosen(self, width: int) -> int:
        """Of a chunk of so many values."""
        return min(width, math.ceil(self.density * width))

    def size(self, count: int) -> int:
        """Two bytes for each chunk, one for each chosen value, and the bits of the places."""
        return sum(part.bytes for part in self._parts(count))

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Choose, round, and leave the rest."""
        for part in self._parts(values.numel()):
            out[part.at + part.bytes - 1] = 0  # perhaps nothing else is written there
            scales, levels, places = part.of(out)
            given = values[part.values]
            rest = values.new_empty(0) if left is None else left[part.values]
            if values.device.type == "cpu":
                numbers, room = given.numpy(), places.numpy()
                here = numbers.view("int32"), part.width, part.chosen, self.low
                bits = scales.numpy().view("uint16")
                encode_largest(numbers, *here, bits, levels.numpy(), room, rest.numpy())
                continue
            found = self.coded(given.view(-1, part.width))
            scales.view(torch.bfloat16).copy_(found.scales)
            levels.copy_(found.levels.flatten())
            places.copy_(packed(found.places, part.width, self.low).flatten())
            if left is not None:
                rest.copy_(found.left.flatten())
        return self.size(values.numel())

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add level times scale, where each belongs."""
        for part in self._parts(total.numel()):
            if total.device.type != "cpu":
                self.add_in_torch(part, total, payload, weight)
                continue
            scales, levels, places = (each.numpy() for each in part.of(payload))
            here, bits = (part.width, part.chosen, self.low), scales.view("uint16")
            add_chosen(total[part.values].numpy(), *here, bits, levels, places, weight)

    def add_in_torch(self, part: ChunkPart, total: Tensor, payload: Tensor, weight: float) -> None:
        """The same by torch's operations."""
        scales, levels, places = part.of(payload)
        rows = total[part.values].view(-1, part.width)
        scale = scales.view(torch.bfloat16).float()[:, None]
        where = unpacked(places.view(len(rows), -1), part.chosen, self.low)
        rows.scatter_add_(1, where, (weight * levels.float()).view_as(where) * scale)
        rows.masked_fill_(scale.isnan(), torch.nan)

    def coded(self, rows: Tensor) -> CodedChunks:
        """Of chunks of one width [chunks, width] float32."""
        count = self.chosen(rows.shape[1])
        magnitudes = rows.view(torch.int32) & MAGNITUDE
        order = magnitudes.argsort(dim=1, descending=True, stable=True)[:, :count]
        places = order.sort(1).values
        chosen = rows.gather(1, places)
        broken = chosen.isfinite().logical_not_().any(1, keepdim=True)
        scales = chosen.abs().amax(1, keepdim=True) / TOP
        scales = scales.masked_fill_((scales < SMALLEST) | broken, 1.0)
        raised = (scales.view(torch.int32) + 0xFFFF) & ~0xFFFF  # to bfloat16, upwards
        scales = raised.view(torch.float32).clamp_(max=LARGEST_SCALE)
        levels = torch.round(chosen / scales).clamp_(-TOP, TOP).masked_fill_(broken, 0.0)
        left = rows.scatter(1, places, chosen - levels * scales).masked_fill_(broken, 0.0)
        scales.masked_fill_(broken, torch.nan)
        return CodedChunks(scales.flatten().bfloat16(), levels.to(torch.int8), places, left)

    def _parts(self, count: int) -> Iterator[ChunkPart]:
        """All whole chunks, then a shorter one."""
        whole, rest = divmod(count, CUT)
        at = 0
        for chunks, width, first in ((whole, CUT, 0), (1, rest, whole * CUT)):
            if chunks and width:
                chosen = self.chosen(width)
                place_bytes = sum(bytes_of(chosen, width, self.low))
                part = ChunkPart(first, chunks, width, chosen, place_bytes, at)
                at += part.bytes
                yield part


class CodedChunks(NamedTuple):
    """What is sent of some chunks of one width, and what is left."""

    scales: Tensor
    """[chunks] bfloat16"""
    levels: Tensor
    """[chunks, chosen] int8"""
    places: Tensor
    """[chunks, chosen] int64; they ascend"""
    left: Tensor
    """[chunks, width] float32"""


class ChunkPart(NamedTuple):
    """Chunks of one width: which values they are, and where their bytes lie."""

    first: int
    chunks: int
    width: int
    chosen: int
    place_bytes: int  # of a chunk
    at: int

    @property
    def values(self) -> slice:
        return slice(self.first, self.first + self.chunks * self.width)

    @property
    def bytes(self) -> int:
        used = self.chunks * (2 + self.chosen + self.place_bytes)
        return used + used % 2  # the next part begins with 16-bit numbers

    def of(self, payload: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Scales [chunks] int16, which are bfloat16, levels [chunks * chosen] int8, and places
        [chunks * place_bytes] uint8, as views."""
        one = self.at + 2 * self.chunks
        two = one + self.chunks * self.chosen
        three = two + self.chunks * self.place_bytes
        scales = payload[self.at : one].view(torch.int16)
        return scales, payload[one:two].view(torch.int8), payload[two:three]
