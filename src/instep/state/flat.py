"""Named tensors of any types as one flat tensor of float32 bits, and back.

For what is held and sent as a whole, and never computed with. A header of plain JSON comes first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch
from torch import Tensor

from instep.state.snapshot import DTYPES, TYPES

_ALIGNED = 8  # bytes


def flatten(tensors: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """All of them as [n] float32, in memory of its own.

    Args:
        tensors: dense, on any device.
        device: of the result.
    """
    rows = [[name, DTYPES[each.dtype], list(each.shape)] for name, each in tensors.items()]
    header = json.dumps(rows).encode()
    parts = [
        torch.tensor([len(header)]).view(torch.uint8),
        torch.frombuffer(bytearray(header), dtype=torch.uint8),
        *(each.detach().contiguous().reshape(-1).view(torch.uint8) for each in tensors.values()),
    ]
    flat = torch.zeros(sum(_padded(len(part)) for part in parts), dtype=torch.uint8, device=device)
    at = 0
    for part in parts:
        flat[at : at + len(part)] = part.to(device)
        at += _padded(len(part))
    return flat.view(torch.float32)


def unflatten(flat: Tensor) -> dict[str, Tensor]:
    """What `flatten` was given, as views."""
    whole = flat.view(torch.uint8)
    length, at = int(whole[:_ALIGNED].view(torch.int64)), _ALIGNED
    rows = json.loads(bytes(whole[at : at + length].cpu().numpy()))
    at += _padded(length)
    tensors = {}
    for name, kind, shape in rows:
        size = TYPES[kind].itemsize * torch.Size(shape).numel()
        tensors[name] = whole[at : at + size].view(TYPES[kind]).view(shape)
        at += _padded(size)
    return tensors


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED
