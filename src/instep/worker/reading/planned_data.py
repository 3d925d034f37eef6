"""Which samples a run trains on in what order, and where its steps end: planned before it begins.

Every process makes the same plan, from the job and from what it knows of the dataset. Whoever has
steps of another size, or another order, has its say here. Way in: `plan_data`.
"""

from __future__ import annotations

from typing import NamedTuple

from instep.data.batches import Batches
from instep.data.order import AnyOrder
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe


class PlannedData(NamedTuple):
    """The plan of a run's data."""

    batches: Batches
    """Ranges of the epochs' order that commits take."""
    order: AnyOrder | None = None
    """Which sample is at each position; None for the job's own order of the dataset."""


def plan_data(job: JobSpec, recipe: Recipe) -> PlannedData:
    """Plan what a job trains on.

    Args:
        job: of the run.
        recipe: with the side to train on in place of a dataset that is split.
    """
    return PlannedData(Batches.of_job(job, len(recipe.train)))
