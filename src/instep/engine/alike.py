"""Refuses workers that are not alike: other parameters, or datasets of other lengths.

Each check is a few numbers that are compared with those of rank 0.
"""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.errors import RecipeError
from instep.state.boxes import local


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


def check_parameters(model: nn.Module, comm: Comm, *, whole: bool = True) -> None:
    """Compare a checksum of every parameter and buffer with those of the other workers; every
    member calls it, also one that does not have the `whole` of the last commit.
    """
    if comm.size == 1:
        return
    named = list(model.named_parameters()) + list(model.named_buffers())
    device = named[0][1].device
    own = torch.tensor([_checksum(tensor) for _, tensor in named], dtype=torch.float64)
    size = torch.tensor([float(len(named))], dtype=torch.float64, device=device)
    comm.broadcast(size)
    if int(size) != len(named):
        raise RecipeError(
            f"the recipe built {len(named)} parameters and buffers on rank {comm.rank}, but "
            f"{int(size)} on rank 0: it must build the same model in every process."
        )
    first = own.to(device, copy=True)  # on the CPU too: the broadcast overwrites it
    comm.broadcast(first)
    for (name, _), mine, theirs in zip(named, own.tolist(), first.tolist(), strict=True):
        if mine != theirs and whole:
            raise RecipeError(
                f"{name!r} has other values on rank {comm.rank} than on rank 0: the recipe "
                "draws from something that the job's seed does not set (time, process id, "
                "an unseeded generator, the order of a set), or loads a file that is not the same "
                "everywhere."
            )


def _checksum(tensor: Tensor) -> float:
    plain = local(tensor.detach()).to("cpu").contiguous().reshape(-1)
    return float(zlib.crc32(plain.view(torch.uint8).numpy().data)) if plain.numel() else 0.0
