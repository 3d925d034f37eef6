"""Votes as bytes: whole numbers below a base, as many in each byte as fit.

With base 2 a byte has eight, with base 3 five. Numbers that share a byte are far apart in their
order, so that torch packs and reads whole stretches of them at once.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BYTE = 256


def size(count: int, base: int) -> int:
    """Bytes of so many numbers."""
    return 2 * count if base > _BYTE else -(-count // _per_byte(base))


@torch.no_grad()
def pack(numbers: Tensor, base: int) -> Tensor:
    """The bytes of whole numbers from 0 to below the base, which is from 2 to 32,768.

    Args:
        numbers: [n] of any whole type.
        base: more than the largest.

    Returns:
        [size(n, base)] uint8.
    """
    if base > _BYTE:
        return numbers.to(torch.int16).view(torch.uint8)
    rows = size(len(numbers), base)
    packed = torch.zeros(rows, dtype=torch.uint8, device=numbers.device)
    for part in reversed(numbers.to(torch.uint8).split(rows or 1)):
        packed *= base
        packed[: len(part)] += part
    return packed


@torch.no_grad()
def unpack(packed: Tensor, count: int, base: int) -> Tensor:
    """What `pack` was given: [count] uint8; int16 where the base is above 256."""
    if base > _BYTE:
        return packed.view(torch.int16)
    numbers = torch.empty(count, dtype=torch.uint8, device=packed.device)
    rest = packed.clone()
    for part in numbers.split(len(packed) or 1):
        shift = base.bit_length() - 1
        above = rest >> shift if base == 1 << shift else rest // base
        part.copy_((rest - above * base)[: len(part)])
        rest = above
    return numbers


def _per_byte(base: int) -> int:
    count, room = 0, _BYTE // base
    while room:
        count, room = count + 1, room // base
    return count


def base_of(voters: int, *, ties: bool) -> int:
    """Count the values that the sum of so many votes has; without any that abstains, every other
    one. 0 where nobody votes."""
    return (2 * voters + 1 if ties else voters + 1) if voters else 0


def ballot(counts: Tensor, voters: int, *, ties: bool) -> tuple[Tensor, int]:
    """Turn sums of votes into whole numbers from 0, and their base."""
    numbers = counts + voters
    return (numbers if ties else numbers >> 1), base_of(voters, ties=ties)


def read_votes(numbers: Tensor, voters: int, base: int) -> Tensor:
    """Read the sums that `ballot` was given, [n] int16."""
    wide = numbers.to(torch.int16)
    return (wide if base == 2 * voters + 1 else 2 * wide) - voters


def none(like: Tensor) -> Tensor:
    """Bytes of no ballot, [0] uint8, where another tensor is."""
    return torch.zeros(0, dtype=torch.uint8, device=like.device)
