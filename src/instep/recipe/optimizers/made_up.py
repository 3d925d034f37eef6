"""Made-up gradients and weights for trials of whether an optimizer can do with parts of a model.

Many optimizers look at more than a part only now and then: they clip above a bound, skip a step
when the norm rises, or leave the first ten steps alone. So gradients of many sizes are tried, in
more steps than a warm-up has here. In some steps one element has nearly all of the norm: then only
the process that has it is above a bound that lies in between.
"""

from __future__ import annotations

import copy
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from instep.data.order import key
from instep.recipe.optimizers.combined import parts_of


class TrialStep(NamedTuple):
    """Sizes in one step of a trial."""

    norm: float
    """Norm of the gradients of all parameters, but for the spike."""
    spike: float
    """Size of one element of all, as a multiple of the norm; 0 for none."""
    scale: float
    """Factor of the weights: bounds are on their norms too, and small ones are rounded less."""


STEPS = tuple(
    TrialStep(*step)
    for step in (
        *((1.0, 0, 1), (1.0, 0, 2**-7), (1e-3, 0, 2**-14), (1e-3, 100, 2**-14)),
        *((0.1, 0, 2**-7), (0.1, 100, 1), (10.0, 0, 2**-14), (10.0, 100, 2**-7)),
        *((1e3, 0, 1), (1e3, 100, 2**-7), (10.0, 0, 2**7), (0.1, 100, 2**-14)),
        *((10.0, 100, 2**-14), (1e2, 0, 2**-14), (1e3, 100, 2**-14), (1e5, 0, 2**-14)),
    )
)
"""Steps of a trial, from a thousandth to 1e5. Later ones are rather larger: what an optimizer keeps
of a large gradient hides a small one."""

_DRAWN = 1_048_583
"""Numbers that are drawn; a prime, so that rows of a parameter do not repeat."""


class MadeUp:
    """Makes gradients and weights, the same in every process.

    Args:
        shapes: of all parameters that the optimizer has in the trial, by name.
        seed: the same seed makes the same ones.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], seed: int) -> None:
        self._shapes, self._seed, self._names = (
            shapes,
            seed,
            [n for n in shapes if shapes[n].numel()],
        )
        self._numel = sum(shape.numel() for shape in shapes.values())
        generator = torch.Generator().manual_seed(key(seed, _DRAWN))
        self._noise = torch.randn(_DRAWN, generator=generator)

    def gradient(self, name: str, number: int) -> Tensor:
        """Make the gradient of a whole parameter in the step with this number: float32, finite."""
        step = STEPS[number]
        made = self._of(name, number, step.norm / math.sqrt(self._numel))
        if step.spike and name == self._names[key(self._seed, number) % len(self._names)]:
            element = key(self._seed, number, made.numel()) % made.numel()
            made.view(-1)[element] = step.norm * step.spike
        return made

    def weight(self, name: str) -> Tensor:
        """Make a whole parameter, for one that is zero: float32."""
        return self._of(name, len(STEPS), 0.02)

    def _of(self, name: str, number: int, by: float) -> Tensor:
        shape = self._shapes[name]
        first = key(self._seed, zlib.crc32(name.encode()), number) % _DRAWN
        stop = first + shape.numel()
        noise = self._noise if stop <= _DRAWN else self._noise.repeat(-(-stop // _DRAWN))
        return (noise[first:stop] * by).view(shape)


def fitting(gradient: Tensor, like: Tensor) -> Tensor:
    """A gradient in the type of a parameter, and on its device; its square is finite there."""
    largest = min(math.sqrt(torch.finfo(like.dtype).max) / 2, 1e18)
    return gradient.clamp(-largest, largest).to(like.device, like.dtype)


def moving(groups: Iterable[dict[str, Any]]) -> None:
    """Set the rate of groups so that they move parameters: schedulers often begin with zero."""
    for group in groups:
        if "lr" in group:
            group["lr"] = max(group["lr"], group.get("initial_lr", 0.0)) or 1e-3


@contextmanager
def tried(optimizer: Optimizer) -> Iterator[None]:
    """Have a real optimizer move parameters, and forget what it learns from that, its state aside.

    Lists and the like among its attributes are copies in this context. What cannot be copied, as a
    lock, is not.
    """
    every = [*{id(each): each for each in (optimizer, *parts_of(optimizer))}.values()]
    attributes = [dict(vars(each)) for each in every]
    groups = [dict(group) for group in optimizer.param_groups]
    own = [each for group in optimizer.param_groups for each in (group, *group["params"])]
    same: dict[int, Any] = {id(each): each for each in (*every, *own)}
    for each, before in zip(every, attributes, strict=True):
        same |= {id(each.state): each.state, id(each.param_groups): each.param_groups}
        for name in before.keys() - {"state", "param_groups", "defaults"}:
            with suppress(Exception):  # of whatever kind, from the user's classes
                vars(each)[name] = copy.deepcopy(before[name], same)
    moving(optimizer.param_groups)
    try:
        yield
    finally:
        for each, before in zip(every, attributes, strict=True):
            vars(each).clear()
            vars(each).update(before)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
