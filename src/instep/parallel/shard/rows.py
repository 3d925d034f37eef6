"""Rows of a stage's parameters on each rank of an axis; whole only while a micro-batch passes.

FSDP2 gathers a block when it runs and frees it again. In a pipeline a block runs once for each part
of a micro-batch, and parts go forward and back in turn. So here all that a rank has of the model
is gathered once for the whole micro-batch, and its gradients are summed once after it (ZeRO 2).

Which rows a rank has is as FSDP2 has it: `torch.chunk` along the first dim, of what a tensor plan
has left. Stages and steps are not known here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from instep.comm.direct import SumOfParts, all_gather, wait
from instep.comm.dtensors import is_split, local_part, split_like
from instep.parallel.shard.shardable import unshardable
from instep.parallel.shard.whole_sums import sum_gradients


class ShardedRows:
    """Shares out what this rank has of a model, in place: parameters become DTensors, same names.

    Parameters without dimensions and those of sparse gradients stay whole on every rank.

    Args:
        model: its parameters are the same on all ranks of the axis; some may be cut along
            `tensor`.
        mesh: has the axis `shard`, and `tensor` where parameters are cut along it.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._group = mesh["shard"].get_group()
        self._ranks, self._rank = self._group.size(), self._group.rank()
        places = [
            (module, key, parameter)
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        stay = unshardable(model, {})
        rows = {p: p if p in stay else self._row(p, mesh) for p in model.parameters()}
        self._whole = {rows[p]: _like(p) for p in rows if p not in stay}
        self._stay = [p for p in rows if p in stay]
        self._places = [(module, key, rows[p]) for module, key, p in places if p not in stay]
        kinds = dict.fromkeys((row.dtype, row.requires_grad) for row in self._whole)
        self._flats = [
            _Flat(
                {r: w for r, w in self._whole.items() if (r.dtype, r.requires_grad) == kind},
                self._ranks,
            )
            for kind in kinds
        ]
        self._free()

    def _row(self, whole: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
        local = local_part(whole).detach()
        each = -(-len(local) // self._ranks)
        part = local[min(self._rank * each, len(local)) : (self._rank + 1) * each].clone()
        placements: list[Placement] = [Shard(0)]
        over = mesh["shard"]
        if is_split(whole):
            (cut,) = whole.placements
            assert isinstance(cut, Shard | Replicate), "a tensor plan cuts or leaves"
            over = mesh["shard", "tensor"]
            if cut.is_shard(0):
                placements = [_StridedShard(0, split_factor=over.size(1))]
            placements.append(cut)
        made = DTensor.from_local(
            part, over, placements, run_check=False, shape=whole.shape, stride=whole.stride()
        )
        return nn.Parameter(made, requires_grad=whole.requires_grad)

    def _put(self, rows: dict[nn.Parameter, nn.Parameter]) -> None:
        for module, key, row in self._places:
            module._parameters[key] = rows[row]

    @torch.no_grad()
    def _free(self) -> None:
        """Have the model keep its rows alone."""
        self._put({row: row for row in self._whole})
        for whole in self._whole.values():
            local_part(whole).untyped_storage().resize_(0)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """In this context the model has its parameters whole; all ranks enter it together.

        Raises:
            PeerError: a rank was lost.
        """
        with torch.no_grad():
            for flat in self._flats:
                flat.gather(self._group, [local_part(self._whole[row]) for row in flat.rows])
        self._put(self._whole)
        try:
            yield
        finally:
            self._free()

    @torch.no_grad()
    def sum_gradients(self, *, counts: bool) -> dict[nn.Parameter, Tensor]:
        """The sums of the gradients of what was gathered, in rank order; all ranks call it.

        Args:
            counts: whether this rank's count.

        Returns:
            For each parameter of the model that has one on any rank, this rank's rows of it, or all
            of it where it stays whole.
        """
        flats = [flat for flat in self._flats if flat.rows[0].requires_grad]
        rows = [row for flat in flats for row in flat.rows]
        grads = {row: _taken(self._whole[row]) for row in rows}
        for parameter in self._stay if not counts else ():
            parameter.grad = None
        used = iter(self._used([*grads.values(), *(p.grad for p in self._stay)], counts=counts))
        found = dict[nn.Parameter, Tensor]()
        for flat in flats:
            sums = flat.sum(self._group, [grads[row] if counts else None for row in flat.rows])
            found |= {row: total for row, total in zip(flat.rows, sums, strict=True) if next(used)}
        stay = [parameter for parameter in self._stay if next(used)]
        if stay:
            found |= dict(zip(stay, sum_gradients(stay, self._group), strict=True))
        for parameter in self._stay:
            parameter.grad = None
        return found

    def _used(self, grads: list[Tensor | None], *, counts: bool) -> list[bool]:
        """Which gradients any rank has."""
        own = torch.tensor([counts and grad is not None for grad in grads], dtype=torch.int64)
        every = torch.empty(self._ranks * len(own), dtype=torch.int64)
        if len(own):
            wait(all_gather(self._group, every, own))
        return [bool(any_of) for any_of in every.view(self._ranks, -1).sum(0)]


class _Flat:
    """Rows of one type of numbers, as one message of each rank to each other."""

    def __init__(self, wholes: dict[nn.Parameter, nn.Parameter], ranks: int) -> None:
        self.rows, self._ranks = list(wholes), ranks
        self._heights, self._widths, self._shapes = list[int](), list[int](), list[torch.Size]()
        for whole in map(local_part, wholes.values()):
            self._shapes.append(whole.shape)
            self._heights.append(-(-len(whole) // ranks))
            self._widths.append(whole.numel() // max(len(whole), 1))
        self._sizes = [h * w for h, w in zip(self._heights, self._widths, strict=True)]

    def gather(self, group: ProcessGroup, wholes: Iterable[Tensor]) -> None:
        """Fill the whole parameters with the rows of all ranks."""
        own = torch.cat(
            [
                _padded(local_part(row).detach().reshape(-1), size)
                for row, size in zip(self.rows, self._sizes, strict=True)
            ]
        )
        every = own.new_empty(self._ranks, len(own))
        wait(all_gather(group, every.view(-1), own))
        parts = every.split(self._sizes, dim=1)
        for whole, part, shape in zip(wholes, parts, self._shapes, strict=True):
            whole.untyped_storage().resize_(shape.numel() * whole.element_size())
            whole.copy_(part.reshape(-1)[: shape.numel()].view(shape))

    def sum(self, group: ProcessGroup, grads: Iterable[Tensor | None]) -> list[Tensor]:
        """This rank's rows of the sums of what the ranks have of each."""
        first = local_part(self.rows[0])
        sent = first.new_zeros(self._ranks, sum(self._sizes))
        for grad, place in zip(grads, sent.split(self._sizes, dim=1), strict=True):
            if grad is not None:
                flat = _padded(grad.to_dense().reshape(-1), place.numel())
                place.copy_(flat.view(self._ranks, -1))
        parts = SumOfParts(group, sent).end().split(self._sizes)
        return [
            part[: local_part(row).numel()].view(local_part(row).shape)
            for row, part in zip(self.rows, parts, strict=True)
        ]


def _padded(flat: Tensor, size: int) -> Tensor:
    return nn.functional.pad(flat, (0, size - len(flat))) if len(flat) < size else flat


def _taken(whole: nn.Parameter) -> Tensor | None:
    grad, whole.grad = whole.grad, None
    return None if grad is None else local_part(grad)


def _like(whole: nn.Parameter) -> nn.Parameter:
    """Another parameter like it, on memory that can be given back."""
    made = torch.empty_like(local_part(whole), memory_format=torch.contiguous_format)
    of = split_like(whole, made) if is_split(whole) else made
    return nn.Parameter(of, requires_grad=whole.requires_grad)
