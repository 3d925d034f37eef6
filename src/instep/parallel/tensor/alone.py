"""Links without other ranks, for a trial: one records a whole pass, one computes one rank's part.

Which plans are tried, and what a model is, is not known here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.parallel.tensor.links import Links
from instep.parallel.tensor.masks import Draws

Compare = Callable[[str, Tensor, Tensor], None]
"""Raises `Failed` if two tensors differ: what they are, the given one, the wanted one."""


class Failed(Exception):
    """The plan gives something else than the whole model; the text says what, where."""


class Record(Links):
    """The whole model as one rank: keeps what passes each link, call by call."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.grads: dict[str, list[Tensor | None]] = defaultdict(list)
        self.shapes: dict[str, list[list[torch.Size]]] = defaultdict(list)

    def _copy(self, whole: Tensor, group: str) -> Tensor:
        self.grads[group].append(None)
        return _call(_Kept, whole, self.grads[group], len(self.grads[group]) - 1)

    def _sum(self, part: Tensor, site: str) -> Tensor:
        self.values[site].append(part.detach().clone())
        return part

    def _gather(self, part: Tensor, site: str, width: int) -> Tensor:
        self.values[site].append(part.detach().clone())
        return part

    def draws(self, region: str) -> Draws:
        """For one call of a module: records the shapes of its draws."""
        shapes: list[torch.Size] = []
        self.shapes[region].append(shapes)

        def whole(number: int, shape: Sequence[int]) -> None:
            shapes.append(torch.Size(shape))

        return Draws(whole, self.part)

    def compare(self, ranks: Sequence[Alone], compare: Compare) -> None:
        """Compare the sums of what the ranks computed with what was recorded."""
        for site in ranks[0].values:
            for given, wanted in zip(
                _sums([each.values[site] for each in ranks]), self.values[site], strict=True
            ):
                compare(f"the output of {site}", given, wanted)
        for group in ranks[0].grads:
            for total, whole in zip(
                _sums([each.grads[group] for each in ranks]), self.grads[group], strict=True
            ):
                if whole is not None:
                    compare(f"the gradient of the input of {group}", total, whole)


class Alone(Links):
    """One rank of several, which takes from a record what the others would send."""

    def __init__(self, rank: int, ranks: int, record: Record) -> None:
        super().__init__(rank, ranks)
        self._record = record
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.grads: dict[str, list[Tensor]] = defaultdict(list)
        self._gathered: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self._dims: dict[str, list[int | None]] = defaultdict(list)

    def _copy(self, whole: Tensor, group: str) -> Tensor:
        number = len(self.grads[group])
        known = self._record.grads[group]
        if number >= len(known):
            raise Failed(f"the inputs of {group} are not those of the whole model")
        self.grads[group].append(torch.zeros_like(whole))
        return _call(_Given, whole, self.grads[group], number, known[number])

    def copy_parameter(self, whole: Tensor) -> Tensor:
        """The parameter without a gradient: what is left of it came another way."""
        return whole.detach()

    def _sum(self, part: Tensor, site: str) -> Tensor:
        number = len(self.values[site])
        self.values[site].append(part.detach().clone())
        return _call(_Answer, part, self._known(site, number, part.shape), None)

    def _gather(self, part: Tensor, site: str, width: int) -> Tensor:
        number = self._gathered[site]
        self._gathered[site] += 1
        whole = self._known(site, number, torch.Size([*part.shape[:-1], width]))
        first, stop = self.part(width)
        mine = whole.narrow(-1, first, stop - first)
        if not torch.allclose(part, mine, rtol=1e-5, atol=1e-6 * (1 + float(whole.abs().max()))):
            raise Failed(f"the output of {site} differs")
        return _call(_Answer, part, whole, (first, stop))

    def _known(self, site: str, number: int, shape: torch.Size) -> Tensor:
        known = self._record.values[site]
        if number >= len(known) or known[number].shape != shape:
            raise Failed(f"the output of {site} has not the shape that it has in the whole model")
        return known[number]

    def draws(self, region: str) -> Draws:
        """For one call of a module: parts of draws whose recorded shape differs from here."""
        shapes = self._record.shapes[region]
        call = self._calls[region]
        self._calls[region] += 1
        dims = self._dims[region]

        def whole(number: int, shape: Sequence[int]) -> tuple[int, int] | None:
            if call >= len(shapes) or number >= len(shapes[call]):
                raise Failed(f"{region} draws random numbers that the whole model does not draw")
            wanted = shapes[call][number]
            differ = [at for at, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b]
            if len(shape) != len(wanted) or len(differ) > 1:
                raise Failed(f"{region} draws for shape {list(shape)}, not {list(wanted)}")
            dim = differ[0] if differ else None
            if number == len(dims):
                dims.append(dim)
            if dims[number] != dim:
                raise Failed(f"{region} draws in another order from call to call")
            return None if dim is None else (dim, wanted[dim])

        return Draws(whole, self.part)

    def dims(self) -> dict[str, tuple[int | None, ...]]:
        """Regions with draws for cut activations: the dimension that is cut, for each draw."""
        return {
            region: tuple(dims)
            for region, dims in sorted(self._dims.items())
            if any(dim is not None for dim in dims)
        }


def _sums(of_ranks: list[list[Tensor]]) -> list[Tensor]:
    if len({len(each) for each in of_ranks}) > 1:
        raise Failed("ranks do not make equally many calls")
    return [torch.stack(parts).sum(0) for parts in zip(*of_ranks, strict=True)]


def _call(function: Any, *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


class _Kept(torch.autograd.Function):
    """Records the gradient of a tensor."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, grads: list[Any], number: int) -> Tensor:
        ctx.place = grads, number
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads, number = ctx.place
        grads[number] = grad.detach().clone()
        return grad, None, None


class _Given(torch.autograd.Function):
    """Records the gradient of a tensor, and goes on with the whole model's."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, grads: list[Any], number: int, known: Any) -> Tensor:
        ctx.place = grads, number, known
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        grads, number, known = ctx.place
        grads[number] = grad.detach().clone()
        return grad if known is None else known, None, None, None


class _Answer(torch.autograd.Function):
    """The whole model's value; the gradient goes to this rank's part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, place: Any) -> Tensor:
        ctx.place = place
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if ctx.place is not None:
            first, stop = ctx.place
            grad = grad.narrow(-1, first, stop - first)
        return grad, None, None
