"""The table of those who run a worker's passes, and when which of them does: `compute_for`."""

from __future__ import annotations

from instep.engine.engine import Engine
from instep.engine.update import Update
from instep.parallel.global_batch.reads import Reads
from instep.worker.passes.activity import Activity
from instep.worker.passes.base import Compute
from instep.worker.passes.on_mesh import MeshPass, OnMesh
from instep.worker.passes.ordinary import Ordinary
from instep.worker.passes.shared_steps import SharedSteps
from instep.worker.passes.whole_batch import WholeBatch
from instep.worker.passes.works import Works
from instep.worker.replica.replica import Replica
from instep.worker.rounds.round_update import RoundUpdate
from instep.worker.rounds.rounds import Rounds
from instep.worker.training.inputs import Inputs
from instep.worker.training.private import PrivateRun


def compute_for(
    inputs: Inputs,
    engine: Engine,
    update: Update,
    activity: Activity,
    *,
    reads: Reads | None,
    replica: Replica | None,
    private: PrivateRun | None,
) -> Compute:
    """Make what runs the passes of a worker.

    Args:
        inputs: of the worker.
        engine: gets the gradients.
        update: moves the parameters; in rounds it is the participants' too.
        activity: told what is being done.
        reads: of batch normalisation over the global batch, if there is any.
        replica: of this process, if it is a mesh.
        private: the private run, if it is one.
    """
    member, forward, job = inputs.member, inputs.forward, inputs.job
    given = inputs.train, job, inputs.batches.samples

    def left() -> bool:
        return member.superseded

    if private is not None:
        return private.compute(engine, forward, activity)
    if isinstance(update, RoundUpdate):
        shared = None
        if replica is not None:
            shared = SharedSteps(engine, forward, inputs.train, update, *given[1:], replica)
        return Rounds(
            engine,
            forward,
            update,
            job,
            inputs.batches,
            left=left,
            activity=activity,
            shared=shared,
            warn=member.warn if member.number == 0 else lambda text: None,
        )
    if replica is not None:
        return OnMesh(engine, MeshPass(forward, replica, reads), Works(*given), activity)
    if reads is not None or inputs.recipe.batch_loss is not None:
        return WholeBatch(engine, forward, Works(*given), job, reads, activity)
    return Ordinary(engine, forward, job.seed, activity, left)
