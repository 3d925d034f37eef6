"""Everything that one commit left behind, as one snapshot, and back again.

A checkpoint, a peer that lacks the commit and the copy that a run goes back to all
get the same from here: parameters, buffers, optimizer, scheduler, scaler, what the
strategy remembers, and the counters. When and where to it travels, others know.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.load import load
from instep.state.packing import pack_state, unpack_state
from instep.state.restore import restore as restore_model
from instep.state.snapshot import Snapshot, model_tensors
from instep.system.causes import sentence
from instep.worker.update import Update


class Progress(NamedTuple):
    """The counters that a commit moves."""

    step: int = 0
    """The last committed one."""
    course: int = 0
    """How often the run went back to an earlier step; (course, step) orders commits."""
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    """Of the epoch that is not finished: loss times samples, and samples."""


class Remembers(Protocol):
    """What a snapshot needs of a strategy."""

    def state(self) -> dict[str, Tensor]:
        """What is the same on every rank after a commit."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""


def capture(
    progress: Progress,
    model: nn.Module,
    update: Update,
    strategy: Remembers,
    *,
    moved: Container[int] | None = None,
) -> Snapshot:
    """Everything of the last commit that the next step builds on.

    Args:
        progress: the counters.
        model: as that commit left it.
        update: has its optimizer, scheduler and scaler.
        strategy: remembers something, or nothing.
        moved: identities (`id`) of the buffers that are taken although the state dict leaves
            them out; None takes every such buffer.

    Raises:
        CheckpointError: something in it cannot be kept.
    """
    optimizer, skeleton = pack_state(update.optimizer.state_dict())
    facts: dict[str, Any] = {
        "epoch_so_far": pack_state([progress.epoch_loss, progress.epoch_samples])[1],
        "course": progress.course,
        "optimizer": skeleton,
        "scaler": update.scaler.state_dict(),
    }
    tensors = {"model": model_tensors(model), "optimizer": optimizer}
    if update.scheduler is not None:
        tensors["scheduler"], facts["scheduler"] = pack_state(update.scheduler.state_dict())
    if update.between.made:
        facts["between"] = dict(update.between.made)
    if remembered := strategy.state():
        tensors["strategy"] = remembered
    others = _outside(model, tensors["model"])
    if kept := {name: b for name, b in others.items() if moved is None or id(b) in moved}:
        tensors["aside"] = kept
    return Snapshot(step=progress.step, tensors=tensors, facts=facts)


def _outside(model: nn.Module, kept: Container[str]) -> dict[str, Tensor]:
    """Buffers that the model's state dict leaves out, by name; a pass may move them too."""
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def restore(
    snapshot: Snapshot, source: object, model: nn.Module, update: Update, strategy: Remembers
) -> Progress:
    """Give model, optimizer, scheduler, scaler and strategy the state of a snapshot.

    Args:
        snapshot: as `capture` made it.
        source: where it is from, for messages.
        model: as the recipe builds it.
        update: with an optimizer and a scheduler as the recipe makes them.
        strategy: of the same name and options.

    Raises:
        CheckpointError: it is of another model or optimizer.
    """
    tensors, facts = snapshot.tensors, snapshot.facts
    restore_model(tensors["model"], model)
    others = _outside(model, tensors["model"])
    with torch.no_grad():
        for name, tensor in tensors.get("aside", {}).items():
            if name in others:
                others[name].copy_(tensor)
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
            f"{source} is of another optimizer or scheduler than the recipe now makes: "
            f"{sentence(error)}"
        ) from error
    update.between.made = dict(facts.get("between", {}))
    strategy.load_state(tensors.get("strategy", {}))
    return Progress(snapshot.step, facts.get("course", 0), loss, samples)


def read_checkpoint(checkpoint: Path | None, model: nn.Module) -> Snapshot | None:
    """What a checkpoint on disk holds; None without one, for the state of a run's beginning.

    Raises:
        CheckpointError: it cannot be read.
    """
    if checkpoint is None:
        return None
    return load(checkpoint, next(model.parameters()).device)
