"""Parts of a private run that a worker needs beside its training: samples, sums, passes, verdict.

Single samples are protected, or participants of rounds. Way in: `private_run`; without `[privacy]`
there is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.batches import Batches
from instep.data.step_sizes import DrawnSizes
from instep.data.weighted import HowSampled
from instep.engine.alike import check_division
from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.trial_result import Trial
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import RecipeError, SpecError
from instep.privacy import secret_files
from instep.privacy.agreement import PrivateAllReduce
from instep.privacy.gradients.forbidden import refuse
from instep.privacy.grid import Grid
from instep.privacy.keys import derived, tag
from instep.privacy.participants import DrawnParticipants
from instep.privacy.released import Releases
from instep.privacy.sampling import SAMPLINGS
from instep.privacy.secure.private_mean import PrivateMean
from instep.privacy.sums import PrivateSums
from instep.privacy.units import Units
from instep.recipe.forward import Forward, Losses
from instep.recipe.losses import loss_of
from instep.recipe.recipe import Recipe
from instep.recipe.weights import WeightedLoss
from instep.store.folder import id_of
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute
from instep.worker.passes.private import Private
from instep.worker.reading.planned_data import PlannedData
from instep.worker.rounds.own_data import check_hidden, divided
from instep.worker.rounds.private import PrivateRounds
from instep.worker.rounds.summing import how_summed


def private_run(member: Member, recipe: Recipe) -> PrivateRun | None:
    """The private run of a worker, if its job is one.

    Raises:
        InstepError: the recipe cannot be trained so, or the secret is not here.
    """
    if not member.job.privacy.on:
        return None
    kind = PrivateParticipants if member.job.privacy.of_participants else PrivateRun
    return kind(member, recipe)


class PrivateRun:
    """One worker's part in a private run.

    Args:
        member: this worker's membership in the run.
        recipe: with the side to train on.

    Raises:
        InstepError: the recipe cannot be trained so, or the secret is not here.
    """

    division: int | None = None
    """Stands for whose data are whose, where participants are protected; 32 bits."""

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
        self._releases = Releases(member.run, run_id)
        if run_id and member.number == 0:
            self._releases.begin(self._secret)
        self._units = units = Units.of_job(self._job, samples)
        self.sampling = SAMPLINGS[spec.sampling](units.number, units.size, self._secret)
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

    def check(self) -> None:
        """Nothing more to log, nor to compare when a run is resumed."""

    def check_members(self, comm: Comm, device: torch.device) -> None:
        """Refuse data that are divided otherwise than on rank 0; all members call it.

        Raises:
            RecipeError: they are.
        """
        if self.division is not None:
            check_division(comm, device, self.division)

    def turns(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        update: Update,
        turns: list[TurnState],
    ) -> list[TurnState]:
        """The one update of a step, and how the workers agree on its parameters."""
        refuse(model, parameters)
        numbers = sum(each.numel() for each in parameters)
        self._grid = grid = Grid(self._job.privacy.clip, numbers, self.sampling.places)
        noise, planned, secret = self._noise, self.sampling.planned, self._secret

        def sums(slots: Sequence[Tensor]) -> PrivateSums:
            return PrivateSums(slots, grid, noise, planned, secret)

        return [TurnState("", parameters, update, PrivateAllReduce(sums, self._releases.write))]

    def compute(self, engine: Engine, forward: Forward, activity: Activity) -> Compute:
        """How this worker runs its passes; what they draw at random follows from the secret, so
        that what another sample draws says nothing of this one."""
        loss = single_loss(forward.losses)
        seed = int.from_bytes(derived(self._secret, "draws")[:8], "big") >> 1
        member = self._member
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


class PrivateParticipants(PrivateRun):
    """One worker's part in a run whose participants are protected.

    Args:
        member, recipe: as for `PrivateRun`.

    Raises:
        InstepError: as `PrivateRun`; or data cannot be divided.
    """

    def __init__(self, member: Member, recipe: Recipe) -> None:
        super().__init__(member, recipe)
        regions = divided(self._job, recipe).train
        self._drawn = DrawnParticipants(self.sampling, regions, self._units.positions)
        self._batches = Batches.of_job(self._job, self._drawn.positions)
        salted = tag(derived(self._secret, "division"), regions.digest.to_bytes(4, "big"))
        self.division = int.from_bytes(salted[:4], "big")

    def planned(self) -> PlannedData:
        """Places of the rounds, and the samples at them."""
        return PlannedData(self._batches, HowSampled(self._drawn))

    def check(self) -> None:
        """Log that data are divided; when a run is resumed, refuse a division that has changed.

        Raises:
            DataError: it has.
        """
        first = self._member.number == 0 and not self._member.others_have_state
        if first and self.division is not None:
            check_hidden(self._member, self.division)

    def turns(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        update: Update,
        turns: list[TurnState],
    ) -> list[TurnState]:
        """The strategy of the job: who sums for it is said when participants are computed."""
        numbers = sum(each.numel() for each in parameters)
        self._grid = Grid(self._job.privacy.clip, numbers, self.sampling.places)
        return turns

    def compute(self, engine: Engine, forward: Forward, activity: Activity) -> Compute:
        """How this worker computes the participants of a round."""
        grid, noise, planned, secret = self._grid, self._noise, self.sampling.planned, self._secret

        def sums(slots: Sequence[Tensor]) -> PrivateSums:
            return PrivateSums(slots, grid, noise, planned, secret)

        how: Any = how_summed(self._job)
        mean = PrivateMean(grid, sums, self._releases.write, self._units.number, **how)
        return PrivateRounds(
            engine,
            forward,
            engine.turn.update,
            self._job,
            self._batches,
            left=lambda: self._member.superseded,
            activity=activity,
            mean=mean,
            who=self._drawn.of,
        )


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
