"""Links without other ranks, for a trial: one records a whole pass, one computes one rank's part.

Which plans are tried, and what a model is, is not known here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from instep.parallel.tensor.links import Links
from instep.parallel.tensor.masks import CutDraws
from instep.parallel.tensor.plan import Crossing, Draw

Compare = Callable[[str, Tensor, Tensor], None]
"""Raises `PlanDiffers` if two tensors differ: what they are, the given one, the wanted one."""


class PlanDiffers(Exception):
    """The plan gives something else than the whole model; the text says what, where."""


class RecordedLinks(Links):
    """The whole model as one rank: keeps what passes each link, call by call."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.grads: dict[str, list[Tensor | None]] = defaultdict(list)
        self.shapes: dict[str, list[list[torch.Size]]] = defaultdict(list)

    def _copy(self, whole: Tensor, group: str) -> Tensor:
        self.grads[group].append(None)
        return _call(_KeptGradient, whole, self.grads[group], len(self.grads[group]) - 1)

    def copy_parameters(self, wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        """As they are: the whole model has whole gradients."""
        return wholes

    def _sum(self, part: Tensor, site: str) -> Tensor:
        self.values[site].append(part.detach().clone())
        return part

    def _gather(self, part: Tensor, site: str, width: int) -> Tensor:
        return self._sum(part, site)

    def _split(self, whole: Tensor, site: str, at: Crossing) -> Tensor:
        grads = self.grads[site]
        grads.append(None)
        return _call(_KeptGradient, self._sum(whole, site), grads, len(grads) - 1)

    def _join(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        return self._split(part, site, at)

    def _sum_split(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        return self._split(part, site, at)

    def draws(self, region: str) -> CutDraws:
        """For one call of a module: records the shapes of its draws."""
        shapes: list[torch.Size] = []
        self.shapes[region].append(shapes)

        def whole(number: int, shape: Sequence[int]) -> None:
            shapes.append(torch.Size(shape))

        return CutDraws(whole)

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
                    compare(f"the gradient that passes {group}", total, whole)
        for each in ranks:
            for what, given, wanted in each.seen:
                compare(what, given, wanted)


class Alone(Links):
    """One rank of several, which takes from a record what the others would send."""

    def __init__(
        self,
        rank: int,
        ranks: int,
        record: RecordedLinks,
        draws: Mapping[str, Sequence[Draw | None]] | None = None,
    ) -> None:
        super().__init__(rank, ranks)
        self._record = record
        self.values: dict[str, list[Tensor]] = defaultdict(list)
        self.grads: dict[str, list[Tensor]] = defaultdict(list)
        self.seen: list[tuple[str, Tensor, Tensor]] = []
        """What one rank has that should be the whole model's, or a part of it: what, given,
        wanted."""
        self._known_draws = draws or {}
        self._numbers: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self._draws: dict[str, list[Draw | None]] = defaultdict(list)
        self._stretch = ""

    def _copy(self, whole: Tensor, group: str) -> Tensor:
        number = len(self.grads[group])
        known = self._record.grads[group]
        if number >= len(known):
            raise PlanDiffers(f"the inputs of {group} are not those of the whole model")
        self.grads[group].append(torch.zeros_like(whole))
        return _call(_Given, whole, self.grads[group], number, known[number])

    def copy_parameters(self, wholes: Sequence[Tensor]) -> Sequence[Tensor]:
        """Parameters without a gradient: what is left of it came another way."""
        return [whole.detach() for whole in wholes]

    def _sum(self, part: Tensor, site: str) -> Tensor:
        number = len(self.values[site])
        self.values[site].append(part.detach().clone())
        return _call(_Answer, part, self._known(site, number, part.shape), None)

    def _gather(self, part: Tensor, site: str, width: int) -> Tensor:
        whole = self._known(site, self._next(site), torch.Size([*part.shape[:-1], width]))
        first, stop = self.part(width)
        self._near(site, part, whole.narrow(-1, first, stop - first))
        return _call(_Answer, part, whole, (first, stop))

    def _split(self, whole: Tensor, site: str, at: Crossing) -> Tensor:
        self._stretch = at.stretch
        number = self._next(site)
        known = self._known(site, number, whole.shape)
        self._near(site, whole, known)
        return _call(_RankPart, whole, self._mine(known, at), self._places(site, number, at), at)

    def _join(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        size = list(part.shape)
        size[at.dim] = self.lengths[at.stretch]
        number = self._next(site)
        known = self._known(site, number, torch.Size(size))
        self._near(site, part, self._mine(known, at))
        if at.change == "gather_sum":
            self.grads[site].append(torch.zeros_like(known))
        return _call(_Whole, part, known, self._places(site, number, at), at)

    def _sum_split(self, part: Tensor, site: str, at: Crossing) -> Tensor:
        self._stretch = at.stretch
        number = self._next(site)
        known = self._known(site, number, part.shape)
        self.values[site].append(part.detach().clone())
        return _call(_RankPart, part, self._mine(known, at), self._places(site, number, at), at)

    def _next(self, site: str) -> int:
        self._numbers[site] += 1
        return self._numbers[site] - 1

    def _mine(self, whole: Tensor, at: Crossing) -> Tensor:
        first, stop = self.share(whole.shape[at.dim])
        return whole.narrow(at.dim, first, stop - first)

    def _places(self, site: str, number: int, at: Crossing) -> Places:
        return self, site, number, self._record.grads[site][number]

    def _near(self, site: str, given: Tensor, wanted: Tensor) -> None:
        if given.shape != wanted.shape:
            raise PlanDiffers(
                f"{site} has shape {list(given.shape)} instead of {list(wanted.shape)}"
            )
        largest = float(wanted.abs().max()) if wanted.numel() else 0.0
        if not torch.allclose(given, wanted, rtol=1e-5, atol=1e-6 * (1 + largest)):
            raise PlanDiffers(f"what passes {site} differs")

    def _known(self, site: str, number: int, shape: torch.Size) -> Tensor:
        known = self._record.values[site]
        if number >= len(known) or known[number].shape != shape:
            raise PlanDiffers(
                f"what passes {site} has not the shape that it has in the whole model"
            )
        return known[number]

    def draws(self, region: str) -> CutDraws:
        """For one call of a module: parts of draws whose recorded shape differs from here."""
        shapes = self._record.shapes[region]
        call = self._calls[region]
        self._calls[region] += 1
        found = self._draws[region]
        planned = self._known_draws.get(region, ())

        def whole(number: int, shape: Sequence[int]) -> tuple[int, int, tuple[int, int]] | None:
            if call >= len(shapes) or number >= len(shapes[call]):
                raise PlanDiffers(
                    f"{region} draws random numbers that the whole model does not draw"
                )
            wanted = shapes[call][number]
            differ = [at for at, (a, b) in enumerate(zip(shape, wanted, strict=False)) if a != b]
            if len(shape) != len(wanted) or len(differ) > 1:
                raise PlanDiffers(f"{region} draws for shape {list(shape)}, not {list(wanted)}")
            draw = None
            if differ:
                known = planned[number] if number < len(planned) else None
                of_features = known is not None and not known.stretch
                draw = Draw(differ[0], "" if of_features else self._stretch)
                if draw.stretch and wanted[draw.dim] != self.lengths[draw.stretch]:
                    raise PlanDiffers(f"{region} draws for shape {list(shape)}, not {list(wanted)}")
            if number == len(found):
                found.append(draw)
            if found[number] != draw:
                raise PlanDiffers(f"{region} draws in another order from call to call")
            if draw is None:
                return None
            size = wanted[draw.dim]
            return draw.dim, size, self.share(size) if draw.stretch else self.part(size)

        return CutDraws(whole)

    def draws_found(self) -> dict[str, tuple[Draw | None, ...]]:
        """What is cut in the draws of each region, where any is cut; and within such regions."""
        cut = [region for region, draws in self._draws.items() if any(draws)]
        return {
            region: tuple(draws)
            for region, draws in sorted(self._draws.items())
            if any(region == each or not each or region.startswith(f"{each}.") for each in cut)
        }


def _sums(of_ranks: list[list[Tensor]]) -> list[Tensor]:
    if len({len(each) for each in of_ranks}) > 1:
        raise PlanDiffers("ranks do not make equally many calls")
    return [torch.stack(parts).sum(0) for parts in zip(*of_ranks, strict=True)]


def _call(function: Any, *args: Any) -> Tensor:
    made: Tensor = function.apply(*args)
    return made


Places = tuple[Alone, str, int, Tensor | None]
"""A crossing: whose, its name, the number of its call, the whole gradient there if there is one."""


class _KeptGradient(torch.autograd.Function):
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
    """Records the gradient of a tensor, and continues with the whole model's."""

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


class _RankPart(torch.autograd.Function):
    """This rank's part of the whole model's value; goes back with the whole model's gradient."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, part: Tensor, places: Places, at: Crossing) -> Tensor:
        ctx.places, ctx.at = places, at
        return part.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        links, site, _, known = ctx.places
        if known is None:
            raise PlanDiffers(f"a gradient passes {site} that does not in the whole model")
        links.seen.append((f"the gradient at {site}", grad, links._mine(known, ctx.at)))
        return known, None, None, None


class _Whole(torch.autograd.Function):
    """The whole model's value; goes back with this rank's part of the whole model's gradient."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, whole: Tensor, places: Places, at: Crossing) -> Tensor:
        ctx.places, ctx.at = places, at
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        links, site, number, known = ctx.places
        if known is None:
            raise PlanDiffers(f"a gradient passes {site} that does not in the whole model")
        if ctx.at.change == "gather_sum":
            links.grads[site][number] = grad.detach().clone()
        else:
            links.seen.append((f"the gradient at {site}", grad, known))
        return links._mine(known, ctx.at), None, None, None
