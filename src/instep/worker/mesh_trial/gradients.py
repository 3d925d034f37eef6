"""Before a replica of several processes trains: does it compute the gradients of one process?

Runs the first global batch through the model as it is split, with parameters moved off their
start, and has it compared with the same batch on the whole model (`trial/gate.py`). Of a model
that one process cannot compute, both sides compute two blocks of each list. Nothing stays of it.
Steps and other replicas are not known here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import msgspec
import torch
from torch import nn

from instep.comm.base import Comm
from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.loader import Loader, Skipped
from instep.data.reading.generators import preserved
from instep.data.samples.fingerprint import REMEDY
from instep.engine.assignment import Lockstep
from instep.engine.clock import Clock
from instep.engine.state.kept_buffers import KeptBuffers
from instep.errors import DataError, InstepError, RecipeError, one_line
from instep.job.spec import JobSpec
from instep.parallel.blocks import repeated_blocks
from instep.parallel.gate import GateVerdict
from instep.parallel.global_batch.reads import Reads
from instep.parallel.shard.shardable import owners_of, unshardable
from instep.parallel.two_blocks import TwoBlocks
from instep.recipe.forward import SHORT, Forward
from instep.recipe.tuning import NOTHING, Begun
from instep.state.boxes import box_of
from instep.state.broadcast import broadcast_bytes
from instep.system.kernels import per_machine
from instep.worker.passes.on_mesh import MeshPass
from instep.worker.passes.works import Works
from instep.worker.replica.replica import Replica
from instep.worker.trial.gate import STEP, GradientGate, in_parts, whole_passes
from instep.worker.trial.model import Copied
from instep.worker.trial.two_blocks import on_two_blocks

if TYPE_CHECKING:
    from instep.parallel.layout import Example

LARGEST = 200_000_000
"""Parameters of a model that one process still computes whole."""


class MeshCheck:
    """Compares a replica with one process.

    Args:
        forward: its model is not split yet.
        loader: of the training dataset.
        job, samples: as of the run.
        first: whether this process is the first of its replica: it computes the reference, and
            what it knows decides.
        why: there is no need to compare; empty if there is.
        blocks: of a model in stages: where the draws of a pass are keyed anew.
        example: of what is trained on, where a layout is tried on it.
        begun: how the model was built.
    """

    def __init__(
        self,
        forward: Forward,
        loader: Loader,
        job: JobSpec,
        batches: Batches,
        *,
        first: bool,
        why: str = "",
        blocks: Sequence[str] = (),
        example: Example | None = None,
        begun: Begun = NOTHING,
    ) -> None:
        self._forward, self._loader, self._job = forward, loader, job
        self._batches = batches.in_steps(job)
        self._example, self._types = example, {p.dtype for p in forward.model.parameters()}
        self._wide: Copied | None = None
        """A copy in float32 of a model of 16 bits, which is split and compared in its place."""
        self._two: TwoBlocks | None = None
        if not begun.small or self._size > LARGEST:
            self._two = TwoBlocks(forward.model)
        self._lost = list[Skipped]()
        """Samples without which the reference was computed."""
        self._why = why or self._cannot(begun)
        two: AbstractContextManager[None] = nullcontext()
        if self._two is not None:
            two = self._two.alone()
        try:
            if self._types & SHORT and not self._why:
                with two:
                    self._wide = Copied(forward.model, forward.losses).again(by_batch=True)
                before = _not_cut(self._wide.model)
                self._wide.widen(torch.float32)
                two = self._on_wide(self._wide)
                by_type = job.mesh.shard > 1 and job.mesh.stages == 1
                if by_type and before != _not_cut(self._wide.model):
                    self._why = (
                        "it trains parameters of several types, which float32 cuts otherwise"
                    )
            elif first and not self._why and self._two is not None:
                processes = per_machine(job.workers, job.launch.count)
                two = on_two_blocks(forward, self._two, begun.fill, processes)
            with two:
                self._gate = GradientGate(forward, job.seed)
                if first and not self._why:
                    passes = whole_passes(loader, job, self._batches, skipped=self._lost)
                    if blocks:
                        passes = in_parts(passes, job.mesh.pipeline_batches)
                    copied = self._two is not None and self._wide is None
                    self._gate.compute(passes, blocks, copied=copied)
        except Exception as error:  # a user's module may raise anything
            self._why = f"the model cannot be copied to try it ({error})"

    @property
    def _size(self) -> int:
        return sum(parameter.numel() for parameter in self._forward.model.parameters())

    def _cannot(self, begun: Begun) -> str:
        """Why the two cannot be compared; empty if they can."""
        mesh, two = self._job.mesh, self._two
        many = f"the model has {self._size:,} parameters, too many to compute it on one process"
        instead = "to have it compared, try the same [mesh] with a smaller model of the same kind"
        if two is not None and not two:
            return f"{many}, and no list of blocks to compute two of; {instead}"
        if two is not None and mesh.stages > 1:
            return f"{many}, and stages need all of its blocks; {instead}"
        short = sorted(map(str, self._types & SHORT))
        if not short:
            return ""
        if two is not None and (mesh.tensor > 1 or not begun.small):
            return f"{many}, and those of {short[0]} do not show a difference"
        if self._job.train.batch_norm == "global":
            return f"train.batch_norm = 'global' with parameters of {short[0]}"
        return ""

    def _on_wide(self, wide: Copied) -> AbstractContextManager[None]:
        return self._forward.on(wide.model, "float32", wide.losses, torch.float32)

    def run(
        self, replica: Replica, reads: Reads | None, *, merge: bool
    ) -> tuple[GateVerdict | None, str]:
        """Compare; all processes of the replica call it, after the model has been split.

        Args:
            replica: with the model.
            reads: of the model, if its layers see the global batch.
            merge: whether micro-batches that follow each other run as one pass.

        Returns:
            What was compared; or why nothing was.

        Raises:
            RecipeError: a gradient differs.
            DataError: the dataset is not repeatable.
        """
        comm = replica.comm
        same = [not self._why, self._two is not None, merge]
        alike = torch.tensor([float(each) for each in same], device=self._forward.device)
        comm.all_reduce(alike).wait()
        able, two, merged = alike.tolist()
        if able < comm.size:
            return None, self._why or "another of its processes cannot copy the model"
        if two not in (0, comm.size):
            return None, "some of its processes have room for the whole model, and some have not"
        merge = merged == comm.size
        try:
            if self._wide is not None:
                found = self._compare_wide(self._wide, replica, reads, merge=merge)
                return found._replace(blocks=self._two.names if self._two is not None else ()), ""
            if self._two is None:
                return self._compare(replica, reads, merge=merge), ""
            with torch.no_grad():
                replica.run(lambda: None)  # FSDP2 looks for a model's blocks when it first runs
            with self._two.alone():
                found = self._compare(replica, reads, merge=merge)
        except RecipeError as error:
            self._check_dataset(error)
            raise
        return found._replace(blocks=self._two.names), ""

    def _check_dataset(self, error: RecipeError) -> None:
        """Refuse a dataset that gives something else each time: then the model is not to blame."""
        if differed := self._loader.fingerprint().differed:
            raise DataError(
                f"sample {differed[0]} was different when it was read again: the processes of a "
                f"replica ([mesh] {self._job.mesh.axes}) cannot be compared with one process. The "
                "dataset draws random numbers that do not follow from the job's seed. "
                f"{REMEDY}."
            ) from error

    def _compare_wide(
        self, wide: Copied, replica: Replica, reads: Reads | None, *, merge: bool
    ) -> GateVerdict:
        forward = self._forward
        with self._on_wide(wide):
            with preserved():
                other = replica.with_model(wide.model, self._example)
            before, forward.run = forward.run, other.run
            try:
                return self._compare(other, reads, merge=merge)
            finally:
                forward.run, self._wide = before, None

    def _compare(self, replica: Replica, reads: Reads | None, *, merge: bool) -> GateVerdict:
        comm = replica.comm
        self._gate.agree(comm)
        model = self._forward.model.train()
        trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        slots = dict(zip(trained, replica.slots(list(trained.values())), strict=True))
        boxes = {name: box_of(parameter) for name, parameter in trained.items()}
        if reads is not None:
            reads.join(comm, nullcontext)
        parts = [(name, boxes[name], slot.detach()) for name, slot in slots.items()]
        with (
            preserved(),
            _kept(model) as put_back,
            self._forward.on(model, "float32"),
            self._gate.moved(parts),
        ):
            try:
                weight, skipped = self._passes(replica, comm, reads, put_back, merge=merge)
            except InstepError:
                raise
            except Exception as error:  # the user's model may raise anything
                raise RecipeError(
                    f"[mesh] {self._job.mesh.axes}: one process computes a batch, and the model "
                    f"that is split cannot ({type(error).__name__}: {one_line(error)}). Use "
                    "another [mesh], or leave the section out."
                ) from error
        held = {}
        for name, slot in slots.items():
            gradient, slot.grad = slot.grad, None
            held[name] = boxes[name], None if gradient is None else gradient / weight
        try:
            return self._gate.compare(held, comm, self._job.mesh.axes)
        except RecipeError as error:  # on every rank
            self._check_skipped(skipped, comm, error)
            raise

    def _check_skipped(self, skipped: Sequence[Skipped], comm: Comm, error: RecipeError) -> None:
        """Refuse samples that only some processes can read: then the model is not to blame."""
        own, device = msgspec.json.encode([self._lost, skipped]), self._forward.device
        alone, together = dict[int, str](), dict[int, str]()
        for rank in range(comm.size):
            told = broadcast_bytes(own, comm, rank, device)
            lost, also = msgspec.json.decode(told, type=tuple[list[Skipped], list[Skipped]])
            alone |= {sample: f"{cause} (on rank {rank})" for sample, cause in lost}
            where = f" (on rank {rank})" if self._job.mesh.same_batch == 1 else ""  # else it is in
            together |= {sample: f"{cause}{where}" for sample, cause in also}
        for sample in sorted(alone.keys() ^ together.keys()):
            cause = alone.get(sample) or together[sample]
            raise DataError(
                f"sample {sample} can be read by some processes only: {cause}. So one process and "
                f"the replica ([mesh] {self._job.mesh.axes}) have not computed the same first "
                "global batch, and cannot be compared. Make the sample readable for each process, "
                "or leave it out of the dataset."
            ) from error

    def _passes(
        self,
        replica: Replica,
        comm: Comm,
        reads: Reads | None,
        put_back: Callable[[], None],
        *,
        merge: bool,
    ) -> tuple[float, list[Skipped]]:
        """Run the batch; gradients add up in the slots. Each pass begins with the same buffers.

        Returns:
            The weight of the batch, over its samples: what the gradients are still to be divided
            by. And the samples that this rank tells could not be read.
        """
        job, device = self._job, self._forward.device
        passes = MeshPass(self._forward, replica, reads)
        form = Form(generation=0, rank=comm.rank, members=list(range(comm.size)))
        lockstep = Lockstep(
            form,
            job.train,
            self._batches,
            by_speed=False,
            mesh=job.mesh,
        )
        ((where, share),) = lockstep.plan(STEP, STEP, merge=merge, whole=reads is not None)
        loads = self._loader.read([part.samples for part in share.passes])
        works, clock = Works(self._loader, job, self._batches.samples), Clock(begin=time.time())
        own, size = 0.0, where.size
        for work in works.of(where, share, loads, STEP, clock, joins=reads is not None):
            ran = passes.run(work, size, clock)
            own += sum(found.weight for found in ran.losses.values())
            put_back()
        own = own if replica.tells else 0.0
        total = torch.tensor([own], dtype=torch.float64, device=device)
        comm.all_reduce(total).wait()
        weight = float(total.item()) / size / passes.weight(size)
        return weight or 1.0, works.skipped if replica.tells else []


def _not_cut(model: nn.Module) -> set[str]:
    """Names of the parameters that stay whole where others are cut into rows."""
    whole = unshardable(model, owners_of(model, repeated_blocks(model)))
    return {name for name, parameter in model.named_parameters() if parameter in whole}


@contextmanager
def _kept(model: nn.Module) -> Iterator[Callable[[], None]]:
    """Give buffers back what they had: at the end, and whenever the function is called."""
    before = KeptBuffers(model)
    before.put_back()
    try:
        yield before.put_back
    finally:
        before.put_back()
