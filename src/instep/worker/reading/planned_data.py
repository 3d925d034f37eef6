"""Which samples a run trains on in what order, and where its steps end: planned before it begins.

Every process makes the same plan, from the job and from what it knows of the dataset. Data with
steps of another size, or another order, has its say here. Way in: `plan_data`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from instep.data.balance import (
    ClassOrder,
    InProportion,
    Members,
    class_weights,
    planned_counts,
)
from instep.data.batches import Batches
from instep.data.lengths import ByLength
from instep.data.mixture import JoinedSources
from instep.data.order import AnyOrder, Order
from instep.data.reading.streams.mixed import MixedStreams
from instep.data.shard_sizes import shards_or_blocks
from instep.data.weighted import HowSampled, SampleWeights
from instep.data.windowed import Windowed
from instep.engine.member import Member
from instep.errors import DataError, RecipeError
from instep.job.spec import JobSpec
from instep.recipe.losses import check_reweightable
from instep.recipe.recipe import Recipe
from instep.store.run_folder import RunFolder
from instep.worker.reading.known_classes import known_classes, told_of_classes
from instep.worker.reading.mixed_streams import told_of
from instep.worker.reading.planned_samplers import as_drawn, as_wished
from instep.worker.reading.planned_sources import planned_sources
from instep.worker.reading.sample_lengths import lengths_of


class PlannedData(NamedTuple):
    """The plan of a run's data."""

    batches: Batches
    """Ranges of the epochs' order that commits take."""
    how: HowSampled = HowSampled()
    """Order and weights of samples; left out, the job's own order of the dataset."""
    balanced: dict[str, Any] = {}  # noqa: RUF012  fields of the event `data_balanced`
    """How often classes come, and how much they count, for people; empty where they are as many as
    in the dataset."""
    lengths: dict[str, Any] = {}  # noqa: RUF012  fields of the event `data_lengths`
    """How batches are made by length; empty where they are not."""

    @property
    def digest(self) -> int | None:
        """Hash of the lengths that batches are made by, 32 bits."""
        order = self.how.order
        return order.digest if isinstance(order, ByLength) else None


def plan_data(job: JobSpec, recipe: Recipe) -> PlannedData:
    """Plan what a job trains on.

    Args:
        job: of the run.
        recipe: with the side to train on in place of a dataset that is split.

    Raises:
        RecipeError: the job balances classes, or cuts by length, and the recipe does not say them.
        DataError: it says them of other samples.
        SpecError: what a `DataLoader` asks for does not go with the job.
    """
    samples, given = len(recipe.train), recipe.given["train"]
    if given.wishes is not None and not job.data.balance:
        return PlannedData(*as_wished(job, recipe, given.wishes))
    planned = PlannedData(Batches.of_job(job, samples))
    if isinstance(recipe.train, MixedStreams):
        return planned._replace(balanced=told_of(recipe.train))
    if job.data.sources or isinstance(recipe.train, JoinedSources):
        order, told = planned_sources(job, recipe)
        planned = PlannedData(Batches.of_job(job, order.samples), HowSampled(order), told)
    if job.data.balance:
        planned = _balanced(job, recipe, samples)
    elif given.draws is not None:
        planned = PlannedData(*as_drawn(job, given.draws, samples))
    if job.train.tokens_per_batch is not None or given.grouped is not None:
        return _by_length(job, recipe, planned)
    return planned


