"""Refuses workers that are not alike: other parameters, or datasets of other lengths.

Each check is a few numbers that are compared with those of rank 0. Parameters that machines of
several kinds have rounded differently are those of rank 0 afterwards.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.errors import RecipeError, SpecError
from instep.state.boxes import local
from instep.state.digest import combined, digests

ROUNDED = 1e-4
"""Part of a tensor's largest value by which rounding moves its values at most, or four units in the
last place of its type: a few such units for a random draw, more for a factorization."""

_ROUNDED_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_lengths(comm: Comm, device: torch.device, **lengths: int) -> None:
    """Refuse datasets that are not the same in every worker, before the first step.

    Raises:
        RecipeError: a length differs from rank 0's.
    """
    own = torch.tensor(list(lengths.values()), dtype=torch.float64, device=device)
    first = own.clone()
    comm.broadcast(first)
    for name, mine, theirs in zip(lengths, own.tolist(), first.tolist(), strict=True):
        if mine != theirs:
            raise RecipeError(
                f"Recipe.{name} has {mine:.0f} samples on rank {comm.rank}, but {theirs:.0f} on "
                "rank 0: the recipe must give the same datasets in every process."
            )


def check_shards(comm: Comm, device: torch.device, digest: int) -> None:
    """Refuse a training set that stands in other shards than on rank 0, by a digest of them.

    Raises:
        RecipeError: it does.
    """
    if not _as_on_first(comm, device, digest):
        raise RecipeError(
            f"rank {comm.rank} has the training set in other shards or parts than rank 0, so its "
            "order is another: shard_sizes, and the length of a stream, must be the same in every "
            "process."
        )


def check_samples(comm: Comm, device: torch.device, digest: int) -> None:
    """Refuse lengths of samples that are not those of rank 0, by a digest of them.

    Raises:
        RecipeError: they are not.
    """
    if not _as_on_first(comm, device, digest):
        raise RecipeError(
            f"rank {comm.rank} has samples of other lengths than rank 0, so its batches are "
            "others: the recipe must give the same lengths in every process."
        )


def check_division(comm: Comm, device: torch.device, digest: int) -> None:
    """Refuse data that are divided otherwise than on rank 0, by a digest of who has what.

    Raises:
        RecipeError: they are.
    """
    if not _as_on_first(comm, device, digest):
        raise RecipeError(
            f"rank {comm.rank} divides the data among participants otherwise than rank 0: the "
            "recipe must give the same owners and labels in every process."
        )


def _as_on_first(comm: Comm, device: torch.device, digest: int) -> bool:
    first = torch.tensor([float(digest)], dtype=torch.float64, device=device)
    comm.broadcast(first)
    return float(first) == digest


class Taken(NamedTuple):
    """Tensors that a rank has taken from rank 0."""

    tensors: int
    size_bytes: int
    apart: float
    """The largest distance between two values of a tensor, as a part of its largest value."""


@torch.no_grad()
def align_parameters(
    model: nn.Module, comm: Comm, *, whole: bool = True, exact: bool = False
) -> Taken | None:
    """Take the parameters and buffers of rank 0, where machines of several kinds have rounded them
    differently. Nothing is sent where all are equal; every member calls it.

    Args:
        model: of this rank; what differs is replaced.
        comm: the members.
        whole: whether this one has all of the last commit; else it keeps what it has.
        exact: whether the job wants equal bits, which such machines do not compute.

    Returns:
        What this rank has taken; None for nothing.

    Raises:
        RecipeError: the ranks have built other models, or values that no rounding explains.
        SpecError: values are rounded differently, and are to be `exact`.
        PeerError: a member went away meanwhile.
    """
    if comm.size == 1:
        return None
    named = [*model.named_parameters(), *model.named_buffers()]
    device = named[0][1].device
    tensors = [local(tensor.detach()) for _, tensor in named]
    found, kinds = digests(tensors), [_kind(tensor) for tensor in tensors]
    own = torch.tensor([len(named), combined([*found, *kinds]) >> 1], device=device)
    first = own.clone()
    comm.broadcast(first)
    if int(first[0]) != len(named):
        raise RecipeError(
            f"the recipe built {len(named)} parameters and buffers on rank {comm.rank}, but "
            f"{int(first[0])} on rank 0: it must build the same model in every process."
        )
    differing = (first != own).any().long().reshape(1) * int(whole)
    comm.all_reduce(differing).wait()
    if not int(differing):
        return None
    told = torch.tensor(
        [
            [digest >> 1, kind, _size_bytes(tensor)]
            for digest, kind, tensor in zip(found, kinds, tensors, strict=True)
        ],
        device=device,
    )
    return _take([name for name, _ in named], tensors, told, comm, whole=whole, exact=exact)


def _take(
    names: Sequence[str],
    tensors: Sequence[Tensor],
    told: Tensor,
    comm: Comm,
    *,
    whole: bool,
    exact: bool,
) -> Taken | None:
    """Replace those that differ somewhere.

    `told` has digest, kind and bytes of each, [tensors, 3].
    """
    first = told.clone()
    comm.broadcast(first)
    mine = (first != told).any(1) & whole
    differing = mine.long()
    comm.all_reduce(differing).wait()
    taken = Taken(0, 0, 0.0)
    for index in differing.nonzero().flatten().tolist():
        name, tensor, differs = names[index], tensors[index], bool(mine[index])
        if differs:
            _check_kind(name, tensor, told[index].tolist(), first[index].tolist(), comm.rank)
        if tensor.layout != torch.strided:  # no machine computes what is sparse
            if differs:
                _check_rounding(name, math.inf, tensor.dtype, comm.rank, exact=exact)
            continue
        values = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
        comm.broadcast(values.reshape(-1).view(torch.uint8))
        if not differs:
            continue
        apart = part_apart(tensor, values)
        _check_rounding(name, apart, tensor.dtype, comm.rank, exact=exact)
        _each_once(tensor).copy_(_each_once(values, like=tensor))
        largest = max(taken.apart, apart)
        taken = Taken(taken.tensors + 1, taken.size_bytes + tensor.nbytes, largest)
    return taken if taken.tensors else None


def _kind(tensor: Tensor) -> int:
    """A checksum of what a tensor's bytes mean."""
    text = f"{[*tensor.shape]} {tensor.dtype} {tensor.layout} {_repeated(tensor)}"
    return zlib.crc32(text.encode())


