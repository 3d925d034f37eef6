"""A split: what is asked for, what is given, and what a function that divides keeps to.

Ways in: `Request`, `Sides`, `Scheme`. Nothing here loads numpy: a job is checked, and its processes
are on their way, before that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from instep.data.order import Indices
    from instep.data.splits.columns import Column


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be split, and how."""

    samples: int
    """In the dataset, 1 or more."""
    seed: int = 0
    """The same seed gives the same sides on every machine."""
    validation: float = 0.1
    """Share of the validation side, above 0 and below 1; of no meaning with `folds`."""
    folds: int = 0
    """2 or more; 0: one validation side."""
    fold: int = 0
    """Which of the folds is the validation side, from 0."""
    labels: Column | None = None
    groups: Column | None = None
    times: Column | None = None
    gap: float | str = 0
    """Length of time before the validation side that nothing is trained on. A number in the unit of
    the times, seconds for dates; or a text such as `"7d"`."""
    embargo: float | str | None = None
    """Length of time after it, where training takes what is later still; None: it takes nothing."""


class Sides(NamedTuple):
    """The two sides of a split, each [count] int64 in ascending order."""

    train: Indices
    validate: Indices


class Scheme(Protocol):
    """Divides a dataset in two."""

    def __call__(self, request: Request, /) -> Sides:
        """The samples of each side.

        Returns:
            Disjoint, in ascending order, neither of them empty. Over all folds of a request each
            sample is in one validation side at most.

        Raises:
            DataError: there is no such split of these samples, or a value of a column is missing.
        """
