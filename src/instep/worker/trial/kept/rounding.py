"""Tests before the first step whether an optimizer amplifies rounding.

The sum of a gradient over workers is rounded as their number has it. Most optimizers hand such a
difference on as it is. Some do not: Muon computes in bfloat16, where the last digit of a float32
decides now and then about the third digit of the result; others rotate a gradient into a basis that
its last digits choose, where samples are few. So the same steps are taken with gradients that
differ by a few roundings, on small stand-ins, and the updates are compared.

What is compared is the middle element of each parameter, so an optimizer that takes signs is not
named: where a gradient is near zero, one element of thousands turns, and the others do not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from instep.data.order import key
from instep.engine.trial_result import Trial
from instep.errors import one_line
from instep.words import listed
from instep.worker.trial.kept.stand_in import Maker, StandIn, steady

MOST = 1000
"""How many times larger than that of its gradient the relative difference of an update may be: it
loses three digits then, of seven or of sixteen. An optimizer that treats each element by itself is
near 1, one that scales by norms below 10, an orthogonalisation in full precision some hundreds."""

_NEAR = 2e-5
"""A difference that is none, in any type."""

_FIRST = 3
"""Steps that are compared, beside the last: some optimizers begin with what amplifies later."""

_RANKS, _ROUNDINGS, _OF_MOVE = (2, 8, 0), 256, 16
"""Rank of the gradients, which that of few samples is, and what is tried where that is
refused; by how many roundings they differ, so
that some element of a small parameter crosses a step of 16 bits; and how many are the move's."""


def try_rounding(maker: Maker, trial: Trial) -> Trial:
    """The trial's result, or the name of the optimizer that amplifies rounding.

    Args:
        maker: of stand-ins.
        trial: so far.
    """
    if not trial.same:
        return trial
    why = ""
    for rank in _RANKS:
        try:
            names, by = amplifying(maker, rank=rank)
            break
        except Exception as error:  # the user's optimizer may refuse gradients of a few samples
            why = why or f"{type(error).__name__}: {one_line(error)}"
    else:
        return _not_tried(trial, f"the optimizer raises {why}")
    if names and math.isnan(by):
        return _not_tried(trial, f"{listed(names, 4)} gives NaN with made-up gradients")
    if not names:
        return trial
    return trial._replace(
        verdict=f"no: the optimizer {listed(names, 4)} amplifies rounding: two gradients that "
        f"differ in their last digits give updates that differ by {by:.1g} of their size, and "
        "those digits depend on the number of workers. With train.determinism = 'bits' the result "
        "has the same bits on any number of them"
    )


def _not_tried(trial: Trial, why: str) -> Trial:
    return trial._replace(
        verdict=f"not shown: {why}, so whether it amplifies rounding cannot be tried. With "
        "train.determinism = 'bits' the result has the same bits on any number of workers"
    )


def amplifying(maker: Maker, *, rank: int = _RANKS[0]) -> tuple[list[str], float]:
    """The classes of the optimizers that do, and how far an update was off.

    Args:
        maker: of stand-ins.
        rank: of the gradients; 0 for any.

    Returns:
        No names if there are none; NaN if an update was.

    Raises:
        Exception: of whatever kind, an optimizer cannot take these steps.
    """
    one, other = maker.make(), maker.make()
    if all(steady(optimizer) for optimizer, _ in one.made):
        return [], 0.0
    whose = {
        id(p): type(each).__name__
        for each in one.optimizers
        for group in each.param_groups
        for p in group["params"]
    }
    found, worst, steps = dict[str, None](), 0.0, max(_FIRST, one.steps)
    for number in range(steps):
        compared = number < _FIRST or number == steps - 1
        starts = [_values(each) for each in (one, other)] if compared else []
        given = list(maker.gradients(number, rank=rank))
        rounded = list(_rounded(given, key(maker.seed, number)))
        one.step(given, number, maker.seed)
        other.step(rounded, number, maker.seed)
        for name, own in one.parameters.items() if compared else ():
            if own.dtype not in (torch.float32, torch.float64) or own.grad is None:
                continue
            move = (own.detach() - starts[0][name]).double()
            apart = _middle(other.parameters[name].detach() - starts[1][name] - move)
            length, eps = _middle(move), torch.finfo(own.dtype).eps
            allowed = max(MOST * _ROUNDINGS * eps, _NEAR) * length
            allowed += _OF_MOVE * eps * _middle(own.detach())
            if not apart <= allowed:
                found[whose[id(own)]] = None
                off = apart / max(length, 1e-300)
                worst = max(worst, off) if off == off else off
    return list(found), worst


def _values(stand_in: StandIn) -> dict[str, Tensor]:
    return {name: own.detach().clone() for name, own in stand_in.parameters.items()}


def _middle(tensor: Tensor) -> float:
    return float(tensor.abs().median()) if tensor.numel() else 0.0


def _rounded(given: list[tuple[str, Tensor]], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Each element some roundings up or down."""
    noise = torch.Generator().manual_seed(seed)
    for name, gradient in given:
        if gradient.is_sparse or not gradient.is_floating_point():
            yield name, gradient.clone()
            continue
        up = torch.randint(0, 2, gradient.shape, generator=noise).to(gradient.dtype) * 2 - 1
        yield name, gradient * (1 + _ROUNDINGS * torch.finfo(gradient.dtype).eps * up)
