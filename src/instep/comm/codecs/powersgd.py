"""Matrices as products of two thin ones: the options of PowerSGD, which has its own reducer.

What travels is linear in the gradient, so it is summed on its way, and nothing is encoded for one
receiver: `instep.sync.reducers.powersgd` talks twice for each bucket.
"""

from __future__ import annotations

from instep.errors import SpecError


class PowerSGD:
    """What a job says of it (Vogels et al. 2019, arXiv:1905.13727).

    Args:
        rank: columns of each factor.
        start_after: so many steps of the run send whole gradients.

    Raises:
        SpecError: one of them is out of bounds.
    """

    reducer = "powersgd"

    def __init__(self, *, rank: int = 4, start_after: int = 100) -> None:
        for name, value, least in (("rank", rank, 1), ("start_after", start_after, 0)):
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise SpecError(
                    f"sync.codec_options.{name} = {value!r}: needs a whole number, {least} or more."
                )
        self.rank, self.start_after = rank, start_after
