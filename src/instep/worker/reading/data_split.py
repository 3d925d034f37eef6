"""Divides a recipe's dataset into the side to train on and the side to validate on.

It is done before anything reads the dataset, from columns alone. A side is a `torch.utils.data`
`Subset` in the order of the dataset, so a position in a side is what order, ledger and audit have
for an index. Which samples are on which side, `data/splits` knows. Way in: `split_data`.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

import numpy as np
import torch

from instep.data.loader import Loader
from instep.data.order import Indices, key
from instep.data.partition import COLUMNS as PARTITION_COLUMNS
from instep.data.reading import generators
from instep.data.samples.duplicates import Duplicates, duplicates
from instep.data.splits import COLUMNS, SPLITS, Request, Sides
from instep.data.splits.columns import Classes, Column
from instep.engine.member import Member
from instep.errors import DataError, RecipeError, near_miss
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.store.run_folder import RunFolder
from instep.words import a_or_an

_OF_FIT = 24
"""Purpose of a key: what `Recipe.fit` draws."""

MOST_CLASSES = 1000
"""More different labels are not counted for the log."""

LOOK_S = 1.0
"""For so long the samples of each side are read, to find those that are on both."""


class SplitData(NamedTuple):
    """A recipe whose datasets are the sides of a split."""

    recipe: Recipe
    sides: Sides | None
    """Indices in the dataset that was divided; None where none was."""
    samples: int
    """Of that dataset."""
    labels: Column | None = None
    """Labels of that dataset, where the split needs them."""

    @property
    def digests(self) -> list[int]:
        """Digests of which samples are on each side, 32 bits each."""
        return [zlib.crc32(side.astype("<i8").tobytes()) for side in self.sides or ()]


def split_data(job: JobSpec, recipe: Recipe) -> SplitData:
    """The recipe with its sides, if the job splits, else as it is; its `fit` has been called.

    Raises:
        RecipeError: it has a validation dataset already, or not the columns that the split needs.
        DataError: its samples cannot be split so.
    """
    data, parts = job.data, recipe.given["train"]
    dataset, samples = parts.dataset, len(parts.dataset)
    if not data.split:
        if recipe.fit is not None:  # the list of all may be of more samples than memory holds
            _fit(job, recipe, dataset, np.arange(samples))
        return SplitData(recipe, None, samples)
    if recipe.validate is not None:
        raise RecipeError(
            f"data.split = {data.split!r} divides Recipe.train, and Recipe.validate was given, "
            "too: there can be one validation set. Leave one of the two out."
        )
    columns = {name: _column(job, recipe, name, dataset) for name in COLUMNS.get(data.split, ())}
    sides: Sides = SPLITS[data.split](
        Request(
            samples=samples,
            seed=job.seed,
            validation=data.validation_share,
            folds=data.folds or 0,
            fold=data.fold,
            gap=data.gap,
            embargo=data.embargo,
            **columns,
        )
    )
    _fit(job, recipe, dataset, sides.train)
    given = {
        "train": parts.side(sides.train, trained=True),
        "validate": parts.side(sides.validate, trained=False),
    }
    changes = {}
    if (field := PARTITION_COLUMNS.get(job.own_data)) is not None:
        changes[field] = _of_side(job, recipe, field, dataset)
    if (job.own_data and (data.labels or "labels" in columns)) or data.balance:
        changes["labels"] = _of_side(job, recipe, "labels", dataset)  # to count those of each
    return SplitData(recipe.with_data(given, **changes), sides, samples, columns.get("labels"))


def _fit(job: JobSpec, recipe: Recipe, dataset: Any, indices: Indices) -> None:
    """Have the recipe learn from the samples to train on, with generators that the seed sets.

    Raises:
        RecipeError: it gives something back, which would be lost.
    """
    if recipe.fit is None:
        return
    with generators.preserved():
        generators.seed_all(key(job.seed, _OF_FIT))
        given = recipe.fit(dataset, indices)
    if given is not None:
        raise RecipeError(
            f"Recipe.fit returned {a_or_an(given)}, which nothing uses. Set what it has learnt on "
            "the dataset, or copy it into a buffer of the model, and return nothing."
        )


def _column(job: JobSpec, recipe: Recipe, field: str, dataset: Any) -> Column:
    """A value for each sample: of the dataset's column, or as the recipe says."""
    given = getattr(job.data, field, "") or getattr(recipe, field)
    if given is None:
        raise RecipeError(
            f"data.split = {job.data.split!r} needs {field}, which were not given: set "
            f"data.{field} to a column of the dataset, or give Recipe({field}=...), a value for "
            "each sample or a function of (dataset, index)."
        )
    if isinstance(given, str):
        return Column(f"the column {given!r}", named_column(f"data.{field}", given, dataset))
    if callable(given):
        return Column(f"Recipe.{field}", [_plain(given(dataset, n)) for n in range(len(dataset))])
    return Column(f"Recipe.{field}", listed_values(field, given))


