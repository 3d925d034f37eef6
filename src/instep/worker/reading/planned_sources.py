"""How often samples of several datasets come: the shares of `[[data.sources]]`, as whole numbers.

Ways in: `planned_sources`, `check_sources`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.balance import ClassOrder
from instep.data.mixture import JoinedSources, SourceMembers, planned_shares
from instep.data.order import Indices, Order, key
from instep.data.reading.streams.mixed import MixedStreams
from instep.errors import RecipeError, SpecError, near_miss
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.words import listed
from instep.worker.reading.sample_lengths import lengths_of

_OF_LENGTHS = 51
"""Purpose of a key: whose lengths are looked at."""

_LOOKED_AT = 1024
"""Samples of a source whose lengths tell how many tokens one has."""


def planned_sources(job: JobSpec, recipe: Recipe) -> tuple[ClassOrder, dict[str, Any]]:
    """The order of a mixture, and the fields of the event `data_balanced`.

    Raises:
        SpecError: `data.sources` and the recipe name other sources.
        RecipeError: shares are of tokens, and nobody says how long samples are.
    """
    check_sources(job, recipe)
    joined: JoinedSources = recipe.train
    given, names = {each["name"]: each for each in job.data.sources}, joined.names
    sizes = joined.sizes
    for name, size in zip(names, sizes.tolist(), strict=True):
        if not size:
            raise RecipeError(f"Recipe.train[{name!r}] has length zero: there is nothing to mix.")
    weights = np.array([float(given[name].get("weight", 1.0)) for name in names])
    if job.data.sources[0].get("of") == "tokens":
        weights = weights / _mean_lengths(job, recipe, sizes)
    ends = [given[name].get("when_exhausted") == "end" for name in names]
    planned = planned_shares(sizes, weights, ends)
    if not planned.all():
        name = names[int(np.flatnonzero(planned == 0)[0])]
        raise SpecError(
            f"data.sources: an epoch of {int(planned.sum()):,} samples has none of {name!r}, so "
            "small is its weight. Give it a larger one, or leave it out."
        )
    told = {
        "balance": "sources",
        "names": names,
        "before": sizes.tolist(),
        "planned": planned.tolist(),
        "class_weights": [],
        "seen_least": int((planned // sizes).min()),
    }
    return ClassOrder(SourceMembers(sizes), planned, job.seed), told


def check_sources(job: JobSpec, recipe: Recipe) -> None:
    """Refuse a job that names other sources than its recipe has.

    Raises:
        SpecError: it does.
    """
    joined, sources = recipe.train, job.data.sources
    if isinstance(joined, MixedStreams):  # by these names they were mixed
        return
    if not isinstance(joined, JoinedSources):
        if not sources:
            return
        raise SpecError(
            f"data.sources names {listed([each['name'] for each in sources], 4)}, and Recipe.train "
            "is one dataset. Give Recipe(train={name: dataset, ...}), or leave data.sources out."
        )
    check_names(job, joined.names)


def check_names(job: JobSpec, names: list[str]) -> None:
    """Refuse a job that names other sources than these.

    Raises:
        SpecError: it does, or names none.
    """
    sources = job.data.sources
    if not sources:
        raise SpecError(
            f"Recipe.train has several datasets ({listed(names, 4)}), and the job does not say "
            "their shares. Set a table [[data.sources]] with name and weight for each, or give one."
        )
    given = [each["name"] for each in sources]
    for name in given:
        if name not in names:
            raise SpecError(f"data.sources: Recipe.train has no {name!r}. {near_miss(name, names)}")
    if missing := [name for name in names if name not in given]:
        raise SpecError(
            f"data.sources does not name {listed(missing, 4)} of Recipe.train. Name all of them, "
            "or leave it out of the recipe."
        )


def _mean_lengths(job: JobSpec, recipe: Recipe, sizes: Indices) -> np.ndarray[Any, Any]:
    """Tokens of a sample of each source, from a keyed choice of them."""
    if not (job.data.length or recipe.length):
        raise RecipeError(
            "data.sources has weights of tokens, and nobody says how long samples are: give "
            "Recipe(length=...), a number for each sample of all sources, one after the other, or "
            "a function of (dataset, index); or leave of = 'tokens' out."
        )
    lengths, means, begin = lengths_of(job, recipe), [], 0
    for number, size in enumerate(sizes.tolist()):
        order = Order(size, key(job.seed, _OF_LENGTHS, number))
        chosen = np.sort(order.indices(0, 0, min(size, _LOOKED_AT))) + begin
        means.append(float(lengths(chosen).mean()))
        begin += size
    return np.array(means)
