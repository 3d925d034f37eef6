"""Numbers of passes that are the same up to rounding, and gradients that are not."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.worker.trial.model import PassResult, TrialModel

SHORT = torch.bfloat16, torch.float16

_SHARES = {torch.float64: (2e-5, 1e-6), torch.float32: (2e-3, 2e-5)}
_SHARES_IN_SHORT = 1e-1, 1e-2
_SHARES_IN_WIDE = 1e-8, 1e-9
"""Where nothing was seen to be computed in less than float64."""
_WIDER = 10.0
"""Times as much: what a model computes in float32 in any case is rounded to a share of what cancels
in the mean."""


class Nearness(NamedTuple):
    """Two gradients are the same if they differ by less than this share of the parameter's own, or
    of the whole gradient. Many models compute parts in float32 in any case, as `all_wide` tells."""

    of_parameter: float
    of_gradient: float

    @classmethod
    def of_model(cls, model: TrialModel) -> Nearness:
        """By the coarsest type that takes part: gradients pass through frozen parts too.

        Parameters in float64 say little of what is between them, unless that was seen.
        Types of 8 bits only store: what is computed with their values has the type of another
        tensor.
        """
        frozen = (p.dtype for p in model.model.parameters() if not p.requires_grad)
        kept = [dtype for dtype in frozen if dtype in SHORT]
        if model.all_wide:
            return cls(*_SHARES_IN_WIDE)
        trained = [p.dtype for p in model.parameters.values()]
        return cls(*max(_SHARES.get(dtype, _SHARES_IN_SHORT) for dtype in trained + kept))

    @property
    def shows_little(self) -> bool:
        """Whether a difference of a per cent would not show."""
        return self.of_parameter >= _SHARES_IN_SHORT[0]

    @property
    def is_exact(self) -> bool:
        """Whether all that takes part is computed in float64."""
        return self.of_parameter <= _SHARES[torch.float64][0]

    def of_trained(self) -> Nearness:
        """Allow more, for gradients that have become small beside those of single samples."""
        return Nearness(*(_WIDER * share for share in self))

    def close(self, one: float, other: float) -> bool:
        """Compare two losses."""
        return math.isclose(one, other, rel_tol=self.of_parameter, abs_tol=self.of_parameter * 1e-3)

    def differing(
        self, names: Iterable[str], one: dict[str, Tensor], other: Mapping[str, Tensor]
    ) -> str:
        """Find a parameter whose gradients differ.

        Args:
            names: of the parameters.
            one: gradients, which are used up.
            other: others.

        Returns:
            Its name; empty if none differ.
        """
        lengths = {name: float(gradient.double().norm()) for name, gradient in other.items()}
        length = math.hypot(*lengths.values())
        for name in names:
            mine, theirs = one.get(name), other.get(name)
            if mine is not None and theirs is not None:
                gap, own = float(mine.sub_(theirs).norm()), lengths[name]
            elif mine is not None or theirs is not None:
                (present,) = [each for each in (mine, theirs) if each is not None]
                gap, own = float(present.double().norm()), 0.0
            else:
                continue
            if not gap <= self.of_parameter * own + self.of_gradient * length:
                return name
        return ""


def mean_gradients(passes: Sequence[PassResult], shares: Sequence[float]) -> dict[str, Tensor]:
    """Average the gradients of passes by parameter, in float64.

    Args:
        passes: with gradients.
        shares: of each.
    """
    mean: dict[str, Tensor] = {}
    for share, each in zip(shares, passes, strict=True):
        for name, gradient in each.gradients.items():
            if name in mean:
                mean[name].add_(gradient, alpha=share)
            else:
                mean[name] = gradient.to(torch.float64, copy=True).mul_(share)
    return mean
