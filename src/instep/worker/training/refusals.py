"""The reasons why a recipe cannot be trained as its job says, as far as the two alone show it.

Nothing is built and no sample is read. `Training` raises the first of them, `instep check` prints
all. Way in: `refusals`.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from instep.errors import InstepError, caught
from instep.job.spec import JobSpec
from instep.recipe.recipe import Recipe
from instep.state.retention import best_rule
from instep.sync import clashes
from instep.worker.loop.stopping import check_rules
from instep.worker.reading.planned_sources import check_sources
from instep.worker.rounds import round_checks
from instep.worker.training.devices import check_device
from instep.worker.training.inputs import validation_refusals


def refusals(job: JobSpec, recipe: Recipe, device: torch.device) -> Iterator[InstepError]:
    """The reasons, each looked for when it is asked for.

    Args:
        job: of the run.
        recipe: its datasets are the sides of the job's split.
        device: of a worker.
    """
    yield from caught(lambda: check_device(job, device))
    yield from caught(lambda: check_rules(job.stop, recipe))
    yield from clashes.refusals(job, recipe)
    yield from caught(lambda: check_sources(job, recipe))
    yield from validation_refusals(job, recipe)
    if job.sync.rounds is not None:
        yield from caught(lambda: round_checks.check_length(job, len(recipe.train)))
    yield from caught(lambda: best_rule(job.checkpoint, measured_by(recipe)))


def measured_by(recipe: Recipe) -> tuple[str, ...]:
    """The names of what a validation measures; none where there is none."""
    return ("loss", *recipe.metrics) if recipe.validate is not None else ()