def _balanced(job: JobSpec, recipe: Recipe, samples: int) -> PlannedData:
    how, data = job.data.balance, job.data
    classes = known_classes(job, recipe, samples)
    if how == "reweight":
        check_reweightable(recipe.loss, recipe.compute_loss)
        weights = class_weights(classes.counts, data.weights)
        told = told_of_classes(how, classes, classes.counts, weights.tolist())
        own = HowSampled(weights=SampleWeights(weights, classes.codes))
        return PlannedData(Batches.of_job(job, samples), own, told)
    members = Members(classes.codes)
    if how == "stratified":
        order: InProportion | ClassOrder = InProportion(members, job.seed)
        counts = classes.counts
    else:
        if how == "augment" and recipe.augment is None:
            raise RecipeError(
                "data.balance = 'augment' needs Recipe.augment, which was not given: samples that "
                "come again are to be changed by it. Give it, or set data.balance = 'resample'."
            )
        counts = planned_counts(classes.counts, data.weights)
        order = ClassOrder(members, counts, job.seed)
    return PlannedData(
        Batches.of_job(job, order.samples),
        HowSampled(order, repeats_alone=how == "augment"),
        told_of_classes(how, classes, counts, []),
    )


def _by_length(job: JobSpec, recipe: Recipe, planned: PlannedData) -> PlannedData:
    """Put samples of about one length into each batch of a plan."""
    positions, tokens = planned.batches.samples, job.train.tokens_per_batch
    base: AnyOrder = planned.how.order or Order(positions, job.seed)
    if planned.how.order is None and job.data.order == "windowed":
        shards = shards_or_blocks(recipe.train, positions, job.data.window)
        base = Windowed(shards, job.data.window, job.seed)
    order = ByLength(
        base,
        positions,
        lengths_of(job, recipe),
        window=job.data.window,
        seed=job.seed,
        micro_batches=job.train.micro_batches,
        tokens=tokens,
        batch=job.train.global_batch,
    )
    grouped = recipe.given["train"].grouped
    told = {
        "tokens_per_batch": tokens,
        "sampler": grouped.name if grouped is not None else "",
        "window": order.window,
        "steps": order.steps,
        "mean": order.mean,
        "padding": order.padding(0),
        "digest": order.digest,
    }
    each = -(-positions // order.steps)
    return planned._replace(
        batches=replace(Batches.of_job(job, positions, order), size=each),
        how=planned.how._replace(order=order),
        lengths=told,
    )


def say_chosen(member: Member, recipe: Recipe) -> None:
    """Log which samples the `DataLoader`s of a recipe choose."""
    for name, given in recipe.given.items():
        if given.chosen and member.checkpoint is None:
            member.emit("samples_chosen", dataset=f"Recipe.{name}", text=given.chosen)


def say_lengths(member: Member, planned: PlannedData) -> None:
    """Log how batches are made by length; in a resumed run, refuse lengths that have changed.

    Raises:
        DataError: they have.
    """
    if member.checkpoint is None:
        member.emit("data_lengths", **planned.lengths)
        return
    before = RunFolder(member.run).last("data_lengths")
    if before and before["digest"] != planned.lengths["digest"]:
        raise DataError(
            f"the samples to train on have other lengths than when the run was started (a mean of "
            f"{before['mean']:.4g} then, {planned.lengths['mean']:.4g} now), so other batches "
            "would come. Put them back as they were; or start a new run from the model of this "
            f"one: --set start.model={member.run}"
        )


_MIXED = {"sources": "sources"}


def say_balance(member: Member, planned: PlannedData) -> None:
    """Log how often classes come; in a resumed run, refuse a plan that has changed.

    Raises:
        DataError: it has.
    """
    if member.checkpoint is None:
        member.emit("data_balanced", **planned.balanced)
        return
    before, changed = RunFolder(member.run).last("data_balanced"), ""
    for field in ("before", "planned"):
        if before and before[field] and before[field] != planned.balanced[field]:
            changed = (
                f"the {_MIXED.get(before['balance'], 'classes')} of the training set have changed "
                f"since the run was started: {before[field]} samples then, "
                f"{planned.balanced[field]} now"
            )
    digest = planned.balanced.get("digest")
    if not changed and before and before.get("digest", digest) != digest:
        changed = (
            "the sampler of Recipe.train's DataLoader has other weights, or another num_samples, "
            "than when the run was started"
        )
    if changed:
        raise DataError(
            f"{changed}, so other samples would come. Put data and job back as they were; or start "
            f"a new run from the model of this one: --set start.model={member.run}"
        )
