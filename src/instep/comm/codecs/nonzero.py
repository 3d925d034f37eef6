"""Exactly the values that are not zero, and their places: for gradients that are sparse by nature.

The payload is how many there are, then the values in float32, then their places (`places.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from instep.comm.codecs.places import bytes_of, packed, unpacked
from instep.comm.codecs.sparse_kernels import pack_places, read_places

_HEAD = 8


class NonZero:
    """Nothing is left out; how many bytes it takes depends on the values."""

    linear = False
    segmentable = True
    unbiased = True
    fixed_size = False
    exact = True

    def size(self, count: int) -> int:
        """If none is zero."""
        return _HEAD + 4 * count + sum(bytes_of(count, count, 0)) if count else 0

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Find them."""
        if left is not None:
            left.zero_()
        if not len(values):
            return 0
        places = values.nonzero().flatten()
        count = len(places)
        out[:_HEAD].view(torch.int64).fill_(count)
        sent, room = _parts(out, count, len(values))
        sent.copy_(values[places])
        low = _low(count, len(values))
        if count and out.device.type == "cpu":
            pack_places(places.numpy(), low, bytes_of(count, len(values), low)[0], room.numpy())
        elif count:
            room.copy_(packed(places.unsqueeze(0), len(values), low).flatten())
        return _HEAD + 4 * count + len(room)

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add each in its place."""
        count = int(payload[:_HEAD].view(torch.int64)) if len(total) else 0
        if not count:
            return
        sent, room = _parts(payload, count, len(total))
        low = _low(count, len(total))
        if total.device.type == "cpu":
            places = torch.empty(count, dtype=torch.int64)
            edge = bytes_of(count, len(total), low)[0]
            read_places(room.numpy(), low, edge, places.numpy())
        else:
            places = unpacked(room.unsqueeze(0), count, low)[0]
        total.index_add_(0, places, sent, alpha=weight)


def _low(count: int, width: int) -> int:
    """How many bits of a place are stored as they are."""
    return (width // count).bit_length() - 1 if count else 0


def _parts(payload: Tensor, count: int, width: int) -> tuple[Tensor, Tensor]:
    """Values [count] float32 and places [bytes] uint8, as views."""
    edge = _HEAD + 4 * count
    stop = edge + sum(bytes_of(count, width, _low(count, width)))
    return payload[_HEAD:edge].view(torch.float32), payload[edge:stop]
