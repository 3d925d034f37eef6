"""Everything that one commit left behind, as one snapshot, and back again.

A checkpoint, a peer that lacks the commit and the copy that a run goes back to all
get the same from here: parameters, buffers, optimizer, scheduler, scaler, what the
strategy remembers, and the counters. When and where to it travels, others know.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from instep.comm.buckets import laid_out_like
from instep.engine.beside import beside
from instep.engine.served.written import put_together
from instep.engine.state.attributes import kept_beside, lost
from instep.engine.state.parts import (
    captured_parts,
    in_order,
    mesh_of,
    parameter_order,
    read_rank_state,
    restore_aside,
    restore_optimizer,
)
from instep.engine.update import Update
from instep.errors import CheckpointError
from instep.recipe.optimizers.combined import parts_of
from instep.state.boxes import MeshRank
from instep.state.files.manifest import is_meshed, read_manifest
from instep.state.load import load
from instep.state.open_pieces import open_pieces
from instep.state.packing import pack_state, unpack_state
from instep.state.pieces import SHARD, Pieces, held_pieces
from instep.state.restore import restore as restore_model
from instep.state.restore import restore_pieces
from instep.state.sized import sized, take_shapes
from instep.state.snapshot import COPIES, PART, Snapshot, model_tensors
from instep.system.causes import sentence

STRATEGY = "strategy"
"""Begins the name of the group of tensors that a strategy remembers."""


class CommitProgress(NamedTuple):
    """The counters that a commit moves."""

    step: int = 0
    """The last committed one."""
    course: int = 0
    """How often the run went back to an earlier step; (course, step) orders commits."""
    epoch_loss: float = 0.0
    epoch_samples: int = 0
    """Of the epoch that is not finished: loss times samples, and samples."""
    turns: tuple[float, ...] = ()
    """The loss of each turn of the next step that is committed already, where a step has several:
    (course, step, how many) orders commits."""


class Moved(Protocol):
    """One update of a step: what a snapshot needs of it."""

    @property
    def name(self) -> str:
        """Among those of the step; empty where it is the only one."""

    @property
    def update(self) -> Update:
        """With its optimizer and scheduler; the scaler is the same for all."""

    @property
    def strategy(self) -> Remembers:
        """What it remembers."""


class Remembers(Protocol):
    """What a snapshot needs of a strategy."""

    def state(self) -> dict[str, Tensor]:
        """What is the same on every rank after a commit."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""


def capture(
    progress: CommitProgress,
    model: nn.Module,
    turns: Sequence[Moved],
    *,
    moved: Container[int] | None = None,
    rank: MeshRank | None = None,
) -> Snapshot:
    """Everything of the last commit that the next step builds on, as far as this process has it.

    Args:
        progress: the counters.
        model: as that commit left it.
        turns: the updates of a step, with optimizer, scheduler, scaler and strategy.
        moved: identities (`id`) of the buffers that are taken although the state dict leaves
            them out; None takes every such buffer.
        rank: of a replica that is a mesh; None where one process has all of it.

    Returns:
        Tensors in the memory of model and optimizer. A rank of a mesh has its parts of them in
        the groups `PART` (what it writes to a checkpoint) and `COPIES`, and no DTensor.

    Raises:
        CheckpointError: something in it cannot be kept.
    """
    update = turns[0].update
    facts: dict[str, Any] = {
        "epoch_so_far": pack_state([progress.epoch_loss, progress.epoch_samples])[1],
        "course": progress.course,
        "scaler": update.scaler.state_dict(),
    }
    if progress.turns:
        facts["turns"] = pack_state(list(progress.turns))[1]
    if update.between.done:
        facts["between"] = dict(update.between.done)
    model_state = model_tensors(model)
    others = _outside(model, model_state)
    aside = {name: b for name, b in others.items() if moved is None or id(b) in moved}
    tensors = {"model": model_state} if rank is None else {}
    snapshot = Snapshot(step=progress.step, tensors=tensors, facts=facts)
    for each in turns:
        _capture_update(each, model, snapshot, meshed=rank is not None)
    if rank is None:
        if aside:
            tensors["aside"] = aside
        return snapshot
    optimizers = {f"optimizer{_of(each)}": each.update.optimizer for each in turns}
    parts = captured_parts(model_state, aside, optimizers, model, rank)
    tensors |= {PART: parts.own, COPIES: parts.copies}
    facts["mesh"] = mesh_of(rank)
    return replace(snapshot, cuts=parts.cuts)


