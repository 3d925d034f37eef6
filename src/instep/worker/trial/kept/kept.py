"""Trials of the optimizer and the loss of a recipe, beside those of the passes (`reads.py`)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from torch import Tensor

from instep.data.order import key
from instep.engine.passes import OF_PASS
from instep.engine.trial_result import Trial
from instep.job.spec import JobSpec
from instep.parallel.nested import on_tensors
from instep.recipe.build import Built
from instep.recipe.forward import Forward
from instep.recipe.tuning import Begun
from instep.usercode.counts import unchanged
from instep.worker.trial.kept.left_behind import in_words, read_by_steps
from instep.worker.trial.kept.persistence import try_batch_loss, try_optimizer
from instep.worker.trial.kept.rounding import try_rounding
from instep.worker.trial.kept.stand_in import Maker, known


def try_kept(
    forward: Forward,
    job: JobSpec,
    steps: int,
    trial: Trial,
    begun: Begun,
    built: Built | None = None,
) -> Trial:
    """The result of a trial, or what the optimizer or the loss adds to it.

    Args:
        forward: of the worker.
        job: of the run.
        steps: of the optimizer in the whole run.
        trial: of the passes.
        begun: what the model was loaded from and has adapters of.
        built: the optimizer, if it is made already: nothing is tried if all of it is of torch.

    Raises:
        RecipeError: as `persistence.try_optimizer`.
    """
    seed, recipe = key(job.seed, OF_PASS, 0), forward.recipe
    embedded = forward.embedded.take()
    if recipe.batch_loss is not None and embedded is not None:
        given = _as(embedded, next(forward.model.parameters()))
        trial = try_batch_loss(recipe.batch_loss, forward.model, given, seed, trial)
    if built is not None and known(built):
        return trial
    maker = Maker(recipe, forward.model, job.seed, steps, job.start, begun)
    with unchanged(
        recipe.optimizer, recipe.scheduler, *(part for turn in recipe.turns for part in turn)
    ):
        trial = try_optimizer(maker, trial, served=job.sync.served)
        trial = _try_reads(maker, trial)
        return trial if job.train.determinism == "bits" else try_rounding(maker, trial)


def _try_reads(maker: Maker, trial: Trial) -> Trial:
    """Return the trial's result, or that steps read what the last pass left."""
    if not (trial.same and trial.left):
        return trial
    with suppress(Exception):  # of the user's functions, which `try_optimizer` has told of
        if name := read_by_steps(maker.make(), trial.left):
            return trial._replace(verdict=f"not shown: {in_words(name)}")
    return trial


def _as(embedded: Any, like: Tensor) -> Any:
    """In the type of the model: the trial computes in a wider one."""
    return on_tensors(
        embedded, lambda tensor: tensor.to(like.dtype) if tensor.is_floating_point() else tensor
    )
