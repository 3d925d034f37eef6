"""The grid of whole numbers on which clipped gradients are summed, and what one sample can change.

A clipped gradient is divided by the grid's unit and each of its numbers rounded to the nearest
whole number. Sums of whole numbers are exact, so a sum does not depend on who adds what first,
and one sample changes it by its own rounded gradient and by nothing else. The unit follows from
the job alone: no data have a part in it.

Decision 0103 proves that `Grid.sensitivity` is an upper bound.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from instep.errors import SpecError

_RANGE_BITS = 31
"""Bits of the whole numbers in which workers sum."""

MARGIN = 2.0**-16
"""By how much of it a gradient is clipped below the limit, for errors of float32."""

_CLIPS = 1e-20, 1e20
"""Limits of norms for which no factor of a gradient leaves the normal numbers of float32."""

_COARSEST = 0.05
"""The largest part of the sensitivity that may come from rounding."""


@dataclass(frozen=True)
class Grid:
    """How gradients become whole numbers.

    Args:
        clip: largest 2-norm of the gradient of one sample, over all parameters.
        numbers: in a gradient, over all parameters.
        most: samples that one sum can have.

    Raises:
        SpecError: so many numbers of so many samples cannot be summed finely enough, or the limit
            is out of the range of float32.
    """

    clip: float
    numbers: int
    most: int

    def __post_init__(self) -> None:
        least, largest = _CLIPS
        if not least <= self.clip <= largest:
            raise SpecError(
                f"privacy.clip = {self.clip:g}: gradients of float32 are clipped to norms between "
                f"{least:g} and {largest:g}. Set it to about the size of a sample's gradient."
            )
        if math.sqrt(self.numbers) / 2 > _COARSEST * self.per_clip:
            raise SpecError(
                f"privacy: a model of {self.numbers:,} trained parameters and steps of up to "
                f"{self.most:,} samples leave a grid so coarse that its rounding would be more "
                f"than {_COARSEST:.0%} of what one sample may change. Use a smaller "
                "train.global_batch, or train fewer parameters (start.freeze, [lora])."
            )

    @property
    def per_clip(self) -> float:
        """Units in `clip`, a power of two: as many as a sum of `most` samples has room for."""
        return 2.0 ** (_RANGE_BITS - 1 - math.ceil(math.log2(self.most + 1)))

    @property
    def unit(self) -> float:
        """The distance of two neighbours on the grid."""
        return self.clip / self.per_clip

    @property
    def sensitivity(self) -> float:
        """The largest 2-norm of one sample's whole numbers, in units.

        A clipped gradient has at most `per_clip`, and rounding moves each number by 1/2 at most.
        """
        return (self.per_clip + math.sqrt(self.numbers) / 2) * (1 + 2.0**-40)
