"""Deep gradient compression: momentum before the choice of what is sent. Its options.

It has a reducer of its own, `instep.sync.reducers.dgc`, which sends what `top_k` would.
"""

from __future__ import annotations

import math

from instep.comm.codecs.base import CUT
from instep.errors import SpecError

STAGES = 5
"""In the warm-up the density falls in so many stages, each by the same factor."""


class DGC:
    """What a job says of it (Lin et al. 2018, arXiv:1712.01887).

    Args:
        density: which share of the values is sent in the end, from 1 / 4,096 to 1.
        warm_up: so many steps of the run send more: with 0.001, 25 %, 6.3 %, 1.6 % and 0.4 % in
            a quarter of them each.
        clip: largest norm of the sum; each rank limits its own contribution to this, over the
            root of the number of ranks. 0 for none.

    Raises:
        SpecError: one of them is out of bounds.
    """

    reducer = "dgc"
    takes_momentum = True

    def __init__(self, *, density: float = 0.001, warm_up: int = 100, clip: float = 0.0) -> None:
        if not (_number(density) and 1 / CUT <= density <= 1):
            raise SpecError(
                f"sync.codec_options.density = {density!r}: needs a number from 1/{CUT} "
                "(0.000245) to 1: which share of the values is sent."
            )
        if not isinstance(warm_up, int) or isinstance(warm_up, bool) or warm_up < 0:
            raise SpecError(
                f"sync.codec_options.warm_up = {warm_up!r}: needs a whole number of steps, 0 or "
                "more."
            )
        if not (_number(clip) and 0 <= clip < math.inf):
            raise SpecError(
                f"sync.codec_options.clip = {clip!r}: needs a number: the largest norm of the sum, "
                "or 0 for no limit."
            )
        self.warm_up, self.clip = warm_up, clip
        self.densities = [density ** ((stage + 1) / STAGES) for stage in range(STAGES - 1)]
        self.densities.append(density)
        self.momentum, self.nesterov = 0.0, False
        """What the optimizer would have applied; the maker of the strategy takes it from there."""

    def stage(self, step: int) -> int:
        """Which of `densities` counts in a step of the run, from 1."""
        if step > self.warm_up:
            return STAGES - 1
        return (step - 1) * (STAGES - 1) // self.warm_up


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
