"""One worker's copy of the model, and how a step of it is agreed on and committed.

A step is a small transaction: passes, agreement, update, commit. This file
holds its middle and its end, for the training loop of a recipe
(`training.py`) and for a loop that the user writes (`own_loop.py`) alike.
Where the samples come from, and what the loss is, it does not know.
"""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn

from instep.comm.alone import AloneComm
from instep.comm.base import Comm
from instep.comm.torch_comm import TorchComm
from instep.data.balance import deal
from instep.data.order import Position
from instep.errors import RecipeError, SpecError, Unrepeatable, WorkerError
from instep.events import Kind
from instep.store.ledger import Ledger
from instep.sync.base import Strategy
from instep.worker.buffers import Buffers
from instep.worker.dealing import Dealing, Speeds
from instep.worker.gradients import Gradients
from instep.worker.member import Member
from instep.worker.notes import Notes
from instep.worker.observers import Observer
from instep.worker.passes import Pass, parts_of, ranges_of
from instep.worker.skipping import scale_gradients, share_read
from instep.worker.update import Update


class Weighed(NamedTuple):
    """What one pass gave."""

    total: float
    """Its loss: the mean times the weight."""
    weight: float
    """How much of what the loss is a mean of it holds: samples, unless the recipe says else."""


class Agreement(NamedTuple):
    """What the workers agreed on beside the gradient."""

    loss: float
    """Mean over the global batch, by weight."""
    stop: bool
    """Whether any worker has been told to stop."""
    regroups: bool
    """Whether all leave the group after this step: its members change."""
    skipped: int = 0
    """Samples of the global batch that could not be read; the means are over the others."""


@dataclass(slots=True)
class Clock:
    """Where the time of a step went so far, seconds; the fields of `events.STEPS`, in order."""

    begin: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    wait: float = 0.0
    wire: float = 0.0
    update: float = 0.0
    save: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """All of them, in order."""
        return (
            self.begin, self.load, self.forward, self.backward, self.wait, self.wire, self.update,
            self.save,
        )  # fmt: skip

    @property
    def computing(self) -> float:
        """What the passes took so far, without waiting for other workers."""
        return self.load + self.forward + self.backward

    def lap(self, since: float, part: str) -> float:
        """Add the time since `since` (of `perf_counter`) to a part; returns the time now."""
        now = time.perf_counter()
        setattr(self, part, getattr(self, part) + now - since)
        return now


