"""How long the samples of a training set are: as the recipe, a column or a `DataLoader` says.

A column of shards is looked at where it lies, so nothing is kept for each sample; what the recipe
says takes 4 bytes for each. Way in: `lengths_of`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Subset

from instep.data.lengths import Lengths
from instep.data.order import Indices
from instep.data.torch_loader import LoaderParts
from instep.errors import DataError, RecipeError
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.worker.reading.data_split import listed_values, named_column


@dataclass(frozen=True)
class ListedLengths:
    """Lengths of all samples, in memory."""

    values: np.ndarray[Any, np.dtype[np.int32]]

    def __call__(self, indices: Indices) -> Indices:
        """Those of some samples."""
        return self.values[indices].astype(np.int64)


@dataclass(frozen=True)
class CheckedLengths:
    """Lengths that are looked up in a column, and checked as they are."""

    name: str
    column: Any
    """Called with indices."""

    def __call__(self, indices: Indices) -> Indices:
        """Those of some samples.

        Raises:
            DataError: one is no length.
        """
        return _checked(self.name, self.column(indices), indices)


@dataclass(frozen=True)
class LengthsOfSide:
    """Lengths of some of the samples."""

    whole: Lengths
    chosen: Any
    """[samples]: which they are."""

    def __call__(self, indices: Indices) -> Indices:
        """Those of some of them."""
        return self.whole(np.asarray(self.chosen[indices], np.int64))


def lengths_of(job: JobSpec, recipe: Recipe) -> Lengths:
    """How long each sample to train on is.

    Raises:
        RecipeError: nobody says it, or the dataset has no such column.
        DataError: what is said is no length of each sample.
    """
    parts: LoaderParts = recipe.given["train"]
    grouped = parts.grouped
    given = job.data.length or recipe.length
    if given is None or (isinstance(given, str) and not given):
        if grouped is None:
            raise RecipeError(
                f"train.tokens_per_batch = {job.train.tokens_per_batch} needs to know how long "
                "samples are: set data.length to a column of the dataset, or give "
                "Recipe(length=...), a number for each sample or a function of (dataset, index)."
            )
        name = f"{grouped.name}.lengths"
        return _listed(name, listed_values("length", grouped.lengths), len(grouped.lengths))
    dataset = parts.dataset
    if isinstance(given, str):
        return _of_column(given, dataset)
    if callable(given):
        found = _called(given, *whole_of(dataset))
    else:
        values = listed_values("length", given)
        if len(values) == len(dataset):
            return _listed("Recipe.length", values, len(dataset))
        inner, chosen = whole_of(dataset)
        found = _listed("Recipe.length", values, len(inner))
        return found if chosen is None else LengthsOfSide(found, chosen)
    return found


def _called(given: Callable[[Any, int], Any], dataset: Any, chosen: Any) -> ListedLengths:
    indices = range(len(dataset)) if chosen is None else chosen.tolist()
    found = []
    for index in indices:
        try:
            found.append(given(dataset, index))
        except Exception as error:
            raise RecipeError(
                f"Recipe.length(dataset, {index}) raises {type(error).__name__}: {error}. It is "
                "called with the dataset and each index, and returns the sample's length."
            ) from error
    return _listed("Recipe.length", found, len(indices))


def _listed(name: str, given: Any, samples: int) -> ListedLengths:
    if len(given) != samples:
        raise DataError(
            f"{name} has {len(given):,} values, and the dataset has {samples:,} samples: one for "
            "each is wanted, in their order."
        )
    return ListedLengths(_checked(name, _array_of(given), np.arange(samples)).astype(np.int32))


def _array_of(given: Any) -> Any:
    """Whole numbers as they are; else each as it was given."""
    with suppress(ValueError):  # lists of unequal length
        if (values := np.asarray(given)).dtype.kind in "iu":
            return values
    each = np.empty(len(given), object)
    for number, value in enumerate(given):
        each[number] = value
    return each


def _checked(name: str, values: Any, indices: Indices) -> Indices:
    if values.ndim != 1:
        wrong: Any = [0]
    elif values.dtype.kind in "iu":
        wrong = np.flatnonzero((values < 0) | (values >= 1 << 31))
    else:
        wrong = [at for at, value in enumerate(values) if not _is_length(value)]
    if len(wrong):
        at = int(wrong[0])
        raise DataError(
            f"{name} is {repr(values[at : at + 1].tolist()[0])[:40]} for sample "
            f"{int(indices[at])}: a length is a whole number from 0 on, below 2^31, such as the "
            "sample's tokens."
        )
    found: Indices = values.astype(np.int64)
    return found


def _is_length(value: Any) -> bool:
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return whole and 0 <= value < 1 << 31


def _of_column(name: str, dataset: Any) -> Lengths:
    """Lengths by a column: the numbers in it, or how much each sample has of it."""
    inner, chosen = whole_of(dataset)
    title = f"the column {name!r}"
    if hasattr(inner, "lengths_in"):
        found: Lengths = CheckedLengths(title, inner.lengths_in(name))
    else:
        found = _listed(title, named_column("data.length", name, inner), len(inner))
    return found if chosen is None else LengthsOfSide(found, chosen)


def whole_of(dataset: Any) -> tuple[Any, Any]:
    """The dataset of a `Subset`, of whatever depth, and which of its samples there are."""
    chosen: Any = None
    while isinstance(dataset, Subset):
        own = np.asarray(dataset.indices, np.int64)
        chosen = own if chosen is None else own[chosen]
        dataset = dataset.dataset
    return dataset, chosen
