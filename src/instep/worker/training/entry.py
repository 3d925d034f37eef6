"""How a process enters a replica that is a mesh: the whole model is tried, cut, and compared."""

from __future__ import annotations

import torch
from torch import nn

from instep.data.reading.generators import preserved
from instep.engine.engine import Engine
from instep.engine.trial_result import Trial
from instep.parallel.global_batch.reads import Reads
from instep.recipe.build import build_optimizer
from instep.recipe.tuning import Begun
from instep.worker.mesh_trial.gradients import MeshCheck
from instep.worker.mesh_trial.optimizers import OptimizerCheck
from instep.worker.mesh_trial.validation import check_validation
from instep.worker.passes.activity import Activity
from instep.worker.replica.layout import example_of, found_layout
from instep.worker.replica.replica import Replica, check_model
from instep.worker.training.inputs import Inputs
from instep.worker.training.trials import Trials

_CUTS_NOTHING = (
    "mesh.tensor = {} cuts no layer of this model: each of its processes has and computes all of "
    "it, which is slower than one process. Choose shard, or stages, or more replicas."
)


class Entry:
    """The way of one process into its replica.

    Args:
        inputs: of the worker.
        trials: try the whole model, where nobody has yet.
        activity: told what is being done.
        reads: what batch normalisation over the global batch reads, if there is any.
        device: the worker's.
    """

    def __init__(
        self,
        inputs: Inputs,
        trials: Trials,
        activity: Activity,
        reads: Reads | None,
        device: torch.device,
    ) -> None:
        self._inputs, self._member, self._job = inputs, inputs.member, inputs.job
        self._trials, self._activity = trials, activity
        self._reads, self._device = reads, device

    @property
    def _first(self) -> bool:
        """Whether this process is the first of its replica."""
        return self._member.number % self._job.mesh.ranks == 0

    def enter_mesh(self, model: nn.Module, begun: Begun) -> tuple[Trial | None, Replica | None]:
        """Enter the replica; where it is one process, there is nothing to do.

        Raises:
            InstepError: as from `enter`.
        """
        return self.enter(model, begun) if self._job.mesh.ranks > 1 else (None, None)

    def enter(self, model: nn.Module, begun: Begun) -> tuple[Trial, Replica]:
        """Try the whole model, and have this process keep its part of it; where nobody has trained
        it yet, compare the replica with one process.

        Raises:
            InstepError: the replica cannot compute the model, or computes another one.
        """
        known = Trial.read(self._member.known)
        trial = known or self._trials.run(begun)
        recipe, job = self._inputs.recipe, self._job
        moves = OptimizerCheck(
            model,
            lambda model: build_optimizer(recipe, model, 1, job.start, begun).optimizer,
            job.seed,
            first=self._first,
            needed=known is None,
            small=begun.small,
            stages=job.mesh.stages,
        )
        replica, why = self._split(model, begun, merge=trial.merge, compare=known is None)
        why = moves.run(replica, model) or why
        if why and trial.same:
            trial = trial._replace(verdict=f"not shown: [mesh] was not compared: {why}")
        self._activity.enter("building")
        return trial, replica

    def _split(
        self, model: nn.Module, begun: Begun, *, merge: bool, compare: bool
    ) -> tuple[Replica, str]:
        """Have this process keep its part of the model, once the replica's others are here; and why
        it was not compared, if it was to be."""
        check_model(model)
        inputs, member, job = self._inputs, self._member, self._job
        forward, given = inputs.forward, (inputs.train, job, inputs.batches)
        example = layout = None
        if job.mesh.same_batch > 1:
            example = example_of(forward, *given)
            if self._first:
                timed = job.train.determinism != "bits"
                layout = found_layout(member, model, example, timed=timed)
                if layout.plan is not None and not layout.plan.cuts and member.number == 0:
                    member.emit("warning", text=_CUTS_NOTHING.format(job.mesh.tensor))
        check = MeshCheck(
            forward,
            *given,
            first=self._first,
            why="" if compare else "such a replica has been compared",
            blocks=layout.blocks if layout is not None else (),
            example=example,
            begun=begun,
        )
        self._activity.enter("meeting")
        with preserved():
            alike = compare and not any(p.is_meta for p in model.parameters())
            replica = Replica(member, model, self._device, layout, example, alike=alike)
        for each in inputs.loaders:
            replica.share_batches(each, self._activity.waiting)
        begun.fill(model)
        forward.run = replica.run
        if self._reads is not None:
            self._reads.tells, self._reads.late = replica.proposes, True
        found, why = check.run(replica, self._reads, merge=merge)
        small = all(replica.gather(int(begun.small)))  # one process may have less memory
        if inputs.validate is not None and compare and small:
            first_batch, validated = inputs.first_batch, self._trials.validated
            check_validation(forward, inputs.validate, first_batch, replica, validated)
        if member.number == 0 and compare:
            fields = found._asdict() if found is not None else {"why": why}
            member.emit("mesh_checked", **fields)
        return replica, why if compare else ""


def take_host_copy(engine: Engine, replica: Replica) -> None:
    """Continue where the replica's processes before these were, if their host still has it."""
    member = engine.member
    step = engine.copies.take(replica.comm, engine.device) if engine.copies is not None else None
    member.holds = step is not None
    if step is not None and replica.comm.rank == 0:
        number = member.job.mesh.coordinate(member.number).replica
        member.emit("taken_from_host", replica=number, step=step)
