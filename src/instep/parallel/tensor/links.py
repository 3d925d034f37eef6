"""What cut layers ask of the other ranks: sums, and copies whose gradients are summed.

Layers are not known here. `trial.py` has two other kinds of links that need no other rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from instep.comm.torch_comm import broken


class Links:
    """Between cut layers and the other ranks; `site` and `group` are names of the plan.

    Args:
        rank: of this process on the tensor axis.
        ranks: on the axis.
    """

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._copied: dict[str, tuple[Tensor, int, bool, Tensor]] = {}

    def __deepcopy__(self, memo: Any) -> Links:
        return self

    def part(self, size: int) -> tuple[int, int]:
        """This rank's part [first, stop) of a dimension, as DTensor cuts it."""
        each = -(-size // self.ranks)
        return min(self.rank * each, size), min((self.rank + 1) * each, size)

    def copy(self, whole: Tensor, group: str) -> Tensor:
        """The input of column layers: itself; its gradient is summed over the ranks.

        Layers of one group that get the same tensor share one sum.
        """
        if not (torch.is_grad_enabled() and whole.requires_grad):
            return whole
        last = self._copied.get(group)
        if last is not None and last[0] is whole and last[1] == whole._version:
            return last[3]
        out = self._copy(whole, group)
        self._copied[group] = whole, whole._version, True, out
        return out

    def copy_parameter(self, whole: Tensor) -> Tensor:
        """A whole parameter that works on cut activations: itself; its gradient is summed."""
        return self._copy(whole, "")

    def sum(self, part: Tensor, group: str, site: str) -> Tensor:
        """The sum over the ranks; `part` may be overwritten."""
        self._copied.pop(group, None)
        return self._sum(part, site)

    def gather(self, part: Tensor, group: str, site: str, width: int) -> Tensor:
        """The parts of all ranks side by side in the last dimension, `width` in all."""
        self._copied.pop(group, None)
        return self._gather(part, site, width)

    def _copy(self, whole: Tensor, group: str) -> Tensor:
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
        self._group = group

    def _copy(self, whole: Tensor, group: str) -> Tensor:
        return _call(_Copy, whole, self)

    def _sum(self, part: Tensor, site: str) -> Tensor:
        return _call(_Sum, part, self)

    def _gather(self, part: Tensor, site: str, width: int) -> Tensor:
        return _call(_Gather, part, self, width)

    def all_reduce(self, values: Tensor) -> Tensor:
        """The sum over the ranks, in place where it can be."""
        values = values.contiguous()
        if values.numel():
            with _lost():
                dist.all_reduce(values, group=self._group)
        return values

    def all_gather(self, part: Tensor, width: int) -> Tensor:
        each = -(-width // self.ranks)
        padded = torch.nn.functional.pad(part, (0, each - part.shape[-1])).contiguous()
        parts = padded.new_empty(self.ranks, *padded.shape)
        if padded.numel():
            with _lost():
                dist.all_gather(list(parts.unbind()), padded, group=self._group)
        return parts.movedim(0, -2).flatten(-2).narrow(-1, 0, width)


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


class _Sum(torch.autograd.Function):
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
        return links.all_gather(part, width)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        first, stop = ctx.place
        return grad.narrow(-1, first, stop - first), None, None
