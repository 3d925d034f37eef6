"""Even parts of a keyed permutation: participants that are alike."""

from __future__ import annotations

import numpy as np

from instep.data.order import Indices, Order, key, micro_batch

_OF_DIVISION = 15
"""What a key is drawn for: whose a sample is."""


def at_random(
    samples: int,
    participants: int,
    *,
    column: Indices | None = None,
    skew: float = 0.0,
    seed: int = 0,
) -> list[Indices]:
    """Deal samples by a keyed permutation; the sizes of the parts differ by one at most."""
    order = Order(samples, key(seed, _OF_DIVISION))
    cuts = [micro_batch(0, samples, number, participants) for number in range(participants)]
    return [np.sort(order.indices(0, *cut)) for cut in cuts]