def _capture_update(turn: Moved, model: nn.Module, snapshot: Snapshot, *, meshed: bool) -> None:
    """Add what optimizer, scheduler and strategy of one update keep."""
    tensors, facts, own, of = snapshot.tensors, snapshot.facts, turn.update, _of(turn)
    state = own.optimizer.state_dict()
    if meshed:
        state["state"] = beside(state["state"])
    else:
        facts[f"parameters{of}"] = parameter_order(own.optimizer, model)
    tensors[f"optimizer{of}"], facts[f"optimizer{of}"] = pack_state(state)
    facts[f"classes{of}"] = _classes(own)
    if own.scheduler is not None:
        packed, facts[f"scheduler{of}"] = pack_state(own.scheduler.state_dict())
        tensors[f"scheduler{of}"] = packed
    if not meshed and (attributes := kept_beside(own.optimizer, own.scheduler, model)):
        facts[f"attributes{of}"] = attributes
    if remembered := turn.strategy.state():
        tensors[f"{STRATEGY}{of}"] = remembered


def _of(turn: Moved) -> str:
    """How the groups of an update end: nothing, or `-NAME`."""
    return f"-{turn.name}" if turn.name else ""


def _outside(model: nn.Module, kept: Container[str]) -> dict[str, Tensor]:
    """Buffers that the model's state dict leaves out, by name; a pass may move them too."""
    return {name: buffer for name, buffer in model.named_buffers() if name not in kept}


def restore(
    snapshot: Snapshot,
    source: object,
    model: nn.Module,
    turns: Sequence[Moved],
    *,
    rank: MeshRank | None = None,
) -> CommitProgress:
    """Give model, optimizer, scheduler, scaler and strategy the state of a snapshot.

    Args:
        snapshot: as `capture` made it, here or on a rank of the same place in another replica;
            or as `read_checkpoint` did.
        source: where it is from, for messages.
        model: as the recipe builds it.
        turns: with optimizers and schedulers as the recipe makes them, and strategies of the
            same name and options.
        rank: of a replica that is a mesh.

    Raises:
        CheckpointError: it is of another model or optimizer.
    """
    tensors, facts, update = snapshot.tensors, snapshot.facts, turns[0].update
    pieces = held_pieces(snapshot, source) if PART in tensors else snapshot.pieces
    if pieces is not None:
        restore_pieces(pieces, model, all_names=rank is None or rank.has_all_names)
        saved = pieces.names("aside")
        take_shapes(model, sized(model, saved, lambda name: pieces.like(f"aside/{name}")))
        restore_aside(pieces, _outside(model, model_tensors(model)))
    else:
        restore_model(tensors["model"], model)
        aside = tensors.get("aside", {})
        take_shapes(model, sized(model, aside, aside.__getitem__))
        others = _outside(model, tensors["model"])
        with torch.no_grad():
            for name, tensor in aside.items():
                if name in others:
                    others[name].copy_(tensor)
    for each in turns:
        _check_classes(facts.get(f"classes{_of(each)}"), _classes(each.update))
    try:
        for each in turns:
            _restore_update(each, model, snapshot, pieces)
        if facts["scaler"]:
            update.scaler.load_state_dict(facts["scaler"])
        loss, samples = unpack_state({}, facts["epoch_so_far"])
    except (KeyError, ValueError, TypeError, RuntimeError) as error:
        raise CheckpointError(
            f"{source} is of another optimizer or scheduler than the recipe now makes: "
            f"{sentence(error)}"
        ) from error
    update.between.done = dict(facts.get("between", {}))
    for each in turns:
        each.strategy.load_state(tensors.get(f"{STRATEGY}{_of(each)}", {}))
    done = tuple(unpack_state({}, facts["turns"])) if "turns" in facts else ()
    return CommitProgress(snapshot.step, facts.get("course", 0), loss, samples, done)


