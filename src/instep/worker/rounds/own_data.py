"""Divides a recipe's data among the participants of a job, and refuses what cannot be divided.

How it is divided, `data/partition` knows, and who takes what in which round,
`data/participants.py`. Way in: `divide`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from instep.data.order import Indices
from instep.data.participants import OwnRounds
from instep.data.partition import COLUMNS, PARTITIONS
from instep.data.partition.regions import Regions
from instep.data.parts.cut import in_parts, part_of_each
from instep.data.shard_sizes import shards_or_blocks, sizes_within
from instep.data.windowed import Windowed
from instep.engine.member import Member
from instep.errors import DataError, SpecError
from instep.job.spec import JobSpec
from instep.job.sync.rounds import RoundSpec
from instep.recipe.recipe import Recipe
from instep.store.run_folder import RunFolder
from instep.words import listed
from instep.worker.rounds.participant_columns import ParticipantColumns, columns_of, named_labels

MOST_COUNTS = 10_000
"""Counts of labels that are logged, of all participants."""


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
    return divided(job, recipe) if job.own_data else None


def divided(job: JobSpec, recipe: Recipe) -> OwnData:
    """The data of each participant of a job in which each has some of its own.

    Raises:
        SpecError, RecipeError: as `divide`.
    """
    rounds = job.sync.rounds or RoundSpec()
    samples, participants = len(recipe.train), job.sync.participants
    if participants > samples:
        raise SpecError(
            f"sync.participants = {participants} but the training set has {samples} samples: with "
            "sync.options.partition each participant has some of its own. Set sync.participants "
            f"to at most {samples}."
        )
    columns = _columns(job, rounds.partition, recipe)
    shares = _dealt(job, rounds, samples, columns.train if columns is not None else None)
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
    validate = None
    if recipe.validate is not None and (columns is None or columns.validate is not None):
        column = columns.validate if columns is not None else None
        dealt = _dealt(job, rounds, len(recipe.validate), column)
        validate = Regions(dealt, job.seed, shuffle=False)
    parts = job.data.parts
    lots = train.lots(in_parts(recipe.train, parts)[0]) if parts else []
    return OwnData(train, OwnRounds.of_job(job, train.sizes, lots), validate)


def validated_apart(job: JobSpec, own: OwnData | None) -> list[int]:
    """Samples of each participant in the validation set, where each is measured by itself."""
    return own.validation_sizes if own is not None and not job.sync.sealed else []


def _columns(job: JobSpec, scheme: str, recipe: Recipe) -> ParticipantColumns | None:
    """Columns that a partition deals by; None if it needs nothing."""
    if scheme == "parts":  # those of a validation set are its own, unless it is the other side
        parts, other = job.data.parts, recipe.validate if job.data.split else None
        validate = part_of_each(other, parts) if other is not None else None
        return ParticipantColumns(part_of_each(recipe.train, parts), validate)
    return columns_of(job, scheme, recipe) if scheme in COLUMNS else None


def _windowed(sizes: Indices, window: int, share: Indices | range, seed: int) -> Windowed:
    """The order of a participant's share of a set in shards of these sizes."""
    return Windowed(sizes_within(sizes, share), window, seed)


_MORE = {
    "blocks": "Set fewer sync.participants.",
    "labels": "Set a larger sync.options.skew, fewer sync.participants, or another seed.",
    "parts": "Set fewer data.parts and sync.participants.",
    "owner": "Have Recipe.owners name each of them, or set fewer sync.participants.",
    "random": "Set fewer sync.participants.",
}


def _dealt(
    job: JobSpec, rounds: RoundSpec, samples: int, column: Indices | None
) -> Sequence[Indices | range]:
    """The samples of each participant."""
    dealt: Sequence[Indices | range] = PARTITIONS[rounds.partition](
        samples, job.sync.participants, column=column, skew=rounds.skew, seed=job.seed
    )
    return dealt


def check(own: OwnData, member: Member, recipe: Recipe) -> None:
    """Log whose data are whose; when a run is resumed, refuse a division that has changed.

    Raises:
        DataError: it has.
    """
    _refuse_another(member, own.train.digest)
    member.emit(
        "data_divided",
        partition=member.job.own_data,
        sizes=own.train.sizes.tolist(),
        validation_sizes=own.validation_sizes,
        digest=own.train.digest,
        labels=[] if member.job.sync.sealed else _labels_of_each(own, member.job, recipe),
    )


def check_hidden(member: Member, digest: int) -> None:
    """Log that data are divided, and nothing of who has what; refuse a division that has changed.

    Args:
        member: of the run.
        digest: stands for the division to whoever has the run's secret; 32 bits.

    Raises:
        DataError: it has.
    """
    _refuse_another(member, digest)
    told = {"partition": member.job.own_data, "sizes": [], "validation_sizes": [], "labels": []}
    member.emit("data_divided", digest=digest, **told)


def _refuse_another(member: Member, digest: int) -> None:
    partition = member.job.own_data
    before = RunFolder(member.run).last("data_divided") if member.checkpoint is not None else {}
    if before and before["digest"] != digest:
        raise DataError(
            f"sync.options.partition = {partition!r} divides the training set otherwise than when "
            "the run was started, and epochs of participants would not be exact. Have the recipe "
            "give the same samples, owners and labels; or start a new run from the model of this "
            f"one: --set start.model={member.run}"
        )


def _labels_of_each(own: OwnData, job: JobSpec, recipe: Recipe) -> list[dict[str, int]]:
    """How often each participant has each label; empty if nobody says it, or not cheaply."""
    labels, participants = named_labels(job, recipe), len(own.train.sizes)
    if labels is None:
        return []
    names, codes = np.unique(labels, return_inverse=True)
    if len(names) * participants > MOST_COUNTS:
        return []
    counts = []
    for begin, size in zip(own.train.offsets.tolist(), own.train.sizes.tolist(), strict=False):
        found = np.bincount(codes[own.train.indices(0, begin, begin + size)], minlength=len(names))
        counts.append({str(n): c for n, c in zip(names, found.tolist(), strict=True) if c})
    return counts