def named_column(key: str, name: str, dataset: Any) -> Any:
    """A column of a dataset that has columns, as shards do.

    Raises:
        RecipeError: it has none, or not this one.
    """
    if not hasattr(dataset, "column"):
        raise RecipeError(
            f"{key} = {name!r} is a column, and Recipe.train is {a_or_an(dataset)}, which has no "
            f"columns. Give Recipe({key.partition('.')[2]}=...), a value for each sample."
        )
    try:
        return dataset.column(name)
    except KeyError:
        known = map(str, getattr(dataset, "columns", ()))
        raise RecipeError(
            f"{key} = {name!r}: there is no such column. {near_miss(name, known)}"
        ) from None


def listed_values(field: str, given: Any) -> Sequence[Any] | np.ndarray[Any, Any]:
    """Values of a field of the recipe, one for each sample.

    Raises:
        RecipeError: they cannot be counted.
    """
    if isinstance(given, torch.Tensor):
        return given.detach().cpu().numpy()
    if isinstance(given, np.ndarray):
        return given
    if not isinstance(given, Sized):
        raise RecipeError(
            f"Recipe.{field} is {a_or_an(given)}, and a value for each sample is wanted, or a "
            "function of (dataset, index)."
        )
    return [_plain(each) for each in given]  # type: ignore[attr-defined]


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor | np.generic) else value


def _of_side(
    job: JobSpec, recipe: Recipe, field: str, dataset: Any
) -> Callable[[Any, int], Any] | None:
    """What the recipe says of samples of a side, by their position in it."""
    given = getattr(job.data, field, "") or getattr(recipe, field)
    if given is None:
        return None
    if callable(given):
        return lambda side, index: given(dataset, side.indices[index])
    values = _column(job, recipe, field, dataset).checked(len(dataset))
    return lambda side, index: _plain(values[side.indices[index]])


def check(split: SplitData, member: Member, train: Loader, validation: Loader | None) -> None:
    """Log the split, and what is on both sides; when a run is resumed, refuse one that has changed.

    Raises:
        DataError: it has.
    """
    if split.sides is None or validation is None:
        return
    resumed, data = member.checkpoint is not None, member.job.data
    if resumed:
        _check_same(split, RunFolder(member.run).last("data_split"), data.changed == "accept")
    event: dict[str, Any] = {
        "split": data.split,
        "samples": split.samples,
        "train": len(split.sides.train),
        "validation": len(split.sides.validate),
        "fold": data.fold,
        "folds": data.folds or 0,
        "digests": split.digests,
        **_counted(split.labels, split.sides, split.samples),
    }
    if not resumed:
        found = duplicates(train.contents(LOOK_S), validation.contents(LOOK_S))
        if found.twins:
            member.emit("warning", text=_said(found, split.sides))
        event |= {
            "looked_at": found.looked_at,
            "duplicates": len(found.twins),
            "example": _example(found, split.sides),
        }
    member.emit("data_split", **event)


def _counted(labels: Column | None, sides: Sides, samples: int) -> dict[str, Any]:
    """How often each label is on each side, if they are few."""
    if labels is None:
        return {}
    known = Classes.of(labels, samples)
    if len(known.names) > MOST_CLASSES:
        return {}
    names = [str(_plain(name)) for name in known.names]
    counts = [np.bincount(known.codes[side], minlength=len(names)).tolist() for side in sides]
    return {"classes": [dict(zip(names, side, strict=True)) for side in counts]}


def _check_same(split: SplitData, before: dict[str, Any], accepts: bool) -> None:
    if not before or before["digests"] == split.digests:
        return
    new = "or start a new run from the model of this one: instep run JOB --set start.model=RUN"
    if before["samples"] != split.samples:
        raise DataError(
            f"the dataset that is split had {before['samples']:,} samples when the run was started "
            f"and has {split.samples:,} now: other samples would be on the two sides. Put it back "
            f"as it was; {new}"
        )
    if before["digests"][0] != split.digests[0] or not accepts:
        raise DataError(
            "other samples are on the two sides of the split than when the run was started: "
            f"labels, groups or times have changed. Put them back as they were; {new}"
        )


def _example(found: Duplicates, sides: Sides) -> list[int]:
    """The first sample to validate on that is trained on too, and its twin, in the dataset."""
    if not found.twins:
        return []
    validated, trained = found.twins[0]
    return [int(sides.validate[validated]), int(sides.train[trained])]


def _said(found: Duplicates, sides: Sides) -> str:
    validated, trained = _example(found, sides)
    compared = found.looked_at
    whole = compared == [len(sides.train), len(sides.validate)]
    looked = "" if whole else f" (found among {compared[0]:,} of those trained on)"
    return (
        f"{len(found.twins):,} of {compared[1]:,} samples to validate on have the same content as "
        f"one that is trained on{looked}: sample {validated} is the same as sample {trained}. The "
        "validation looks better than it is. Leave them out, or keep them on one side: give both "
        "the same group, and set data.split = 'group'."
    )
