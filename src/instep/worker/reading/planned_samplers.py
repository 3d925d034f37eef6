"""Plans what a sampler of the user's `DataLoader` asks for, or refuses it by name.

Ways in: `as_wished`, for weights that say how often a sample comes; `as_drawn`, for so many samples
in each epoch.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.balance import ClassOrder, Wished
from instep.data.batches import Batches
from instep.data.mixture import SourceMembers
from instep.data.order import steps_in_epoch
from instep.data.samplers.asked import EpochDraws, Weights, Wishes
from instep.data.samplers.drawn_once import MOST, DrawnOnce
from instep.data.step_sizes import EvenSizes
from instep.data.weighted import HowSampled
from instep.errors import RecipeError, SpecError
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.worker.reading.known_classes import known_classes, told_of_classes

_WEIGHTED, _RANDOM = "WeightedRandomSampler", "RandomSampler"

Plan = tuple[Batches, HowSampled, dict[str, Any]]
"""Ranges that commits take, the order of samples, and fields of the event `data_balanced`."""


def as_wished(job: JobSpec, recipe: Recipe, wishes: Wishes) -> Plan:
    """Plan what a `WeightedRandomSampler` that draws with replacement asks for.

    Raises:
        SpecError: it does not go with the job.
        RecipeError: its weights are none.
    """
    _check_order(job, _WEIGHTED)
    _check_weights(wishes.weights)
    order, commit = Wished(wishes.weights, job.seed, wishes.positions), job.per_commit
    steps = steps_in_epoch(order.samples, commit.global_batch)
    if (fewest := order.fewest()) < steps:
        raise SpecError(
            f"Recipe.train's DataLoader has a WeightedRandomSampler with num_samples = "
            f"{wishes.positions:,}, and train.global_batch = {commit.global_batch}: an epoch has "
            f"about so many samples, as each comes as often as its weight wishes, rounded down or "
            f"up. It may have {fewest:,}, which leaves some of its {steps:,} steps without any. "
            "Give a larger num_samples (train.steps says how long to train), or a larger "
            "train.global_batch."
        )
    sizes = EvenSizes(steps, commit.micro_batches, order.positions)
    told = _told_of_wishes(job, recipe, order) | {"digest": wishes.digest}
    return Batches.of_job(job, order.samples, sizes), HowSampled(order), told


def _told_of_wishes(job: JobSpec, recipe: Recipe, order: Wished) -> dict[str, Any]:
    """Fields of the event; with classes where the user says them and no sample has to be read."""
    named = job.data.labels or recipe.labels
    told: dict[str, Any] = {"names": [], "before": [], "planned": [], "class_weights": []}
    if named is not None and not callable(named):
        classes = known_classes(job, recipe, len(recipe.train))
        planned = np.rint(order.of_classes(classes.codes)).astype(np.int64)
        told = told_of_classes("sampler", classes, planned, [])
    return {**told, "balance": "sampler", "seen_least": int(order.least)}


def as_drawn(job: JobSpec, draws: EpochDraws, samples: int) -> Plan:
    """Plan what a sampler asks for that draws so many samples for each epoch.

    Args:
        job: of the run.
        draws: of the sampler.
        samples: of the training set.

    Raises:
        SpecError: it does not go with the job.
        RecipeError: no such number of samples can be drawn.
    """
    positions, weights = draws.positions, draws.weights
    order: ClassOrder | DrawnOnce
    if weights is None:
        name, how = _RANDOM, "over all epochs each as often as another, or once less"
        _check_order(job, name)
        circle = SourceMembers(np.array([samples], np.int64))
        order = ClassOrder(circle, np.array([positions], np.int64), job.seed)
    else:
        name, how = _WEIGHTED, "none twice"
        _check_order(job, name)
        _check_weights(weights)
        _check_draws(weights, positions)
        order = DrawnOnce(weights, job.seed, positions)
    told = {
        "balance": "drawn",
        "names": [],
        "before": [],
        "planned": [],
        "class_weights": [],
        "seen_least": positions // samples,
        "sampler": f"the {name} draws {positions:,} samples in an epoch, of {samples:,}: {how}",
        "digest": draws.digest,
    }
    return Batches.of_job(job, positions), HowSampled(order), told


def _check_order(job: JobSpec, name: str) -> None:
    if job.data.order != "global":
        raise SpecError(
            f"data.order = {job.data.order!r}, and Recipe.train's DataLoader has a {name}: samples "
            "that come as often as it says are in an order of their own. Set data.order = "
            "'global', or give the dataset itself."
        )


def _check_weights(weights: Weights) -> None:
    if not (weights.min() >= 0 and 0 < weights.sum() < float("inf")):
        raise RecipeError(
            "Recipe.train's DataLoader has a WeightedRandomSampler with a weight below 0 or "
            "not finite, or with no weight above 0. Give numbers from 0, and some above."
        )


def _check_draws(weights: Weights, positions: int) -> None:
    """Refuse what torch cannot draw either."""
    text = "Recipe.train's DataLoader has a WeightedRandomSampler with replacement = False"
    if positions > (above := int(np.count_nonzero(weights))):
        raise RecipeError(
            f"{text} and num_samples = {positions:,}, but {above:,} weights above 0: it draws no "
            f"sample twice in an epoch. Give a num_samples of {above:,} or less, or "
            "replacement = True."
        )
    if len(weights) > MOST:
        raise RecipeError(
            f"{text} and {len(weights):,} weights: torch draws from {MOST:,} at most. Give "
            "replacement = True, which is planned for any number."
        )
