"""When worker 0 saves, and what goes into a checkpoint.

The writing itself is `state/save.py`'s; this file gathers, from one and the
same commit, all that a run needs to go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from instep.data.order import Position
from instep.errors import CheckpointError
from instep.run.blame import sentence
from instep.run.member import Member
from instep.run.replica import Replica
from instep.run.update import Update
from instep.spec_file import dump
from instep.state.best import Best, facts_of
from instep.state.load import load
from instep.state.restore import restore
from instep.state.save import CheckpointWriter, save_model
from instep.state.snapshot import (
    Packer,
    Snapshot,
    model_tensors,
    pack_state,
    parameters_sha256,
    unpack_state,
)


class TakenUp(NamedTuple):
    """What a checkpoint gave back, beside the state of model and optimizer."""

    step: int = 0
    """The last committed one."""
    strategy: Mapping[str, Tensor] = MappingProxyType({})
    """What the strategy remembers."""
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    """Of the epoch that was not finished: loss times samples, and samples."""


def take_up(checkpoint: Path, model: nn.Module, update: Update) -> TakenUp:
    """Give model, optimizer, scheduler and scaler the state of a checkpoint.

    Raises:
        CheckpointError: it cannot be read, or is of another model or optimizer.
    """
    device = next(model.parameters()).device
    snapshot = load(checkpoint, device)
    tensors, facts = snapshot.tensors, snapshot.facts
    restore(tensors["model"], model)
    try:
        update.optimizer.load_state_dict(
            unpack_state(tensors.get("optimizer", {}), facts["optimizer"])
        )
        if update.scheduler is not None:
            state = unpack_state(tensors.get("scheduler", {}), facts["scheduler"])
            update.scheduler.load_state_dict(state)
        if facts["scaler"]:
            update.scaler.load_state_dict(facts["scaler"])
        loss, samples = unpack_state({}, facts["epoch_so_far"])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{checkpoint} is of another optimizer or scheduler than the recipe now makes: "
            f"{sentence(error)}"
        ) from error
    return TakenUp(snapshot.step, tensors.get("strategy", {}), loss, samples)


class Saver:
    """Saves checkpoints while training goes on, and the model at its end.

    Args:
        member: for the job, the run folder and the log.
        model: of this worker.
        update: moves it; has the optimizer, the scheduler and the scaler of the loss.
        best: which checkpoints are kept for their validation.
    """

    def __init__(
        self, member: Member, model: nn.Module, update: Update, best: Best | None = None
    ) -> None:
        self._member, self._model, self._update = member, model, update
        model_tensors(model)  # a model that cannot be saved is refused before it is trained
        self._every = member.job.checkpoint.every_steps
        self._pack_optimizer = Packer()
        self._job = dump(member.job)
        self._writer = CheckpointWriter(
            member.run / "checkpoints",
            keep_last=member.job.checkpoint.keep_last,
            keep_every=member.job.checkpoint.keep_every,
            best=best,
        )

    def after_step(
        self,
        step: int,
        where: Position,
        replica: Replica,
        *,
        last: bool,
        epoch_so_far: tuple[float, int] = (0.0, 0),
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Save if it is time to; tell of what has been published since.

        Args:
            step: the one just committed.
            where: its place in the data.
            replica: has the strategy, the clock and the ledger.
            last: whether it is the last of this start.
            epoch_so_far: of an unfinished epoch, loss times samples, and samples.
            metrics: of the validation that followed this step, if one did.
        """
        due = last or (self._every and step % self._every == 0)
        if due or self._writer.is_best(step, metrics):
            try:
                since = time.perf_counter()
                snapshot = self._snapshot(step, where, replica, epoch_so_far)
                snapshot.facts.update(facts_of(metrics))
                replica.clock.save += self._writer.save(snapshot, since=since)
            except CheckpointError as error:
                self._member.emit("warning", text=f"no checkpoint of step {step}: {error}")
        self._tell()

    def _snapshot(
        self, step: int, where: Position, replica: Replica, epoch_so_far: tuple[float, int]
    ) -> Snapshot:
        """Everything of one commit."""
        optimizer, skeleton = self._pack_optimizer(self._update.optimizer.state_dict())
        facts: dict[str, Any] = {
            "epoch": where.epoch,
            "next_position": where.stop,
            "ledger_bytes": replica.ledger_bytes,
            "epoch_so_far": pack_state(list(epoch_so_far))[1],
            "optimizer": skeleton,
            "scaler": self._update.scaler.state_dict(),
            "job": self._job,
        }
        tensors = {"model": model_tensors(self._model), "optimizer": optimizer}
        if (scheduler := self._update.scheduler) is not None:
            tensors["scheduler"], facts["scheduler"] = pack_state(scheduler.state_dict())
        if strategy := replica.strategy.state():
            tensors["strategy"] = strategy
        return Snapshot(step=step, tensors=tensors, facts=facts)

    def _tell(self) -> None:
        try:
            for saved in self._writer.poll():
                self._member.emit(
                    "checkpoint_saved",
                    step=saved.step,
                    path=str(saved.path),
                    size_bytes=saved.size_bytes,
                    held_s=saved.held_s,
                    seconds=saved.seconds,
                )
        except CheckpointError as error:
            self._member.emit("warning", text=str(error))

    def finish(self, step: int) -> None:
        """Wait for the last checkpoint and write `model.safetensors`.

        Raises:
            CheckpointError: the model cannot be written.
        """
        self._writer.finish()
        self._tell()
        digest = parameters_sha256(self._model)
        path = self._member.run / "model.safetensors"
        facts = {"step": str(step), "job": self._member.job.name, "parameters_sha256": digest}
        size = save_model(path, self._model, facts)
        self._member.emit(
            "model_saved", step=step, path=str(path), parameters_sha256=digest, size_bytes=size
        )
