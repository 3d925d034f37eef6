"""Where chosen values lie, packed by Elias and Fano: near their entropy, in a size that is known.

Places ascend. Of each, the `low` lowest bits are stored as they are; of all of them, the rest in
unary: a 1 for each place, after as many 0 as its rest is larger than that of the one before. With
about 2^low values from one place to the next this takes `low` + 2 bits a place, at most. Here
in torch's operations; `sparse_kernels.py` does the same on the CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def bytes_of(count: int, width: int, low: int) -> tuple[int, int]:
    """Of `count` places below `width`: for the low bits, and for the rest."""
    if not count:
        return 0, 0
    return -(-count * low // 8), -(-(count + ((width - 1) >> low)) // 8)


def packed(places: Tensor, width: int, low: int) -> Tensor:
    """Of places [rows, count] int64 below `width`: [rows, bytes] uint8."""
    rows, count = places.shape
    bits = (places.unsqueeze(2) >> _range(low, places)) & 1
    rest = places.new_zeros(rows, count + ((width - 1) >> low))
    rest.scatter_(1, (places >> low) + _range(count, places), 1)
    return torch.cat([_to_bytes(bits.view(rows, -1)), _to_bytes(rest)], 1)


def unpacked(packed: Tensor, count: int, low: int) -> Tensor:
    """So many places [rows, count] int64, from [rows, bytes] uint8."""
    edge = -(-count * low // 8)
    bits = _from_bytes(packed[:, :edge])[:, : count * low].view(len(packed), count, -1)
    ones = _from_bytes(packed[:, edge:]).nonzero()[:, 1].view(len(packed), count)
    return ((ones - _range(count, packed)) << low) + (bits << _range(low, packed)).sum(2)


def _range(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _to_bytes(bits: Tensor) -> Tensor:
    """[rows, bits] to [rows, bytes] uint8, the first bit lowest."""
    eights = pad(bits, (0, -bits.shape[1] % 8)).view(len(bits), -1, 8)
    return (eights << _range(8, bits)).sum(2).to(torch.uint8)


def _from_bytes(packed: Tensor) -> Tensor:
    """[rows, bytes] uint8 to [rows, 8 * bytes] int64 of 0 and 1."""
    return ((packed.long().unsqueeze(2) >> _range(8, packed)) & 1).flatten(1)
