"""The verdict before step 1: what a worker tries, what the job decides, what all agree on."""

from __future__ import annotations

import time

import torch

from instep.comm.base import Comm
from instep.engine.trial_result import Trial
from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.recipe.build import Built
from instep.recipe.forward import Measured
from instep.recipe.recipe import Recipe
from instep.recipe.rehearsal import try_validation
from instep.recipe.tuning import NOTHING, Begun
from instep.state.broadcast import broadcast_bytes
from instep.worker.loop.announcer import tells_trial
from instep.worker.passes.activity import Activity
from instep.worker.passes.late_trial import TRYING
from instep.worker.reading import dataset_check
from instep.worker.rounds import round_checks
from instep.worker.training.inputs import Inputs
from instep.worker.trial.kept.kept import try_kept
from instep.worker.trial.reads import try_blocks, try_recipe


class Trials:
    """Tries a recipe before it is trained.

    Args:
        inputs: of the worker.
        updates: of the optimizer in the whole run.
        begun: what the model was loaded from and has adapters of.
        activity: told what is being done.
    """

    def __init__(self, inputs: Inputs, updates: int, begun: Begun, activity: Activity) -> None:
        self._inputs, self._updates, self._begun = inputs, updates, begun
        self._activity = activity
        self.validated: Measured | None = None
        """Results of the first batch of the validation."""

    def run(self, whole: Begun = NOTHING, built: Built | None = None) -> Trial:
        """Try passes, optimizer and validation.

        Args:
            whole: of a mesh: what its model was loaded from; where that is too large for one
                process, the model is tried block by block.
            built: the optimizer, if it is made already.

        Raises:
            InstepError: a pass, the optimizer or a metric cannot be computed.
        """
        inputs, job = self._inputs, self._inputs.job
        given = inputs.forward, inputs.train, job, inputs.batches
        self._activity.enter(TRYING)
        if not whole.small:
            return self.try_kept(try_blocks(*given, whole.fill), built)
        began = time.time()
        with inputs.at_home():
            tried = try_recipe(*given, tells_trial(inputs.member))
        trial = self.try_kept(tried, built)
        inputs.member.phases["trial"] = time.time() - began
        trial = self.try_validation(trial)
        if job.sync.votes:
            return trial._replace(merge=False, reason="each micro-batch is a voter")
        if job.sync.rounds is None:
            return trial
        reason = "each participant of a round is computed apart"
        return trial._replace(merge=False, reason=reason, verdict=round_checks.verdict(job))

    def try_kept(self, trial: Trial, built: Built | None = None) -> Trial:
        """Try what the optimizer and the loss keep, and add what it shows to a trial of passes.

        Raises:
            InstepError: the optimizer cannot be made, or take a step.
        """
        forward, job = self._inputs.forward, self._inputs.job
        return try_kept(forward, job, self._updates, trial, self._begun, built)

    def try_validation(self, trial: Trial) -> Trial:
        """Try the first batch of the validation, on one worker, and add what it shows.

        Raises:
            InstepError: the loss or a metric cannot be computed.
        """
        inputs = self._inputs
        if inputs.validate is None or inputs.member.number != 0:
            return trial
        rehearsed = try_validation(inputs.forward, inputs.validate, inputs.first_batch)
        self.validated = rehearsed.found
        if not rehearsed.changed or not trial.same:
            return trial
        why = f"the validation changes {rehearsed.changed!r}, which is kept in Python and "
        why += "which training may read: how much a worker validates depends on how many "
        why += "there are, and no checkpoint has it"
        return trial._replace(verdict=f"not shown: {why}")


def agreed(comm: Comm, device: torch.device, trial: Trial, unrepeatable: int | None) -> Trial:
    """Merge only if every member's trial allows it; the verdict is `yes` only if all say `yes`, and
    else what the first one says that does not.

    Args:
        comm: of the members; all call this.
        device: on which they talk.
        trial: of this one.
        unrepeatable: a sample that was another one when it was read again: the verdict is `no`,
            whatever the trials showed.
    """
    sample = 0 if unrepeatable is None else 1 + unrepeatable
    found = torch.zeros(comm.size, 3, dtype=torch.float64)
    found[comm.rank] = torch.tensor([trial.merge, trial.same, sample])
    found = found.to(device)
    comm.all_reduce(found).wait()
    merge, same, samples = found.cpu().T
    if trial.merge and not merge.all():
        trial = trial._replace(merge=False, reason="another worker's trial showed a difference")
    if not same.all():
        said = broadcast_bytes(trial.verdict.encode(), comm, int(same.argmin()), device)
        trial = trial._replace(verdict=said.decode()) if trial.same else trial
    if sample := int(samples.max()):
        trial = trial._replace(verdict=dataset_check.unrepeatable(sample - 1))
    return trial


def refuse_another_result(trial: Trial) -> None:
    """Refuse to train where the result is not that of one machine.

    Raises:
        SpecError: the verdict is not `yes`.
    """
    if not trial.same:
        raise SpecError(
            f"check.strict = true refuses to train. Same as one machine: {trial.verdict}."
        )


def decided_by_job(job: JobSpec, recipe: Recipe, trial: Trial, *, draws_by_block: bool) -> Trial:
    """A trial, with the verdict `no` where the job alone makes a difference to one machine.

    One machine would have used a sampler, say, so the remedy in the trial's own `no` would not
    help.

    Args:
        job: of the run.
        recipe: that was tried.
        trial: its result.
        draws_by_block: whether the blocks of a pipeline draw numbers of their own.
    """
    every = recipe.given["train"].unused(
        "Recipe.train",
        shuffled=job.data.shuffled,
        batch=job.train.global_batch,
        planned=True,
        tokens=job.train.tokens_per_batch,
    )
    reasons = [f"{text}. {remedy}" for text, remedy in every if remedy]
    if job.sync.codec != "none":
        whom = "workers and servers" if job.sync.served else "workers"
        carried = f", and what is carried over depends on the number of {whom}"
        if job.sync.leased:
            carried = ", and what a worker carries over is lost with it"
        reasons.append(
            f"sync.codec = {job.sync.codec!r} rounds what is sent"
            f"{'' if job.sync.rounds else carried}. Leave it out"
        )
    if job.sync.delayed:
        reasons.append(
            "with sync.options.delayed = true each gradient is applied one step late, to "
            "parameters that have moved once since it was computed. Leave it out"
        )
    if job.sync.votes:
        reasons.append(
            f"sync.name = 'sign_vote' takes the majority of the signs of "
            f"{job.train.micro_batches} micro-batches for the gradient, on any number of "
            "workers alike. Use all_reduce"
        )
    if job.sync.leased:
        reasons.append(
            f"with sync.name = {job.sync.name!r} each micro-batch is an update of its "
            "own, in the order in which they arrive: the result depends on timing. Use "
            "all_reduce"
        )
    if draws_by_block:
        reasons.append(
            "with mesh.stages each block draws its own random numbers for each part of a "
            "micro-batch, and one machine draws them in turn. Set mesh.stages = 1"
        )
    decisive = "; ".join(reasons)
    return trial._replace(verdict=f"no: {decisive}") if decisive else trial