class Replica:
    """A model that agrees, step by step, with the copies of the other workers.

    Args:
        member: this worker's connection to the run, in a generation.
        model: with the same parameters in every worker.
        parameters: those that are trained, in the same order in every worker.
        strategy: how the copies agree.
        comm: the workers of this generation.
        compare: whether to make sure that all hold the same; not where they have
            just been given it.
        by_speed: whether a slow worker is dealt less.
        observers: by name; they watch the steps, and may object to one.

    Raises:
        RecipeError: the workers built different parameters.
    """

    def __init__(
        self,
        member: Member,
        model: nn.Module,
        parameters: list[nn.Parameter],
        strategy: Strategy,
        comm: Comm,
        *,
        compare: bool = True,
        by_speed: bool = False,
        observers: Mapping[str, Observer] = MappingProxyType({}),
    ) -> None:
        self._observers, self._to_strategy = observers, True
        self.member, self.model, self.strategy, self.comm = member, model, strategy, comm
        if compare:
            _check_equal(model, comm)
        self._parts = member.job.train.micro_batches
        self._on_gpu = parameters[0].device.type == "cuda"
        exact = self._parts if member.job.train.determinism == "bits" else 0
        self.buffers = Buffers(model, parts=exact, alone=self._parts == 1)
        self._ledger = (
            Ledger(member.run / "ledger.bin", wait=member.waits_for_writer)
            if comm.rank == 0
            else None
        )
        for observer in observers.values():
            observer.generation(parameters, comm)
        self._notes = Notes(
            stop=1,  # who has been told to stop
            leaving=1,  # who has no further step
            regroups=1,  # who was told that the generation ends with this step
            arrived=comm.size,  # when each rank had done its passes, seconds since a common moment
            computing=comm.size,  # how long each rank's passes took, seconds
            skipped=1,  # samples that could not be read
            losses=self._parts,  # of each pass, times its weight: a place of its own, for one order
            weights=self._parts,
            buffers=len(self.buffers),  # who moved each
            **{name: observer.size for name, observer in observers.items()},
        )
        self._base = member.started  # Unix seconds, the same in every worker
        self.clock = Clock(begin=time.time())
        self._last: tuple[int, Position, Speeds | None] | None = None
        self._computing = [0.0] * comm.size
        self.dealing = Dealing(comm.size, by_speed=by_speed)
        strategy.start(parameters, comm, notes=self._notes.size, parts=exact)
        self.gradients = Gradients(parameters, self._hear)
        self._scale = 1.0
        self._half_moved = False  # the update began, and has not ended

    def _hear(self, slot: int, gradient: Tensor) -> None:
        for observer in self._observers.values():
            observer.gradient(slot, gradient)
        if self._to_strategy:
            self.strategy.gradient(slot, gradient)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Passes that are run meanwhile are heard by observers alone, and leave nothing.

        Nor does anything stay of what the step's own passes did to buffers: it is not to happen.
        """
        self.buffers.undo()
        self._to_strategy = False
        try:
            yield
        finally:
            self._to_strategy = True
            self.buffers.undo()

    def begin_step(self, step: int, where: Position) -> None:
        """The passes of a step are about to run, or to run once more."""
        for observer in self._observers.values():
            observer.begin_step(step, where)

    def begin_pass(self, part: Pass, weight: float, *, last: bool) -> None:
        """A backward pass is about to run that counts `weight`, over the samples of the step.

        Raises:
            WorkerError: the last update raised, and the loop goes on as if it had not.
        """
        if self._half_moved:
            raise WorkerError(
                "the optimizer or the scheduler raised in the middle of a step, and parameters may "
                "have moved in part: this process cannot go on. Let the error end the program; "
                "another takes up the last commit."
            )
        self.strategy.begin_pass(weight, last=last)
        for observer in self._observers.values():
            observer.begin_pass(part)

    def end_pass(self, part: Pass, share: float) -> None:
        """It is over.

        Args:
            part: the pass.
            share: what it has of the samples; 0 where it was another's, repeated: then it
                leaves nothing.
        """
        for observer in self._observers.values():
            observer.end_pass(part)
        self.buffers.after_pass(share, part.number)

    def skip_pass(self, part: Pass) -> None:
        """A forward pass was run in which nothing counts: as if it had not been."""
        self.buffers.after_pass(0.0, part.number)

    def _passes_done(self) -> float:
        """The time now (of `perf_counter`), once a GPU is done with what it was given."""
        since = time.perf_counter()
        if not self._on_gpu:
            return since
        torch.cuda.current_stream().synchronize()  # not what is under way between GPUs
        return self.clock.lap(since, "backward")

    def agree(
        self,
        passes: Mapping[int, Weighed],
        *,
        stop: bool,
        leaving: bool = False,
        skipped: int = 0,
        samples: int = 0,
    ) -> Agreement | None:
        """Exchange what the passes gave: gradients, buffers, the loss, the wish to stop.

        Args:
            passes: number of each of this worker's passes to what it gave.
            stop: whether this worker has been told to stop.
            leaving: whether this worker has no further step; then all must have none.
            skipped: samples that its passes lack, since they could not be read.
            samples: of the global batch; 0 where there is none.

        Returns:
            The same on every worker. None where all must run their passes of
            this step once more, and agree again.

        Raises:
            SpecError: some workers leave and some have another step.
            DataError: no sample of the global batch could be read.
            RecipeError: nothing in the global batch counts.
            PeerError: another worker went away.
        """
        for observer in self._observers.values():
            observer.passes_done()
        since = self._passes_done()
        arrived = time.time()
        own = self._notes.blank()
        own["stop"], own["leaving"] = [float(stop)], [float(leaving)]
        own["regroups"] = [float(self.member.regroups)]
        own["arrived"][self.comm.rank] = arrived - self._base
        own["computing"][self.comm.rank] = self.clock.computing
        own["skipped"] = [float(skipped)]
        for number, (total, weight) in passes.items():
            own["losses"][number], own["weights"][number] = total, weight
        own["buffers"] = self.buffers.marks()
        for name, observer in self._observers.items():
            own[name] = observer.notes()
        try:
            summed = self.strategy.exchange(self._notes.pack(own))
        except Unrepeatable as error:
            for observer in self._observers.values():
                observer.unrepeatable(error)
            raise
        if summed is None:
            self.buffers.forget()
            return None
        agreed = self._notes.unpack(summed)
        left, ranks = agreed["leaving"][0], self.comm.size
        if 0 < left < ranks:
            raise SpecError(
                "the processes' loops are not of the same length: "
                f"{left:.0f} of {ranks} left while the others had another step. "
                "Leave the loop at the same step everywhere, or use train.stop_after_steps."
            )
        for name, observer in self._observers.items():
            observer.judge(agreed[name], self.strategy.state)
        missed = round(agreed["skipped"][0])
        share = share_read(missed, samples)
        weight = sum(agreed["weights"])
        if samples and not weight:
            raise RecipeError(
                f"the weight of the whole global batch of {samples} samples is 0: there is nothing "
                "in it that the loss could be a mean of (all targets are ignored, say). Leave such "
                "samples out of the dataset, or use a larger train.global_batch."
            )
        self._scale = samples / weight if weight != samples else 1.0
        self.buffers.exchange(agreed["buffers"], self.comm, read=share)
        blocked = time.perf_counter() - since
        latest = self._base + max(agreed["arrived"])
        self._base = latest
        self.clock.wait = min(max(0.0, latest - arrived), blocked)
        self.clock.wire = blocked - self.clock.wait
        self._computing = agreed["computing"]
        return Agreement(
            sum(agreed["losses"]) / (weight or 1.0),
            agreed["stop"][0] > 0,
            regroups=agreed["regroups"][0] > 0,
            skipped=missed,
        )

    def advance(
        self, update: Update, step: int, position: Position, samples: int, loss: float
    ) -> float | None:
        """Move the parameters by the agreed gradient, and let the step count.

        Args:
            update: moves them.
            step, position, samples, loss: as for `commit`.

        Returns:
            The norm of the gradient, if it was computed.

        Raises:
            PeerError: the others may have gone on without this worker; nothing has moved.
        """
        self.member.check_lease()  # before anything moves
        since = time.perf_counter()
        self.buffers.apply()
        self._half_moved = True
        norm = self.strategy.apply(lambda: self._move(update, step))
        self._half_moved = False
        self.buffers.after_update()
        for observer in self._observers.values():
            observer.committed()
        self.clock.lap(since, "update")
        self.commit(step, position, samples, loss, norm)
        return norm

    def _move(self, update: Update, step: int) -> float | None:
        if self._scale != 1.0:
            scale_gradients(self.model.parameters(), self._scale)
        return update.apply(step)

    def commit(
        self,
        step: int,
        position: Position,
        samples: int,
        loss: float,
        gradient_norm: float | None = None,
    ) -> None:
        """The step counts. Parameters have moved; write down who did what, and how long it took.

        Where this worker has been cut off since they began to move, the ledger is for
        whoever goes on from what it holds.

        Args:
            step: counts from 1.
            position: of the global batch.
            samples: how many of them this worker computed.
            loss: mean over the global batch.
            gradient_norm: of the agreed gradient, if it was computed.
        """
        self._last = (step, position, self.dealing.speeds)
        done = b""
        if self._ledger is not None and not self.member.fenced:
            done = self._ledger.append(self.shares())
            if not done:  # another thread has let go of the file
                self.member.fence()
        times = self.clock.parts
        norm = _as_recorded(gradient_norm)
        self.member.record(done, (step, self.member.number, samples, loss, *times, norm))
        self._deal_next(step, position)
        self.clock = Clock(begin=time.time())

    def _deal_next(self, step: int, where: Position) -> None:
        """How fast each was in this step may change how the next is dealt."""
        dealing, ranks = self.dealing, self.comm.size
        parts = parts_of(where, self.member.job.train)
        ranges = ranges_of(where, parts, ranks, dealing.speeds)
        samples = [stop - first for first, stop in ranges]
        why, form = dealing.after_step(self._computing, samples, parts), self.member.form
        if why and self.comm.rank == 0 and form is not None:
            self.member.emit(
                "work_dealt",
                generation=form.generation,
                step=step + 1,
                members=form.members,
                micro_batches=dealing.counts(dealing.speeds),
                speeds=dealing.speeds or [1.0] * ranks,
                reason=why,
            )

    def shares(self) -> list[tuple[int, ...]]:
        """Who did what in the last committed step: records of `LEDGER`, one for each worker."""
        form = self.member.form
        if form is None or self._last is None:
            return []
        step, where, speeds = self._last
        parts = parts_of(where, self.member.job.train)
        ranges = ranges_of(where, parts, len(form.members), speeds)
        dealt = deal(parts, len(form.members), speeds)
        return [
            (step, where.epoch, 0, form.generation, worker, Kind.RANGE, part.start, *positions)
            for worker, part, positions in zip(form.members, dealt, ranges, strict=True)
        ]

    @property
    def ledger_bytes(self) -> int:
        """How long the ledger is with the last commit; on rank 0, which writes it."""
        assert self._ledger is not None, "rank 0 writes the ledger"
        return self._ledger.size_bytes

    def abandon(self) -> None:
        """The step under way will not be: undo what its passes did to buffers and gradients."""
        self.buffers.undo()
        self.strategy.abandon()

    def hold(self) -> None:
        """Write nothing more; for another thread."""
        if self._ledger is not None:
            self._ledger.release()

    def close(self) -> None:
        """Let go of model and group."""
        self.gradients.close()
        self.strategy.stop()
        for observer in self._observers.values():
            observer.over()
        self.comm.close()
        if self._ledger is not None:
            self._ledger.close()


def _as_recorded(norm: float | None) -> float:
    if norm is None:
        return math.nan
    return norm if math.isfinite(norm) else math.inf


def make_comm(member: Member, device: torch.device, address: str = "127.0.0.1") -> Comm:
    """The group of this generation, listening on a local address; alone, one that moves nothing."""
    form = member.form
    assert form is not None
    if len(form.members) == 1:
        return AloneComm()
    return TorchComm(
        member.store(),
        form.rank,
        len(form.members),
        device=device,
        address=address,
        timeout_s=form.timeout_s,
    )


def check_lengths(comm: Comm, device: torch.device, **lengths: int) -> None:
    """Refuse datasets that are not the same in every worker, before the first step.

    Raises:
        RecipeError: a length differs from worker 0's.
    """
    own = torch.tensor(list(lengths.values()), dtype=torch.float64, device=device)
    first = own.clone()
    comm.broadcast(first)
    for name, mine, theirs in zip(lengths, own.tolist(), first.tolist(), strict=True):
        if mine != theirs:
            raise RecipeError(
                f"Recipe.{name} has {mine:.0f} samples on worker {comm.rank}, but {theirs:.0f} on "
                "worker 0: the recipe must give the same datasets in every process."
            )


def _check_equal(model: nn.Module, comm: Comm) -> None:
    """Compare a checksum of every parameter and buffer with those of the other workers."""
    if comm.size == 1:
        return
    named = list(model.named_parameters()) + list(model.named_buffers())
    device = named[0][1].device
    own = torch.tensor([_checksum(tensor) for _, tensor in named], dtype=torch.float64)
    size = torch.tensor([float(len(named))], dtype=torch.float64, device=device)
    comm.broadcast(size)
    if int(size) != len(named):
        raise RecipeError(
            f"the recipe built {len(named)} parameters and buffers on worker {comm.rank}, but "
            f"{int(size)} on worker 0: it must build the same model in every process."
        )
    first = own.to(device, copy=True)  # on the CPU too: the broadcast overwrites it
    comm.broadcast(first)
    for (name, _), mine, theirs in zip(named, own.tolist(), first.tolist(), strict=True):
        if mine != theirs:
            raise RecipeError(
                f"{name!r} has other values on worker {comm.rank} than on worker 0: the recipe "
                "draws from something that the job's seed does not set (time, process id, "
                "an unseeded generator, the order of a set), or loads a file that is not the same "
                "everywhere."
            )


def _checksum(tensor: Tensor) -> float:
    plain = tensor.detach().to("cpu").contiguous().reshape(-1)
    return float(zlib.crc32(plain.view(torch.uint8).numpy().data)) if plain.numel() else 0.0
