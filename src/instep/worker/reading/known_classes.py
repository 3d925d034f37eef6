"""Classes of the samples to train on: looked up where they lie, if that can be.

Ways in: `known_classes`, `labels_of`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from instep.data.class_codes import CountedCodes
from instep.data.order import Indices
from instep.data.splits.columns import Classes, Column
from instep.data.torch_loader import LoaderParts
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.worker.reading.data_split import MOST_CLASSES, listed_values, named_column
from instep.worker.reading.sample_lengths import whole_of


class KnownClasses(NamedTuple):
    """The class of each sample to train on."""

    codes: CountedCodes
    names: list[str]
    """A name for each; empty if they are too many."""

    @property
    def counts(self) -> Indices:
        """Samples of each class."""
        return self.codes.counts


def known_classes(job: JobSpec, recipe: Recipe, samples: int) -> KnownClasses:
    """The classes of the samples to train on: looked up where they lie, if that can be."""
    named = job.data.labels or recipe.labels
    whole, chosen = whole_of(recipe.train)
    if isinstance(named, str) and hasattr(whole, "labels_in") and (read := whole.labels_in(named)):
        some = read if chosen is None else lambda indices: read(chosen[indices])
        codes, labels = CountedCodes.of_column(some, samples)
        return KnownClasses(codes, [*map(str, labels)] if len(labels) <= MOST_CLASSES else [])
    classes = Classes.of(labels_of(job, recipe), samples)
    few = len(classes.names) if len(classes.names) <= MOST_CLASSES else 0
    names = [classes.shown(code).strip("'") for code in range(few)]
    return KnownClasses(CountedCodes.of_array(classes.codes), names)


def told_of_classes(
    how: str, classes: KnownClasses, planned: Indices, weights: list[float]
) -> dict[str, Any]:
    """Fields of the event `data_balanced`."""
    names = classes.names
    return {
        "balance": how,
        "names": names,
        "before": classes.counts.tolist() if names else [],
        "planned": planned.tolist() if names else [],
        "class_weights": weights if names else [],
        "seen_least": int((planned // classes.counts).min()),
    }


def labels_of(job: JobSpec, recipe: Recipe) -> Column:
    """The class of each sample to train on.

    Raises:
        RecipeError: nobody says it, or the dataset has no such column.
    """
    parts: LoaderParts = recipe.given["train"]
    dataset, named = parts.dataset, job.data.labels
    given = named if named and not job.data.split else recipe.labels
    if given is None:
        given = getattr(dataset, "targets", None)
    if given is None:
        raise RecipeError(
            f"data.balance = {job.data.balance!r} needs labels, which were not given: set "
            "data.labels to a column of the dataset, or give Recipe(labels=...), a value for each "
            "sample or a function of (dataset, index)."
        )
    if isinstance(given, str):
        return Column(f"the column {given!r}", named_column("data.labels", given, dataset))
    if callable(given):
        given = [given(dataset, index) for index in range(len(dataset))]
    return Column("Recipe.labels", listed_values("labels", given))
