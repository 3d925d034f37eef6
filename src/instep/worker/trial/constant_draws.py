"""Replaces torch's random draws by constants, the same for every sample.

Whether a model treats samples separately shows when they are run apart and together, unless it
draws random numbers: then the results differ anyway. In `ConstantDraws` every draw of torch's
gives a constant, so a remaining difference comes from the model. Draws of numpy and Python are
not replaced.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from instep.worker.trial.model import TrialModel

LEVELS = (0.5, 0.05, 0.95)
"""Constants to try: code may compare a draw with a probability."""


class ConstantDraws(TorchDispatchMode):
    """In this context torch draws constants: dropout drops nothing, noise is one number.

    A permutation becomes the reversed order, since it mixes samples, which must show. So does
    the order of equal numbers that are sorted, since `rand(n).argsort()` is a permutation too.

    Args:
        level: the constant of a draw from 0 to 1; of another range, the same share of it.
    """

    def __init__(self, level: float = LEVELS[0]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._level = level

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Replace what draws; pass on everything else."""
        kwargs = dict(kwargs or {})
        name = func._schema.name
        if name == "aten::sort":
            return _sorted(func, args, kwargs)
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        of_dropout = {"dropout_p", "dropout", *(["p"] if "dropout" in name else [])}
        given = list(args)
        drops = False
        for place, argument in enumerate(arguments):
            if argument.name in of_dropout:
                drops = True
                if place < len(given):
                    given[place] = 0.0
                else:
                    kwargs[argument.name] = 0.0
        drawn = func(*given, **kwargs)
        if drops or not isinstance(drawn, Tensor):
            return drawn
        if "randperm" in name:
            return drawn.copy_(torch.arange(drawn.numel() - 1, -1, -1, device=drawn.device))
        named = {a.name: value for a, value in zip(arguments, given, strict=False)} | kwargs
        if "bernoulli" in name:
            return drawn.fill_(1)
        if drawn.is_floating_point() or drawn.is_complex():
            low, high = (
                (named.get("from", 0.0), named.get("to", 1.0)) if "uniform" in name else (0, 1)
            )
            return drawn.fill_(low + self._level * (high - low))
        return drawn.fill_(named.get("low", named.get("from") or 0))


@contextmanager
def drawing(model: TrialModel, draws: Callable[[], Any]) -> Iterator[None]:
    """In this context a model's passes run in this one, instead of its own."""
    before, model.draws = model.draws, draws
    try:
        yield
    finally:
        model.draws = before


@contextmanager
def drawn_before() -> Iterator[None]:
    """In this context, the generators stand where others have drawn from them."""
    torch.rand(1)
    np.random.random()
    random.random()
    yield


def seeds_itself(model: TrialModel, batch: Any, samples: int) -> bool:
    """Whether a pass that draws does so from a seed that it sets: its numbers are the same
    wherever the generators stand, and they count.

    Args:
        model: on trial.
        batch: of the pass.
        samples: in it.
    """

    def loss(draws: Callable[[], Any]) -> float:
        with drawing(model, draws):
            found = model.run(batch, samples, backward=False)
        return math.nan if found is None else found.loss

    as_it_is = loss(nullcontext)
    return loss(drawn_before) == as_it_is != loss(ConstantDraws)


@contextmanager
def draws_set_back() -> Iterator[Callable[[], bool]]:
    """In this context, notice draws after which torch's generator was set back, as
    `torch.random.fork_rng` does: its state does not show them. Yields what says whether there
    were any."""
    seen, set_back = [False], torch.random.set_rng_state

    def noted(state: Tensor) -> None:
        seen[0] = seen[0] or not torch.equal(torch.get_rng_state(), state)
        set_back(state)

    places = vars(torch), vars(torch.random)
    try:
        for each in places:
            each["set_rng_state"] = noted
        yield lambda: seen[0]
    finally:
        for each in places:
            each["set_rng_state"] = set_back


def _sorted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sort; if all numbers are equal, as drawn constants are, into the reversed order."""
    values, order = func(*args, **kwargs)
    if not values.dim() or not values.numel() or not bool((values == values.flatten()[0]).all()):
        return values, order
    places = [argument.name for argument in func._schema.arguments]
    place = places.index("dim")
    dim = kwargs.get("dim", args[place] if place < len(args) else -1)
    return values, order.flip(dim)
