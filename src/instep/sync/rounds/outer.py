"""How a round ends: what is taken off the parameters, given how far participants came on average.

A rule sees one parameter at a time, and keeps what it has learnt of it: the same on every rank,
since the mean is. Rounds and participants are not known here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.errors import SpecError


class Rule(Protocol):
    """An optimizer whose gradient is how far the mean of the participants came, backwards."""

    def way(self, back: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """What to take off a parameter.

        Args:
            back: from where the mean is to where the round began; float32 or wider.
            kept: what the rule has kept for this parameter; empty before its first round.
        """


class Momentum:
    """SGD with momentum as in `torch.optim.SGD`, or Nesterov's (Hsu et al. 2019,
    arXiv:1909.06335; with `nesterov`, Douillard et al. 2023, arXiv:2311.08105)."""

    def __init__(self, lr: float, momentum: float, *, nesterov: bool = False) -> None:
        self._lr, self._momentum, self._nesterov = lr, momentum, nesterov

    def way(self, back: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """Without momentum, so much of the whole way."""
        if self._momentum:
            kept.setdefault("momentum", torch.zeros_like(back)).mul_(self._momentum).add_(back)
            follows = kept["momentum"]
            back = back.add(follows, alpha=self._momentum) if self._nesterov else follows
        return back * self._lr


class Adaptive:
    """Adagrad, Adam or Yogi on the way of the mean: Algorithm 2 of Reddi et al. 2021
    (arXiv:2003.00295), without correction of the bias of the first rounds.

    Args:
        rule: how the squares are kept: `adagrad`, `adam` or `yogi`.
        lr, momentum, beta2, tau: the paper's eta, beta 1, beta 2 and tau.
    """

    def __init__(self, rule: str, lr: float, momentum: float, beta2: float, tau: float) -> None:
        self._rule, self._lr = rule, lr
        self._momentum, self._beta2, self._tau = momentum, beta2, tau

    def way(self, back: Tensor, kept: dict[str, Tensor]) -> Tensor:
        """The mean of the ways so far over the root of their squares."""
        first = kept.setdefault("momentum", torch.zeros_like(back))
        second = kept.setdefault("squares", torch.full_like(back, self._tau**2))
        first.lerp_(back, 1 - self._momentum)
        squares = back.square()
        if self._rule == "adagrad":
            second += squares
        elif self._rule == "adam":
            second.lerp_(squares, 1 - self._beta2)
        else:
            second -= (1 - self._beta2) * squares * (second - squares).sign()
        return self._lr * first / (second.sqrt() + self._tau)


OUTER = "outer/"
"""Begins the names of what a rule keeps, in a strategy's state."""


class Outer:
    """A rule for all parameters of a rank, and what it keeps.

    Args:
        rule: the same for each.
    """

    def __init__(self, rule: Rule) -> None:
        self._rule = rule
        self._kept = defaultdict[int, dict[str, Tensor]](dict)
        """By the number of the parameter, or of the fragment of all of them."""

    @torch.no_grad()
    def replace(self, parameters: Iterable[Parameter], beside: Collection[int] = ()) -> None:
        """Make of each `.grad`, the way of the mean backwards, what is to be taken off; but for
        those that move to the mean."""
        for number, parameter in enumerate(parameters):
            if parameter.grad is not None and number not in beside:
                parameter.grad, kept = self.moved(number, parameter.grad)
                self.keep(number, kept)

    def moved(self, number: int, back: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """What is to be taken off, and what the rule keeps if that happens.

        Args:
            number: of the parameter.
            back: from where the mean is to where the round began.
        """
        wide = back.to(torch.promote_types(back.dtype, torch.float32))
        kept = {name: each.to(wide.device, copy=True) for name, each in self._kept[number].items()}
        return self._rule.way(wide, kept).to(back.dtype), kept

    def keep(self, number: int, kept: dict[str, Tensor]) -> None:
        """It happens."""
        self._kept[number] = kept

    def state(self) -> dict[str, Tensor]:
        """What is kept, as `NUMBER/NAME`; the same on every rank after a commit."""
        return {
            f"{number}/{name}": tensor
            for number, kept in sorted(self._kept.items())
            for name, tensor in kept.items()
        }

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self._kept.clear()
        for name, tensor in state.items():
            number, kept = name.split("/")
            self._kept[int(number)][kept] = tensor.clone()


def number(option: str, value: Any, *, least: float = 0.0, below: float = math.inf) -> float:
    """An option of `[sync.options]` that is a number.

    Raises:
        SpecError: it is none, or smaller than `least`, or not below `below`.
    """
    right = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (right and least <= value < below):
        limit = f" and below {below:g}" if below < math.inf else ""
        raise SpecError(
            f"sync.options.{option} = {value!r}: needs a number of at least {least:g}{limit}."
        )
    return float(value)
