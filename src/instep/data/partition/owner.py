"""The recipe says to whom each sample belongs."""

from __future__ import annotations

import numpy as np

from instep.data.order import Indices
from instep.errors import RecipeError


def owner(
    samples: int,
    participants: int,
    *,
    column: Indices | None,
    skew: float = 0.0,
    seed: int = 0,
) -> list[Indices]:
    """Deal samples by a column of participants' numbers.

    Raises:
        RecipeError: a number is none of a participant.
    """
    assert column is not None, "an owner for each sample"
    strange = np.flatnonzero((column < 0) | (column >= participants))
    if len(strange):
        raise RecipeError(
            f"Recipe.owners says {column[strange[0]]} of sample {strange[0]}, and there are "
            f"sync.participants = {participants}: owners are whole numbers from 0 to "
            f"{participants - 1}. Number yours with numpy.unique(owners, return_inverse=True)[1], "
            "or set sync.participants."
        )
    order = np.argsort(column, kind="stable")
    return np.split(order, np.searchsorted(column[order], np.arange(1, participants)))
