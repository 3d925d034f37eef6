"""Sums of gradients that every rank has whole, in rank order; sparse ones stay sparse.

Few parameters are kept whole (`shardable.py`), so all of them travel together, after the pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from instep.comm.direct import all_gather, wait
from instep.comm.torch_work import in_rank_order

_DENSE = -1


@torch.no_grad()
def sum_gradients(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> list[Tensor]:
    """The sum over the ranks of each parameter's `.grad`; a rank without one adds nothing.

    All ranks call this with the same parameters.

    Returns:
        Sparse where every rank that has a gradient has a sparse one.
    """
    sparse = _sparse_sizes(parameters, group)
    sums: dict[int, Tensor] = {}
    kinds: dict[torch.dtype, list[int]] = {}
    for slot, sizes in enumerate(sparse):
        if sizes is not None:
            sums[slot] = _sum_sparse(parameters[slot], sizes, group)
        else:
            kinds.setdefault(parameters[slot].dtype, []).append(slot)
    for slots in kinds.values():
        flat = torch.cat([_dense(parameters[slot]).reshape(-1) for slot in slots])
        every = flat.new_empty(group.size(), flat.numel())
        wait(all_gather(group, every.view(-1), flat))
        total = in_rank_order(every)
        for slot, part in zip(
            slots, total.split([parameters[slot].numel() for slot in slots]), strict=True
        ):
            sums[slot] = part.view(parameters[slot].shape)
    return [sums[slot] for slot in range(len(parameters))]


def _sparse_sizes(
    parameters: Sequence[nn.Parameter], group: ProcessGroup
) -> list[list[int] | None]:
    """How many rows each rank has of each sparse gradient; None for a dense one."""
    own = []
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            parameter.grad = gradient.coalesce()
            own.append(parameter.grad._nnz())
        else:
            own.append(_DENSE if gradient is not None else 0)
    every = torch.empty(group.size() * len(own), dtype=torch.int64)
    wait(all_gather(group, every, torch.tensor(own)))
    of_each = every.view(group.size(), -1).t().tolist()
    return [None if _DENSE in sizes or not any(sizes) else sizes for sizes in of_each]


def _sum_sparse(parameter: nn.Parameter, sizes: list[int], group: ProcessGroup) -> Tensor:
    """[rows, width] of the rows that any rank has."""
    most, ranks = max(sizes), len(sizes)
    rows = torch.zeros(most, dtype=torch.int64, device=parameter.device)
    values = parameter.new_zeros(most, *parameter.shape[1:])
    gradient = parameter.grad
    if gradient is not None and gradient._nnz():
        rows[: gradient._nnz()] = gradient.indices()[0]
        values[: gradient._nnz()] = gradient.values()
    all_rows, all_values = rows.new_empty(ranks * most), values.new_empty(ranks, *values.shape)
    wait(all_gather(group, all_rows, rows))
    wait(all_gather(group, all_values.view(-1), values.view(-1)))
    kept = list(zip(all_rows.view(ranks, most), all_values, sizes, strict=True))
    indices, places = torch.unique(
        torch.cat([one[:size] for one, _, size in kept]), return_inverse=True
    )
    total = values.new_zeros(len(indices), *parameter.shape[1:])
    begun = 0
    for _, part, size in kept:  # no row twice within a rank's: each addition has one order
        total.index_add_(0, places[begun : begun + size], part[:size])
        begun += size
    summed = torch.sparse_coo_tensor(indices[None], total, parameter.shape)
    return summed._coalesced_(True)


def _dense(parameter: nn.Parameter) -> Tensor:
    gradient = parameter.grad
    if gradient is None:
        return torch.zeros_like(parameter)
    return gradient.to_dense() if gradient.is_sparse else gradient