def _size_bytes(tensor: Tensor) -> int:
    return tensor.nbytes if tensor.layout == torch.strided else 0


def _repeated(tensor: Tensor) -> list[int]:
    """The dimensions along which a tensor is one value, as `expand` makes them."""
    if tensor.layout != torch.strided:
        return []
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return [number for number, (size, stride) in enumerate(sizes) if size > 1 and not stride]


def _each_once(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """A view of a tensor with one of the values that lie in one place, in `like` if given."""
    for dimension in _repeated(tensor if like is None else like):
        tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _check_kind(
    name: str, tensor: Tensor, own: Sequence[int], first: Sequence[int], rank: int
) -> None:
    """Refuse a tensor of another shape or type.

    What this rank and the first one told of it is [digest, kind, bytes].
    """
    if own[1:] == first[1:]:
        return
    here, there = f"takes {own[2]} bytes", f"{first[2]}"
    if own[2] == first[2]:
        here = f"is of shape {[*tensor.shape]} and type {tensor.dtype}".replace("torch.", "")
        there = "of another shape, type or layout"
    raise RecipeError(
        f"{name!r} {here} on rank {rank}, but {there} on rank 0: the recipe must build the same "
        "model in every process."
    )


def part_apart(tensor: Tensor, first: Tensor) -> float:
    """The largest distance of a tensor's values from others, as a part of the largest of these.

    It is infinite where they are not near, but other: values that are not finite, and those of
    types that nothing rounds to (integers, float8, packed ones).

    Args:
        tensor, first: dense, of one shape and type.
    """
    if tensor.dtype.is_complex:
        tensor, first = (torch.view_as_real(each.resolve_conj()) for each in (tensor, first))
    if tensor.dtype not in _ROUNDED_TYPES:
        return 0.0 if digests([tensor]) == digests([first]) else math.inf
    finite = torch.isfinite(first)
    odd, odd_first = tensor[~finite], first[~finite]
    same = (odd == odd_first) | (odd.isnan() & odd_first.isnan())
    values, others = tensor[finite].double(), first[finite].double()
    if not (same.all() and values.isfinite().all()):
        return math.inf
    far = float((values - others).abs().max()) if len(values) else 0.0
    largest = float(others.abs().max()) if len(others) else 0.0
    if not far:
        return 0.0
    return far / largest if largest else math.inf


def _check_rounding(name: str, apart: float, dtype: torch.dtype, rank: int, *, exact: bool) -> None:
    """Refuse what no rounding explains; and what one does, where bits are to be equal."""
    real = dtype.to_real() if dtype.is_complex else dtype
    allowed = max(ROUNDED, 4 * torch.finfo(real).eps) if real in _ROUNDED_TYPES else 0.0
    if not apart <= allowed:
        raise RecipeError(
            f"{name!r} has other values on rank {rank} than on rank 0: the recipe "
            "draws from something that the job's seed does not set (time, process id, "
            "an unseeded generator, the order of a set), or loads a file that is not the same "
            "everywhere."
        )
    if exact:
        raise SpecError(
            f"train.determinism = 'bits': {name!r} has other values on rank {rank} than on rank 0, "
            f"by {apart:.1g} of its largest, so their machines round differently. Use hosts of one "
            "kind, or train.determinism = 'order'."
        )
