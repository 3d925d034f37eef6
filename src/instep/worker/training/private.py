"""Parts of a private run that a worker needs beside its training: samples, sums, passes, verdict.

Way in: `private_run`; without `[privacy]` there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.data.batches import Batches
from instep.data.step_sizes import DrawnSizes
from instep.data.weighted import HowSampled
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.trial_result import Trial
from instep.errors import RecipeError, SpecError
from instep.privacy import secret_files
from instep.privacy.agreement import PrivateAllReduce
from instep.privacy.grid import Grid
from instep.privacy.per_sample import refuse
from instep.privacy.released import Releases
from instep.privacy.sampling import SAMPLINGS
from instep.privacy.sums import PrivateSums
from instep.recipe.forward import Forward, Losses
from instep.recipe.losses import loss_of
from instep.recipe.recipe import Recipe
from instep.recipe.weights import WeightedLoss
from instep.store.folder import id_of
from instep.worker.passes.activity import Activity
from instep.worker.passes.private import Private
from instep.worker.reading.planned_data import PlannedData


def private_run(member: Member, recipe: Recipe) -> PrivateRun | None:
    """The private run of a worker, if its job is one.

    Raises:
        InstepError: the recipe cannot be trained so, or the secret is not here.
    """
    return PrivateRun(member, recipe) if member.job.privacy.on else None


class PrivateRun:
    """One worker's part in a private run.

    Args:
        member: this worker's membership in the run.
        recipe: with the side to train on.

    Raises:
        InstepError: as `private_run`.
    """

    def __init__(self, member: Member, recipe: Recipe) -> None:
        self._member, self._job, samples = member, member.job, len(recipe.train)
        spec = self._job.privacy
        known = spec.accounted.get("samples")
        if known is not None and known != samples:
            raise SpecError(
                f"[privacy]: the dataset has {samples:,} samples, and epsilon was computed for "
                f"{known:,.0f}. Put it back as it was, or begin a new run."
            )
        run_id = id_of(member.run)
        if run_id and not spec.accounted:
            raise SpecError(
                "[privacy] needs instep run or instep.train, which compute epsilon before the "
                "processes start; these were started by others."
            )
        self._noise = spec.noise or 1.0  # a rehearsal has none
        self._secret = secret_files.load(run_id) if run_id else secret_files.new_secret()
        if run_id and member.number == 0:
            Releases(member.run).begin(self._secret)
        batch = self._job.train.global_batch
        self.sampling = SAMPLINGS[spec.sampling](samples, batch, self._secret)
        self._grid: Grid

    def planned(self) -> PlannedData:
        """Places of the steps, of which all have as many, and the samples at them."""
        steps, places = self.sampling.steps, self.sampling.places
        even = np.full(steps, places, np.int64)
        parts, total = self._job.train.micro_batches, self.sampling.positions
        sizes = DrawnSizes(steps, parts, lambda epoch: even, total)
        return PlannedData(Batches.of_job(self._job, total, sizes), HowSampled(self.sampling))

    def last_step(self, planned: int) -> int:
        """The step with which the run ends: that of the job, or the last within the budget."""
        return min(planned, int(self._job.privacy.accounted.get("steps", planned)))

    def strategy(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> PrivateAllReduce:
        """How the workers agree on these parameters."""
        refuse(model, parameters)
        numbers = sum(each.numel() for each in parameters)
        self._grid = grid = Grid(self._job.privacy.clip, numbers, self.sampling.places)
        noise, planned, secret = self._noise, self.sampling.planned, self._secret

        def sums(slots: Sequence[Tensor]) -> PrivateSums:
            return PrivateSums(slots, grid, noise, planned, secret)

        return PrivateAllReduce(sums, Releases(self._member.run).write)

    def compute(self, engine: Engine, forward: Forward, activity: Activity) -> Private:
        """How this worker runs its passes."""
        loss = single_loss(forward.losses)
        seed, member = self._job.seed, self._member
        first = member.number == 0 and member.checkpoint is None
        return Private(
            engine,
            forward,
            self._grid,
            loss,
            seed,
            activity,
            left=lambda: member.superseded,
            warn=lambda text: member.emit("warning", text=text) if first else None,
        )

    @staticmethod
    def trial() -> Trial:
        """The verdict: whole numbers and keyed noise are the same on any number of workers."""
        return Trial(False, "gradients are clipped sample by sample", "yes")


def single_loss(losses: Losses) -> Any:
    """The loss of a batch of one sample, as a function of model and batch."""

    def of_one(model: nn.Module, batch: Any) -> Tensor:
        if losses.compute_loss is not None:
            found = losses.compute_loss(model, batch)
            if isinstance(found, WeightedLoss):
                found = found.total / torch.as_tensor(found.weight).clamp_min(1e-12)
        elif losses.loss is not None:
            found = loss_of(losses.loss, model(batch[0]), batch[1])
        if not isinstance(found, Tensor) or found.numel() != 1:
            raise RecipeError("[privacy]: the loss of a sample is to be a scalar tensor.")
        return found.reshape(())

    return of_one
