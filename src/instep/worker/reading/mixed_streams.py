"""The streams of a recipe as a job divides and mixes them: `[[data.sources]]` of streams.

With `train.epochs` each part of each stream is counted, and an epoch has a planned number of
samples of each. With `train.steps` nothing is counted, and a part that ends begins again. Ways in:
`mixed_streams`, `told_of`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from instep.data.mixture import planned_shares
from instep.data.reading.streams.given import GivenStream
from instep.data.reading.streams.mixed import JoinedStreams, MixedStreams
from instep.data.reading.streams.shares import MixedPlan, seed_of
from instep.data.reading.streams.stream import Stream
from instep.data.reading.streams.turns import StreamPlan
from instep.data.torch_loader import LoaderParts
from instep.errors import DataError, RecipeError, SpecError
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.worker.reading.planned_sources import check_names
from instep.worker.reading.stream_facts import counted, mean_lengths

_MOST = 1 << 40
"""Samples of a part whose end is not known."""

_MILLION = 1_000_000


def mixed_streams(job: JobSpec, recipe: Recipe, folder: Path | None, writer: int) -> MixedStreams:
    """Divide and mix the streams of a recipe.

    Args:
        job: of the run.
        recipe: its `train` are several streams.
        folder: for what other processes continue from; None where there is none.
        writer: number of this process there.

    Raises:
        SpecError: the job names other streams, or asks for what they do not have.
        RecipeError: shares are of tokens, and nobody says how long samples are.
        DataError: a stream has no sample.
    """
    given, joined = recipe.given["train"], recipe.given["train"].dataset
    assert isinstance(joined, JoinedStreams), "several streams"
    check_names(job, joined.names)
    tables = {each["name"]: each for each in job.data.sources}
    ends = [tables[name].get("when_exhausted") == "end" for name in joined.names]
    divided = _Divided(job, joined, given, folder, writer)
    weights = np.array([float(tables[name].get("weight", 1.0)) for name in joined.names])
    if job.data.sources[0].get("of") == "tokens":
        weights = weights / divided.mean_lengths(recipe)
    shares = weights / weights.sum()
    if job.train.steps is not None:
        if any(ends):
            raise SpecError(
                f"data.sources: {joined.names[ends.index(True)]!r} has when_exhausted = 'end', and "
                f"with train.steps = {job.train.steps} no stream is counted. Set train.epochs, or "
                "when_exhausted = 'again'."
            )
        samples = job.train.steps * job.per_commit.global_batch
        plans = [divided.plan(number, None, samples) for number in range(len(ends))]
        plan = MixedPlan(tuple(plans), tuple(shares.tolist()), None, samples)
        return divided.streams(plan)
    sizes = divided.counted()
    planned = planned_shares(sizes.sum(1), weights, ends)
    if not planned.all():
        name = joined.names[int(np.flatnonzero(planned == 0)[0])]
        raise SpecError(
            f"data.sources: an epoch of {int(planned.sum()):,} samples has none of {name!r}, so "
            "small is its weight. Give it a larger one, or leave it out."
        )
    plans = [
        divided.plan(number, tuple(each.tolist()), int(each.sum()))
        for number, each in enumerate(sizes)
    ]
    exact = tuple((planned / planned.sum()).tolist())
    samples = int(planned.sum())
    return divided.streams(MixedPlan(tuple(plans), exact, tuple(planned.tolist()), samples))


class _Divided:
    """The streams of a recipe, each in as many parts."""

    def __init__(
        self,
        job: JobSpec,
        joined: JoinedStreams,
        given: LoaderParts,
        folder: Path | None,
        writer: int,
    ) -> None:
        self._job, self._joined, self._given = job, joined, given
        self._folder, self._writer = folder, writer
        self._parts = job.data.parts or 1
        self._window = max(1, job.data.window // (self._parts * len(joined.names)))

    def plan(self, source: int, sizes: tuple[int, ...] | None, samples: int) -> StreamPlan:
        sources = len(self._joined.names)
        return StreamPlan(self._parts, self._window, True, sizes, samples, source, sources)

    def streams(self, plan: MixedPlan, length: Any = None) -> MixedStreams:
        found = []
        for number, (name, dataset) in enumerate(self._joined.sources.items()):
            own = GivenStream(dataset, name=name), plan.streams[number]
            seed, first = seed_of(self._job.seed, number), number * self._parts
            found.append(Stream(*own, seed, self._folder, self._writer, first_file=first))
        return MixedStreams(found, plan, length)

    def counted(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Samples of each part of each stream, [streams, parts]."""
        found = counted(self._job, self._given, self._unknown(None), self._folder)
        sizes = np.array(found, np.int64).reshape(len(self._joined.names), self._parts)
        for name, own in zip(self._joined.names, sizes, strict=True):
            if not own.sum():
                raise DataError(
                    f"the stream {name!r} of Recipe.train has no sample: there is nothing to mix. "
                    "Give one that has samples, or leave it and its table out."
                )
        return sizes

    def mean_lengths(self, recipe: Recipe) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Tokens of a sample of each stream."""
        if not callable(recipe.length):
            raise RecipeError(
                "data.sources has weights of tokens, and nobody says how long samples of streams "
                "are: give Recipe(length=lambda samples, index: len(samples[index])), which is "
                "called with some samples of each; or leave of = 'tokens' out."
            )
        unknown, names = self._unknown(recipe.length), self._joined.names
        found = mean_lengths(self._job, self._given, unknown, self._folder, len(names))
        for name, mean in zip(names, found, strict=True):
            if not mean > 0:
                raise DataError(
                    f"the first samples of the stream {name!r} have a mean length of {mean:g}: "
                    "weights of tokens need one above 0. Give Recipe(length=...) that says it."
                )
        return np.array(found)

    def _unknown(self, length: Any) -> MixedStreams:
        sizes = (_MOST,) * self._parts
        plans = [self.plan(number, sizes, _MOST) for number in range(len(self._joined.names))]
        shares = (1 / len(plans),) * len(plans)
        return self.streams(MixedPlan(tuple(plans), shares, None, _MOST), length)


def told_of(mixed: MixedStreams) -> dict[str, Any]:
    """Fields of the event `data_balanced`: of streams that are not counted, shares of a million."""
    plan = mixed.plan
    sizes = [each.samples for each in plan.streams] if plan.planned is not None else []
    planned = plan.planned or [round(share * _MILLION) for share in plan.shares]
    return {
        "balance": "sources",
        "names": mixed.names,
        "before": sizes,
        "planned": [*planned],
        "class_weights": [],
        "seen_least": min((p // n for p, n in zip(planned, sizes, strict=False)), default=0),
    }
