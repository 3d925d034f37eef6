"""The updates of a recipe's training: its optimizer, and which kind of update moves it.

Which kind that is follows from the job alone: `kind_of_update`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.engine.served.optimizer import ServedUpdate
from instep.engine.served.tables import ServedTables, refuse_sparse
from instep.engine.slots import Split
from instep.engine.turns import TurnState, make_turns
from instep.engine.update import Update
from instep.job.spec import JobSpec
from instep.parallel.host_state import keep_on_host
from instep.recipe.build import Built, build_optimizer
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import Begun
from instep.worker.rounds.round_update import RoundUpdate
from instep.worker.training.private import PrivateRun


def built_for(
    job: JobSpec, recipe: Recipe, model: nn.Module, updates: int, begun: Begun
) -> tuple[Built, ServedTables | None]:
    """Make the optimizer of a model, and the tables whose rows servers have, if the job has any.

    Args:
        job: of the run.
        recipe: makes the optimizer.
        model: as this process has it.
        updates: of the optimizer in the whole run.
        begun: what the model was loaded from.

    Raises:
        InstepError: it cannot be made, or servers cannot have these tables.
    """
    tables = None
    if job.sync.leased:
        refuse_sparse(model, job)
    elif job.sync.served:
        tables = ServedTables(model, job, batch_loss=recipe.batch_loss is not None)
    built = build_optimizer(recipe, model, updates, job.start, begun)
    return (tables.made(built) if tables else built), tables


def kind_of_update(job: JobSpec) -> Callable[..., Update]:
    """Find what moves the parameters of a job."""
    if job.sync.served:
        return LeasedUpdate if job.sync.leased else ServedUpdate
    return Update if job.sync.rounds is None else partial(RoundUpdate, job=job)


def turns_for(
    job: JobSpec,
    built: Built,
    model: nn.Module,
    split: Split | None,
    private: PrivateRun | None,
) -> tuple[Update, list[TurnState]]:
    """Make what moves the parameters of a model.

    Args:
        job: of the run.
        built: the optimizer.
        model: as this process has it.
        split: how its parameters lie on the ranks of a replica; None where one process has all.
        private: the private run, if it is one.

    Returns:
        The update; and its turns, none where a step has one and the job's strategy.

    Raises:
        InstepError: the model has parameters that cannot be moved so.
    """
    if job.mesh.offload == "optimizer":
        keep_on_host(built.optimizer)
    scaler = torch.amp.GradScaler("cuda", enabled=job.train.precision == "float16")
    turns = make_turns(built, job, scaler, split)
    update = kind_of_update(job)(
        built.optimizer,
        built.scheduler,
        built.parameters,
        seed=job.seed,
        max_grad_norm=job.train.max_grad_norm,
        measure=job.measures_norm,
        scaler=scaler,
    )
    if private is not None:
        turns = private.turns(model, built.parameters, update, turns)
    return update, turns
