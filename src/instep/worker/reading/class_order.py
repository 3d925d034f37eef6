"""Warns before the first step where the windowed order takes one class after the other.

A set that is sorted by class is common (a folder for each class), and a window of it has few
classes. How that is measured, `data/mixing.py` knows. Way in: `said_of_classes`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
from torch.utils.data import Subset

from instep.data.mixing import mixing
from instep.data.order import AnyOrder, Indices
from instep.data.parts.order import PartsOrder
from instep.data.reading.generators import preserved
from instep.data.windowed import Windowed
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe

_COLUMNS = ("label", "labels")
_OF_A_COLUMN, _OF_A_FUNCTION = 1024, 64
"""Labels that are read of a window; a function may read the whole sample."""

Classes = Callable[[Indices], Sequence[Hashable]]


def said_of_classes(job: JobSpec, recipe: Recipe, order: AnyOrder | None) -> str:
    """A sentence on classes that the order of a job does not mix; empty if it does, or if nobody
    knows."""
    if not isinstance(order, Windowed | PartsOrder):
        return ""
    window = job.data.window
    try:
        with preserved():
            classes, each = _classes(job, recipe)
            found = mixing(order, order.samples, job.seed, window, classes, each=each)
    except Exception:  # it is no label of each sample: what needs one will say so
        return ""
    if found is None or not found.poor:
        return ""
    return (
        f"the training set seems to be sorted by class: a window of {window:,} samples has as much "
        f"variety as {found.here:.1f} equal classes, and the same number in the global order as "
        f"{found.shuffled:.1f}. Shuffle the set once (instep prepare --shuffle), or set a larger "
        "data.window, or data.order = 'global'"
    )


def _classes(job: JobSpec, recipe: Recipe) -> tuple[Classes, int]:
    """What gives the classes of samples, and how many to ask it for.

    Raises:
        Exception: of any kind; nobody knows the classes, or not in this form.
    """
    dataset, places = recipe.train, None
    given = job.data.labels or recipe.labels
    if job.data.split or (given is None and isinstance(dataset, Subset)):
        dataset, places = dataset.dataset, np.asarray(dataset.indices)
    if callable(given):
        label_of, each = given, _OF_A_FUNCTION
    else:
        values, each = _column(dataset, given), _OF_A_COLUMN

        def label_of(_: Any, index: int) -> Any:
            return values[index]

    def classes(indices: Indices) -> list[Hashable]:
        chosen = indices if places is None else places[indices]
        labels = [label_of(dataset, index) for index in chosen.tolist()]
        return [label.item() if hasattr(label, "item") else label for label in labels]

    return classes, each


def _column(dataset: Any, given: Any) -> Any:
    """The labels of a dataset: as given, a column of it, or those that torchvision's have."""
    if given is None:
        given = next((name for name in _COLUMNS if name in getattr(dataset, "columns", ())), None)
    if given is None:
        return dataset.targets
    return dataset.column(given) if isinstance(given, str) else given
