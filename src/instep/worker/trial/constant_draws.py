"""Replaces torch's random draws by constants, the same for every sample.

Whether a model treats samples separately shows when they are run apart and together, unless it
draws random numbers: then the results differ anyway. In `ConstantDraws` every draw of torch's
gives a constant, so a remaining difference comes from the model. Draws of numpy and Python are
not replaced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

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


def _sorted(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Sort; if all numbers are equal, as drawn constants are, into the reversed order."""
    values, order = func(*args, **kwargs)
    if not values.dim() or not values.numel() or not bool((values == values.flatten()[0]).all()):
        return values, order
    places = [argument.name for argument in func._schema.arguments]
    place = places.index("dim")
    dim = kwargs.get("dim", args[place] if place < len(args) else -1)
    return values, order.flip(dim)
