"""The numbers by which samples are dealt to participants: their owners, or their classes.

They come from a column of the dataset (`data.owners`, `data.labels`) or from the recipe. Whole
numbers of the recipe count as they are; text, and whatever a column has, is numbered in its order.
Way in: `columns_of`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from instep.data.order import Indices
from instep.data.partition import COLUMNS
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.words import a_or_an
from instep.worker.reading.data_split import named_column

MOST_ASKED = 20_000
"""Samples that a function is called for only to count labels."""

Array = np.ndarray[Any, np.dtype[Any]]


class ParticipantColumns(NamedTuple):
    """A number for each sample."""

    train: Indices
    validate: Indices | None
    """None where only those to train on are known."""


def columns_of(job: JobSpec, scheme: str, recipe: Recipe) -> ParticipantColumns:
    """What a partition deals by.

    Raises:
        RecipeError: nobody says it of each sample, or it is no number and no text.
    """
    field = COLUMNS[scheme]
    named = getattr(job.data, field)
    # the sides of a split have no columns: `data_split` has looked into them
    given = named if named and not job.data.split else getattr(recipe, field)
    if given is None:
        raise RecipeError(
            f"sync.options.partition = {scheme!r} needs Recipe.{field}, which was not given: a "
            "whole number or a text for each sample, or a function of (dataset, index). Or set "
            f"data.{field} to a column of the dataset."
        )
    dataset, validate = recipe.train, recipe.validate
    if not (callable(given) or (isinstance(given, str) and hasattr(validate, "column"))):
        validate = None
    own = _values(field, given, dataset)
    others = _values(field, given, validate) if validate is not None else None
    if named or isinstance(given, str) or "U" in own.dtype.kind:
        known = np.unique(own)
        _check_owners(scheme, _name(field, given), len(known), job.sync.participants)
        own = _numbered(own, known)
        if others is not None:
            others = _numbered(others, known)
    return ParticipantColumns(
        own.astype(np.int64), None if others is None else others.astype(np.int64)
    )


def named_labels(job: JobSpec, recipe: Recipe) -> Array | None:
    """The label of each sample to train on; None if nobody says it, or only a function does that
    would be called for many."""
    given = job.data.labels if job.data.labels and not job.data.split else recipe.labels
    if given is None or (callable(given) and len(recipe.train) > MOST_ASKED):
        return None
    with suppress(RecipeError):  # labels of another set, which nothing else needs here
        return _values("labels", given, recipe.train)
    return None


def _check_owners(scheme: str, name: str, owners: int, participants: int) -> None:
    if scheme == "owner" and owners > participants:
        raise RecipeError(
            f"{name} has {owners:,} owners, and there are sync.participants = {participants}. Set "
            f"sync.participants = {owners}."
        )


def _numbered(values: Array, known: Array) -> Indices:
    """The place of each value among the known ones, which are in order; others come after them."""
    places = np.minimum(np.searchsorted(known, values), len(known) - 1)
    new = known[places] != values
    places[new] = len(known) + np.searchsorted(np.unique(values[new]), values[new])
    return places.astype(np.int64)


def _name(field: str, given: Any) -> str:
    return f"the column {given!r}" if isinstance(given, str) else f"Recipe.{field}"


def _values(field: str, given: Any, dataset: Any) -> Array:
    """What is said of each sample of a dataset: [samples], whole numbers or text.

    Raises:
        RecipeError: it is something else, or not of each.
    """
    samples, name = len(dataset), _name(field, given)
    if isinstance(given, str):
        given = named_column(f"data.{field}", given, dataset)
    elif callable(given):
        given = [given(dataset, index) for index in range(samples)]
    if len(given) != samples:
        raise RecipeError(
            f"{name} has {len(given)} values, and the training set has {samples} samples: one for "
            "each is wanted, in their order."
        )
    column = np.asarray(given)
    if column.shape != (samples,) or column.dtype.kind not in "iuU":
        wrong = next((each for each in given if not isinstance(each, int | str)), given)
        raise RecipeError(
            f"{name} gives {a_or_an(wrong)}, and a whole number or a text for each sample is "
            "wanted."
        )
    return column
