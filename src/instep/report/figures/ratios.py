"""How many times as large one measured thing is as another, and how certain that is.

Both are measured in the same turns, so that what changes from turn to turn (the machine, the seed)
is in both. The interval is Student's, of the mean of the logarithms. Ways in: `ratio_of`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CERTAINTY = 0.95
"""Of the intervals of one comparison, all together."""

_ANGLES = 200_001


class Ratio(NamedTuple):
    """A ratio and the interval that it is in."""

    value: float
    low: float
    high: float
    """Infinite, and `low` 0, where there was one turn."""

    @property
    def known(self) -> bool:
        """Whether it was measured more than once."""
        return math.isfinite(self.high)

    @property
    def told(self) -> bool:
        """Whether its interval says anything: not if its ends differ a hundredfold."""
        return self.known and self.high <= 100 * self.low

    @property
    def settled(self) -> bool:
        """Whether more turns would hardly change what it says: it is known to 5 %, or to a quarter
        of what is between it and 1."""
        if not self.known:
            return False
        half = math.log(self.high / self.low) / 2
        return half <= max(math.log(1.05), abs(math.log(self.value)) / 4)

    def __str__(self) -> str:
        if not self.known:
            return _short(self.value)
        if not self.told:
            return f"{_short(self.value)} (too few turns to tell)"
        return f"{_short(self.value)} ({_short(self.low)} to {_short(self.high)})"


def _short(value: float) -> str:
    return (
        f"{value:.2f}"
        if 0.095 <= value < 9.995
        else f"{value:.2g}"
        if value < 1
        else f"{value:.0f}"
    )


def ratio_of(
    mine: Sequence[float | None], theirs: Sequence[float | None], *, among: int = 1
) -> Ratio | None:
    """How many times as large `mine` is as `theirs`.

    Args:
        mine, theirs: of each turn.
        among: comparisons that are to hold together; the intervals are as much wider (Bonferroni).

    Returns:
        None where a turn lacks one of the two, or one is not above 0.
    """
    pairs = list(zip(mine, theirs, strict=True))
    if not pairs or not all(_positive(a) and _positive(b) for a, b in pairs):
        return None
    logs = np.array([math.log(a / b) for a, b in pairs if a is not None and b is not None])
    mean, turns = float(logs.mean()), len(logs)
    if turns == 1:
        return Ratio(math.exp(mean), 0.0, math.inf)
    error = float(logs.std(ddof=1)) / math.sqrt(turns)
    half = quantile_of_student(1 - (1 - CERTAINTY) / 2 / among, turns - 1) * error
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half))


def _positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def quantile_of_student(share: float, freedom: int) -> float:
    """The value below which so large a share of Student's distribution is, for a share above half.

    With t = sqrt(freedom) tan(angle), the density is cos(angle) to the power of freedom - 1.
    """
    angles = np.linspace(0.0, math.pi / 2, _ANGLES)
    density = np.cos(angles) ** (freedom - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = float(np.interp(2 * share - 1, below / below[-1], angles))
    return math.sqrt(freedom) * math.tan(angle)
