"""Many named tensors to a few flat ones, and back.

A bucket is one flat tensor; each of its members has a view of it. Members
are laid out in the reverse of the order they are given in, because gradients
become ready from the last layer to the first, so the first bucket is the first
to fill. It knows nothing of gradients or networks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Bucket:
    """One flat tensor, and whose parts lie where in it."""

    flat: Tensor
    """[elements + spare] of one dtype on one device."""

    members: tuple[int, ...]
    """Indices into the tensors given, in the order they lie in `flat`."""

    views: tuple[Tensor, ...]
    """Of `flat`, shaped like the members."""

    spare: Tensor
    """View of the last elements of `flat` that belong to no member; may be empty."""


def lay_out(
    tensors: Sequence[Tensor],
    limits_bytes: Sequence[int],
    spare: int = 0,
    types: Mapping[torch.dtype, torch.dtype] | None = None,
    holders: Sequence[tuple[int, ...]] = (),
    last: Collection[int] = (),
) -> list[Bucket]:
    """Cut tensors into buckets, last tensor first.

    Args:
        tensors: what has to fit; each keeps its shape, dtype and device.
        limits_bytes: the size at which a bucket is full, for the first, the
            second, ...; the last value holds for all that follow. A tensor
            larger than the limit gets a bucket of its own.
        spare: elements to leave free at the end of the last bucket.
        types: the type in which a type is kept, where that is not itself.
        holders: for each tensor, which processes have one like it. Those of the same several are in
            buckets of their own, the last ones, so that these are alike in all these processes.
        last: indices of tensors that are in buckets of their own, behind all others.

    Returns:
        Buckets in the order in which they fill. Every tensor is a member of
        exactly one; a bucket holds one dtype and one device.
    """
    groups: list[list[int]] = []
    filled = 0
    apart, alike = set(last), holders or [()] * len(tensors)
    order = sorted(
        range(len(tensors)),
        key=lambda index: (index in apart, len(alike[index]), alike[index], -index),
    )
    for index in order:
        tensor = tensors[index]
        limit = limits_bytes[min(len(groups) - 1, len(limits_bytes) - 1)] if groups else 0
        same = bool(groups) and _kind(tensors[groups[-1][0]]) == _kind(tensor)
        same = same and alike[groups[-1][-1]] == alike[index]
        same = same and (groups[-1][-1] in apart) == (index in apart)
        if not same or filled + tensor.nbytes > limit:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += tensor.nbytes
    end = len(groups) - 1
    return [
        _bucket(tensors, group, spare if i == end else 0, types or {})
        for i, group in enumerate(groups)
    ]


def laid_out_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The same values in memory of the order that `other` has, where both have one shape.

    Fused optimizers go through a parameter, its gradient and its state as they lie, whatever
    their strides; `channels_last` models have others than a bucket or a file.
    """
    if tensor.shape != other.shape or tensor.stride() == other.stride() or tensor.is_sparse:
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _kind(tensor: Tensor) -> tuple[torch.dtype, torch.device]:
    return tensor.dtype, tensor.device


def _bucket(
    tensors: Sequence[Tensor],
    members: list[int],
    spare: int,
    types: Mapping[torch.dtype, torch.dtype],
) -> Bucket:
    first = tensors[members[0]]
    total = sum(tensors[m].numel() for m in members)
    dtype = types.get(first.dtype, first.dtype)
    flat = torch.zeros(total + spare, dtype=dtype, device=first.device)
    views, at = [], 0
    for member in members:
        size = tensors[member].numel()
        views.append(flat[at : at + size].view(tensors[member].shape))
        at += size
    return Bucket(flat, tuple(members), tuple(views), flat[total:])