def _restore_update(
    turn: Moved, model: nn.Module, snapshot: Snapshot, pieces: Pieces | None
) -> None:
    """Give optimizer and scheduler of one update what they kept."""
    tensors, facts, own = snapshot.tensors, snapshot.facts, turn.update
    group = f"optimizer{_of(turn)}"
    if pieces is not None:
        restore_optimizer(pieces, group, own.optimizer, model)
    else:
        state = unpack_state(tensors.get(group, {}), facts[group])
        before = facts.get(f"parameters{_of(turn)}", ())
        own.optimizer.load_state_dict(in_order(state, before, own.optimizer, model))
        lay_out_state(own.optimizer.state)
        served = [named for name, named in tensors.items() if name.startswith(SHARD)]
        shards = {name: tensor for named in served for name, tensor in named.items()}
        own.optimizer.state.update(put_together(shards, model))
    if own.scheduler is not None:
        group = f"scheduler{_of(turn)}"
        own.scheduler.load_state_dict(unpack_state(tensors.get(group, {}), facts[group]))
    saved = facts.get(f"attributes{_of(turn)}", {})
    own.lost[:] = lost(saved, kept_beside(own.optimizer, own.scheduler, model)) if saved else ()


def _classes(update: Update) -> dict[str, Any]:
    """What moves the parameters, as far as it can be compared with what did."""
    optimizer, scheduler = update.optimizer, update.scheduler
    return {
        "optimizer": [type(each).__name__ for each in parts_of(optimizer)],
        "groups": len(optimizer.param_groups),
        "scheduler": None if scheduler is None else type(scheduler).__name__,
    }


def _check_classes(saved: Mapping[str, Any] | None, now: Mapping[str, Any]) -> None:
    """Refuse what a checkpoint has of another optimizer or scheduler; older ones do not say.

    Raises:
        CheckpointError: names both.
    """
    for what in now if saved is not None else ():
        assert saved is not None
        if saved[what] != now[what]:
            here, then = (
                " and ".join(map(str, each)) if isinstance(each, list) else each or "none"
                for each in (now[what], saved[what])
            )
            name = "number of parameter groups of the optimizer" if what == "groups" else what
            raise CheckpointError(
                f"the {name} has changed: {here} now, {then} when the checkpoint was saved. Use "
                "the recipe and the arguments that the run was started with; or start a new run "
                "from its model (start.model)."
            )


def lay_out_state(state: Mapping[Any, Any]) -> None:
    """Have what an optimizer keeps lie as its parameters do: files and messages keep no strides."""
    for parameter, kept in state.items():
        if isinstance(parameter, Tensor) and isinstance(kept, dict):
            for name, value in kept.items():
                if isinstance(value, Tensor):
                    kept[name] = laid_out_like(value, parameter)


def read_checkpoint(
    checkpoint: Path | None,
    model: nn.Module,
    turns: Sequence[Moved] = (),
    *,
    rank: MeshRank | None = None,
    lent: Snapshot | None = None,
) -> Snapshot | None:
    """What a checkpoint on disk holds; None without one, for the state of a run's beginning.

    Where either was saved or is loaded on a mesh, `restore` reads from the folder what this rank
    needs, tensor by tensor.

    Args:
        checkpoint: the folder; saved on any mesh.
        model: its first parameter says on which device tensors are wanted.
        turns: with the optimizers.
        rank: of a replica that is a mesh.
        lent: the checkpoint, as another machine lends it (`state/lent.py`).

    Raises:
        CheckpointError: it cannot be read.
    """
    if checkpoint is None:
        return None
    if (
        lent is None
        and rank is None
        and not (checkpoint.is_dir() and is_meshed(read_manifest(checkpoint)))
    ):
        return load(checkpoint, next(model.parameters()).device)
    order = {
        f"optimizer{_of(each)}": parameter_order(each.update.optimizer, model) for each in turns
    }
    snapshot = lent or open_pieces(checkpoint, order)
    saved_on = snapshot.facts.get("mesh")
    if rank is not None or saved_on is not None:  # of other parts of the model
        for group in [group for group in snapshot.tensors if group.startswith(STRATEGY)]:
            del snapshot.tensors[group]
    snapshot.tensors.update(read_rank_state(snapshot.pieces, saved_on, model, rank))
    return snapshot
