"""Divides a recipe's data among the participants of a job, and refuses what cannot be divided.

How it is divided, `data/partition` knows, and who takes what in which round,
`data/participants.py`. Way in: `divide`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from instep.data.order import Indices
from instep.data.participants import OwnRounds
from instep.data.partition import COLUMNS, PARTITIONS
from instep.data.partition.regions import Regions
from instep.data.shard_sizes import shards_or_blocks, sizes_within
from instep.data.windowed import Windowed
from instep.errors import DataError, RecipeError, SpecError
from instep.recipe.recipe import Recipe
from instep.spec import JobSpec, RoundSpec
from instep.store.run_folder import RunFolder
from instep.words import a_or_an, listed
from instep.worker.member import Member


class OwnData(NamedTuple):
    """Whose data are whose."""

    train: Regions
    rounds: OwnRounds
    """What participants take of `train`, in each round."""
    validate: Regions | None
    """In its natural order; None without a validation set, or where it cannot be divided."""

    @property
    def validation_sizes(self) -> list[int]:
        """Samples of each participant in the validation set; empty where it is not divided."""
        sizes: list[int] = self.validate.sizes.tolist() if self.validate is not None else []
        return sizes


def divide(job: JobSpec, recipe: Recipe) -> OwnData | None:
    """The data of each participant; None where all share them.

    Raises:
        SpecError: a participant has no data.
        RecipeError: the recipe does not say what the partition needs, or something wrong.
    """
    rounds = job.sync.rounds
    if rounds is None or not job.own_data:
        return None
    samples, participants = len(recipe.train), job.sync.participants
    if participants > samples:
        raise SpecError(
            f"sync.participants = {participants} but the training set has {samples} samples: with "
            "sync.options.partition each participant has some of its own. Set sync.participants "
            f"to at most {samples}."
        )
    shares = _dealt(job, rounds, recipe, "train")
    assert shares is not None, "what is trained on can always be divided, or is refused"
    if without := [number for number, share in enumerate(shares) if not len(share)]:
        raise SpecError(
            f"sync.options.partition = {rounds.partition!r} leaves {len(without)} of "
            f"{participants} participants without data ({listed(without, 4)}), and each has to "
            f"train. {_MORE[rounds.partition]}"
        )
    windowed = None
    if job.data.order == "windowed":
        sizes = shards_or_blocks(recipe.train, samples, job.data.window)
        windowed = partial(_windowed, sizes, job.data.window)
    train = Regions(shares, job.seed, shuffle=job.data.shuffled, order_of=windowed)
    dealt = _dealt(job, rounds, recipe, "validate") if recipe.validate is not None else None
    validate = Regions(dealt, job.seed, shuffle=False) if dealt is not None else None
    return OwnData(train, OwnRounds.of_job(job, train.sizes), validate)


def _windowed(sizes: Indices, window: int, share: Indices | range, seed: int) -> Windowed:
    """The order of a participant's share of a set in shards of these sizes."""
    return Windowed(sizes_within(sizes, share), window, seed)


_MORE = {
    "blocks": "Set fewer sync.participants.",
    "labels": "Set a larger sync.options.skew, fewer sync.participants, or another seed.",
    "owner": "Have Recipe.owners name each of them, or set fewer sync.participants.",
}


def _dealt(
    job: JobSpec, rounds: RoundSpec, recipe: Recipe, name: str
) -> Sequence[Indices | range] | None:
    """The samples of each participant; None where only those to train on are known."""
    dataset, scheme, column = getattr(recipe, name), rounds.partition, None
    if scheme in COLUMNS:
        given = getattr(recipe, COLUMNS[scheme])
        if given is None:
            raise RecipeError(
                f"sync.options.partition = {scheme!r} needs Recipe.{COLUMNS[scheme]}, which was "
                "not given: a whole number for each sample, or a function of (dataset, index)."
            )
        if name == "validate" and not callable(given):
            return None
        column = _column(COLUMNS[scheme], given, dataset)
    dealt: Sequence[Indices | range] = PARTITIONS[scheme](
        len(dataset), job.sync.participants, column=column, skew=rounds.skew, seed=job.seed
    )
    return dealt


def _column(field: str, given: Sequence[int] | Callable[[Any, int], int], dataset: Any) -> Indices:
    """What the recipe says of each sample of a dataset.

    Raises:
        RecipeError: it is not a whole number for each.
    """
    samples = len(dataset)
    if callable(given):
        given = [given(dataset, index) for index in range(samples)]
    elif len(given) != samples:
        raise RecipeError(
            f"Recipe.{field} has {len(given)} numbers, and the training set has {samples} samples: "
            "one for each is wanted, in their order."
        )
    column = np.asarray(given)
    if column.shape != (samples,) or column.dtype.kind not in "iu":
        wrong = next((each for each in given if not isinstance(each, int)), given)
        raise RecipeError(
            f"Recipe.{field} gives {a_or_an(wrong)}, and a whole number for each sample is wanted."
        )
    return column.astype(np.int64)


def check(own: OwnData, member: Member, partition: str) -> None:
    """Log whose data are whose; when a run is resumed, refuse a division that has changed.

    Raises:
        DataError: it has.
    """
    before = RunFolder(member.run).last("data_divided") if member.checkpoint is not None else {}
    if before and before["digest"] != own.train.digest:
        raise DataError(
            f"sync.options.partition = {partition!r} divides the training set otherwise than when "
            "the run was started, and epochs of participants would not be exact. Have the recipe "
            "give the same samples, owners and labels; or start a new run from the model of this "
            f"one: --set start.model={member.run}"
        )
    member.emit(
        "data_divided",
        partition=partition,
        sizes=own.train.sizes.tolist(),
        validation_sizes=own.validation_sizes,
        digest=own.train.digest,
    )
