"""What cut layers ask of the other ranks: sums, and copies whose gradients are summed.

Where the sequence is split, a sum leaves each rank its part of it, and a gather comes before the
next layers. Layers are not known here. `alone.py` has two other kinds of links, which need no other
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.comm.torch_work import broken
from instep.errors import RecipeError
from instep.parallel.tensor.plan import Crossing


class Links:
    """Between cut layers and the other ranks; `site` and `group` are names of the plan.

    Args:
        rank: of this process on the tensor axis.
        ranks: on the axis.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.scattered: dict[str, Crossing] = {}
        """By site: sums of which a rank keeps its part of the sequence."""
        self.lengths: dict[str, int] = {}
        """Of the whole sequence, for each stretch, in this pass."""
        self._copied: dict[str, tuple[Tensor, int, Tensor]] = {}
        self._gathered: dict[str, tuple[Tensor, int, Crossing, Tensor]] = {}

    def __deepcopy__(self, memo: Any) -> Links:
        return self

    def part(self, size: int) -> tuple[int, int]:
        """This rank's part [first, stop) of a dimension, as DTensor cuts it."""
        each = -(-size // self.ranks)
        return min(self.rank * each, size), min((self.rank + 1) * each, size)

    def share(self, length: int) -> tuple[int, int]:
        """This rank's part [first, stop) of a sequence; no rank has two more than another."""
        return length * self.rank // self.ranks, length * (self.rank + 1) // self.ranks

    def copy(self, whole: Tensor, group: str) -> Tensor:
        """The input of column layers: itself; its gradient is summed over the ranks.

        Layers of one group that get the same tensor share one sum.
        """
        if not (torch.is_grad_enabled() and whole.requires_grad):
            return whole
        for _, _, at, gathered in self._gathered.values():
            if gathered is whole and at.change == "gather_sum":
                return whole  # its gradient is summed where it was gathered
        last = self._copied.get(group)
        if last is not None and last[0] is whole and last[1] == whole._version:
            return last[2]
        out = self._copy(whole, group)
        self._copied[group] = whole, whole._version, out
        return out

    def copy_parameters(self, wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        """Whole parameters that work on cut activations: themselves; gradients are summed."""
        raise NotImplementedError

    def sum(self, part: Tensor, group: str, site: str) -> Tensor:
        """The sum over the ranks, or this rank's part of it; `part` may be overwritten."""
        self._copied.pop(group, None)
        at = self.scattered.get(site)
        if at is None:
            return self._sum(part, site)
        self._begin(at, part.shape[at.dim])
        return self._sum_split(part, site, at)

    def cross(self, tensor: Tensor, site: str, at: Crossing) -> Tensor:
        """A tensor as it is after a crossing; what is gathered twice in a row is gathered once."""
        if at.change == "split":
            self._begin(at, tensor.shape[at.dim])
            return self._split(tensor, site, at)
        last = self._gathered.get(at.stretch)
        if last is not None and last[0] is tensor and last[1:3] == (tensor._version, at):
            return last[3]
        first, stop = self.share(self.lengths[at.stretch])
        if tensor.shape[at.dim] != stop - first:
            raise RecipeError(
                f"{site} got a part of {tensor.shape[at.dim]} of a sequence of "
                f"{self.lengths[at.stretch]}: set mesh.sequence to false."
            )
        out = self._join(tensor, site, at)
        self._gathered[at.stretch] = tensor, tensor._version, at, out
        return out

    def gather(self, part: Tensor, group: str, site: str, width: int) -> Tensor:
        """The parts of all ranks side by side in the last dimension, `width` in all."""
        self._copied.pop(group, None)
        return self._gather(part, site, width)

    def _begin(self, at: Crossing, length: int) -> None:
        """A whole sequence is about to be split."""
        if length < self.ranks:
            raise RecipeError(
                f"a sequence of {length} cannot be split over {self.ranks} ranks: give longer "
                "ones, or set mesh.sequence to false."
            )
        self.lengths[at.stretch] = length
        self._gathered.pop(at.stretch, None)

    def forget(self) -> None:
        """Keep no tensor of a pass whose forward part is over."""
        self._copied.clear()
        self._gathered.clear()

    def _copy(self, whole: Tensor, group: str) -> Tensor:
        raise NotImplementedError

    def _split(self, whole: Tensor, site: str, at: Crossing) -> Tensor:
        raise NotImplementedError

    def _join(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        raise NotImplementedError

    def _sum_split(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        raise NotImplementedError

    def _sum(self, part: Tensor, site: str) -> Tensor:
        raise NotImplementedError

    def _gather(self, part: Tensor, site: str, width: int) -> Tensor:
        raise NotImplementedError


class GroupLinks(Links):
    """Links over a process group.

    Args:
        group: the processes of the tensor axis.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(dist.get_rank(group), dist.get_world_size(group))
        self._group: Any = group
        self._gloo = dist.get_backend(group) == "gloo"

    def copy_parameters(self, wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        made: Any = _CopyAll.apply(self, *wholes)  # type: ignore[no-untyped-call]
        return tuple(made)

    def _copy(self, whole: Tensor, group: str) -> Tensor:
        return _call(_Copy, whole, self)

    def _sum(self, part: Tensor, site: str) -> Tensor:
        return _call(_GroupSum, part, self)

    def _gather(self, part: Tensor, site: str, width: int) -> Tensor:
        return _call(_Gather, part, self, width)

    def _split(self, whole: Tensor, site: str, at: Crossing) -> Tensor:
        return _call(_Split, whole, self, at.dim)

    def _join(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        length = self.lengths[at.stretch]
        return _call(_Join, part, self, at.dim, length, at.change == "gather_sum")

    def _sum_split(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        return _call(_SumSplit, part, self, at.dim)

    def shares(self, length: int) -> list[int]:
        """How much of a sequence each rank has."""
        places = [Links(rank, self.ranks).share(length) for rank in range(self.ranks)]
        return [stop - first for first, stop in places]

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place where it can be."""
        values = values.contiguous()
        if values.numel():
            with _lost():
                dist.all_reduce(values, group=self._group)
        return values

    def all_gather(self, part: Tensor, dim: int, sizes: list[int]) -> Tensor:
        """The parts of all ranks one after the other in a dimension.

        Args:
            dim: counted from the last.
            sizes: of each rank's part.
        """
        missing = max(sizes) - part.shape[dim]
        if missing:
            part = torch.nn.functional.pad(part, (0, 0) * (-1 - dim) + (0, missing))
        part = part.contiguous()
        padded = part.new_empty(self.ranks, *part.shape)
        if part.numel():
            with _lost():
                self._group._allgather_base(padded.view(-1), part.view(-1)).wait()
        parts = [each.narrow(dim, 0, size) for each, size in zip(padded, sizes, strict=True)]
        return torch.cat(parts, dim)

    def reduce_scatter(self, values: Tensor, dim: int) -> Tensor:
        """This rank's part, in a dimension, of the sum over the ranks."""
        length = values.shape[dim]
        parts = [each.detach() for each in torch.split(values, self.shares(length), dim)]
        mine: Tensor = parts[self.rank]
        if not self._gloo and length % self.ranks == 0:
            made = torch.empty_like(mine, memory_format=torch.contiguous_format)
            with _lost():
                stacked = torch.stack(parts).view(-1)
                self._group._reduce_scatter_base(made.view(-1), stacked).wait()
            return made
        # gloo's own sends as much as an all-reduce
        made = mine.clone(memory_format=torch.contiguous_format)
        parts[self.rank] = mine.narrow(dim, 0, 0)
        sent = torch.cat([part.reshape(-1) for part in parts])
        wanted = [0 if rank == self.rank else made.numel() for rank in range(self.ranks)]
        others = made.new_empty(self.ranks - 1, *made.shape)
        sizes = [part.numel() for part in parts]
        with _lost():
            dist.all_to_all_single(others.view(-1), sent, wanted, sizes, group=self._group)
        for other in others:
            made += other
        return made


@contextmanager
def _lost() -> Iterator[None]:
    """PeerError where a collective fails: a rank was lost."""
    try:
        yield
    except RuntimeError as error:
        raise broken(error) from error


def _call(function: Any, *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, links: GroupLinks) -> Tensor:
        ctx.links = links
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.links.all_reduce(grad.clone(memory_format=torch.contiguous_format)), None


class _CopyAll(torch.autograd.Function):
    """Copies whose gradients are summed together, when the last has come."""

    @staticmethod
    def forward(ctx: Any, links: GroupLinks, *wholes: Tensor) -> Any:
        ctx.links = links
        return tuple(whole.view_as(whole) for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        total = ctx.links.all_reduce(torch.cat([grad.reshape(-1) for grad in grads]))
        sums = total.split([grad.numel() for grad in grads])
        return None, *(
            each.view_as(grad).to(grad.dtype) for each, grad in zip(sums, grads, strict=True)
        )


class _GroupSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, links: GroupLinks) -> Tensor:
        made = links.all_reduce(part.detach())  # fresh from a product that does not keep it
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, links: GroupLinks, width: int) -> Tensor:
        ctx.place = links.part(width)
        places = [Links(rank, links.ranks).part(width) for rank in range(links.ranks)]
        return links.all_gather(part, -1, [stop - first for first, stop in places])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, stop = ctx.place
        return grad.narrow(-1, first, stop - first), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, links: GroupLinks, dim: int) -> Tensor:
        ctx.links, ctx.dim, ctx.size = links, dim, whole.shape[dim]
        first, stop = links.share(ctx.size)
        return whole.narrow(dim, first, stop - first).clone()  # draws go in the order of memory

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.links.all_gather(grad, ctx.dim, ctx.links.shares(ctx.size)), None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, part: Tensor, links: GroupLinks, dim: int, size: int, summed: bool
    ) -> Tensor:
        ctx.links, ctx.dim, ctx.size, ctx.summed = links, dim, size, summed
        return links.all_gather(part, dim, links.shares(size))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.summed:
            mine = ctx.links.reduce_scatter(grad, ctx.dim)
        else:
            first, stop = ctx.links.share(ctx.size)
            mine = grad.narrow(ctx.dim, first, stop - first)
        return mine, None, None, None, None


class _SumSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, links: GroupLinks, dim: int) -> Tensor:
        ctx.links, ctx.dim, ctx.size = links, dim, part.shape[dim]
        return links.reduce_scatter(part, dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.links.all_gather(grad, ctx.dim, ctx.links.shares(ctx.size)), None, None
