"""Which samples are trained on, and which are validated on: the table of splits.

A split is a pure function of its request: the number of samples, the seed, and columns with a value
for each sample. To add one: write a function that keeps the promises of `Scheme` in a file of its
own, add its line here, and its columns if it needs any. `sides.py` has what several of them need,
`columns.py` checks what a column holds. Nothing here knows datasets, processes or models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from instep.registry import Registry

if TYPE_CHECKING:  # a job is checked, and its processes are on their way, before numpy is loaded
    from instep.data.splits.columns import Column
    from instep.data.splits.sides import Sides


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


SPLITS = Registry(
    "split",
    {
        "blocks": "instep.data.splits.blocks:blocks",
        "group": "instep.data.splits.group:group",
        "hash": "instep.data.splits.hash:by_hash",
        "random": "instep.data.splits.blocks:random",
        "stratified": "instep.data.splits.stratified:stratified",
        "stratified_group": "instep.data.splits.stratified_group:stratified_group",
        "time": "instep.data.splits.time:time",
    },
)

COLUMNS: Mapping[str, tuple[str, ...]] = {
    "group": ("groups",),
    "hash": ("groups",),
    "stratified": ("labels",),
    "stratified_group": ("labels", "groups"),
    "time": ("times",),
}
"""The columns that a split needs: fields of `Request` and of `Recipe`, and keys of `[data]`."""
