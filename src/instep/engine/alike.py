"""Refuses workers that are not alike: other parameters, or datasets of other lengths.

Each check is a few numbers that are compared with those of rank 0. Parameters that machines of
several kinds have rounded differently are those of rank 0 afterwards.
"""

from __future__ import annotations

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
    found = digests(tensors)
    own = torch.tensor([len(named), combined(found) >> 1], device=device)
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
        [[digest >> 1, t.nbytes] for digest, t in zip(found, tensors, strict=True)], device=device
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
    """Replace those that differ somewhere; `told` has digest and bytes of each, [tensors, 2]."""
    first = told.clone()
    comm.broadcast(first)
    mine = (first != told).any(1) & whole
    differing = mine.long()
    comm.all_reduce(differing).wait()
    taken = Taken(0, 0, 0.0)
    for index in differing.nonzero().flatten().tolist():
        name, tensor, differs = names[index], tensors[index], bool(mine[index])
        if differs and first[index, 1] != tensor.nbytes:
            raise RecipeError(
                f"{name!r} takes {tensor.nbytes} bytes on rank {comm.rank}, but "
                f"{int(first[index, 1])} on rank 0: the recipe must build the same model in every "
                "process."
            )
        values = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
        comm.broadcast(values.view(torch.uint8))
        if not differs:
            continue
        apart = part_apart(tensor, values.view(tensor.shape))
        _check_rounding(name, apart, tensor.dtype, comm.rank, exact=exact)
        tensor.copy_(values.view(tensor.shape))
        largest = max(taken.apart, apart)
        taken = Taken(taken.tensors + 1, taken.size_bytes + tensor.nbytes, largest)
    return taken if taken.tensors else None


def part_apart(tensor: Tensor, first: Tensor) -> float:
    """The largest distance of a tensor's values from others, as a part of the largest of these."""
    unequal = tensor != first
    if not unequal.any():
        return 0.0
    far = (tensor[unequal].double() - first[unequal].double()).abs().max()
    return float(far / first.double().abs().max())


def _check_rounding(name: str, apart: float, dtype: torch.dtype, rank: int, *, exact: bool) -> None:
    """Refuse what no rounding explains; and what one does, where bits are to be equal."""
    allowed = max(ROUNDED, 4 * torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0
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
