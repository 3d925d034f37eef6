"""Copy the tensors of a checkpoint into a live model, bit for bit, or not at all.

It is for resuming the run that saved them: names, shapes, types and ties must be the same.
To load what fits from any file, use `load.load_model`. It knows no files. Way in: `restore` for
whole tensors, `restore_pieces` for a rank that has parts of them, or takes them from parts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.boxes import cut_of, local
from instep.state.load import LoadReport, mismatch
from instep.state.pieces import Pieces
from instep.state.sized import sized, take_shapes
from instep.state.snapshot import model_tensors, tied_names

_EXTRA = "_extra_state"
"""Ends the name of what `get_extra_state` returned, whose shape may change."""


def restore(tensors: Mapping[str, Tensor], model: nn.Module) -> None:
    """Give a model the parameters and persistent buffers that were saved, to the bit.

    They are copied into the model's own memory: an optimizer or a tied layer
    that refers to its parameters sees the new values.

    Args:
        tensors: group `"model"` of a loaded snapshot; on any device.
        model: as the recipe builds it.

    Raises:
        CheckpointError: the recipe now builds another model than the one that
            was trained; names some of what differs. The model is unchanged.
    """
    shapes = sized(model, tensors, tensors.__getitem__)
    report = _compare(tensors, model_tensors(model) | shapes)
    _refuse(report)
    take_shapes(model, shapes)
    _load(model, tensors, strict=True)


def restore_pieces(pieces: Pieces, model: nn.Module, *, all_names: bool = True) -> None:
    """Give a model, or a rank's part of one, what was saved, to the bit.

    One tensor at a time is read, of which only what this rank has, and copied into the model's
    own memory.

    Args:
        pieces: with tensors `model/NAME`, saved on any mesh.
        model: as the recipe builds it; parameters may be DTensors.
        all_names: whether the model has every tensor, and not only those of some stages.

    Raises:
        CheckpointError: the recipe now builds another model than the one that was trained, and
            the model is unchanged; or what is needed cannot be read.
    """
    saved = {name: pieces.like(f"model/{name}") for name in pieces.names("model")}
    shapes = sized(model, saved, saved.__getitem__)
    wanted = model_tensors(model) | shapes
    memory: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    memory |= dict(model.named_buffers(remove_duplicate=False))
    wrong = _mismatches(saved, wanted)
    wrong |= _other_ties(pieces, {name: memory[name] for name in wanted if name in memory})
    report = LoadReport(
        matched=tuple(name for name in wanted if name in saved and name not in wrong),
        missing=tuple(name for name in wanted if name not in saved),
        unexpected=tuple(name for name in saved if name not in wanted) if all_names else (),
        wrong=wrong,
    )
    _refuse(report)
    if shapes:
        take_shapes(model, shapes)
        wanted = model_tensors(model)
        memory |= dict(model.named_buffers(remove_duplicate=False))
    special = dict[str, Tensor]()
    with torch.no_grad():
        for name, tensor in wanted.items():
            if name in memory:
                cut = cut_of(tensor, name)
                local(tensor).copy_(pieces.read(f"model/{name}", cut and cut.box))
            else:  # extra state, or what a hook of the model computes
                special[name] = pieces.read(f"model/{name}")
    if special:
        _load(model, special, strict=False)


def _refuse(report: LoadReport) -> None:
    if report.missing or report.unexpected or report.wrong:
        raise CheckpointError(
            f"the recipe now builds another model than the one that was trained: {report} "
            "Use the recipe and the arguments that the run was started with."
        )


def _load(model: nn.Module, tensors: Mapping[str, Tensor], *, strict: bool) -> None:
    try:
        model.load_state_dict(dict(tensors), strict=strict)
    except RuntimeError as error:  # a module's own way of loading refuses
        text = " ".join(str(error).split())
        raise CheckpointError(f"the model does not take its own state back: {text}") from error


def _other_ties(pieces: Pieces, memory: Mapping[str, Tensor]) -> dict[str, str]:
    """Names that are one tensor in the model and were two when saved, or the other way round.

    Ranks of a pipeline save a weight that two stages share once for each: that is no difference.
    """
    wrong, firsts = dict[str, str](), dict[int, str]()
    for name, tensor in memory.items():
        first = firsts.setdefault(id(tensor), name)
        mine, theirs = f"model/{name}", f"model/{first}"
        if first == name or mine not in pieces or theirs not in pieces:
            continue
        cut = cut_of(tensor, name)
        box = cut and cut.box
        if not pieces.same(mine, theirs) and not _same_bits(
            pieces.read(mine, box), pieces.read(theirs, box)
        ):
            wrong[name] = f"a tensor of its own when saved, tied to {first} in the model"
    apart = dict[int, tuple[str, int]]()
    for name, tensor in memory.items():
        for mark in pieces.marks(f"model/{name}"):
            first, whose = apart.setdefault(mark, (name, id(tensor)))
            if whose != id(tensor):
                wrong[name] = f"tied to {first} when saved, a tensor of its own in the model"
    return wrong


def _same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )


def _compare(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> LoadReport:
    both = [name for name in wanted if name in saved]
    wrong = _mismatches(saved, wanted)
    ties, saved_ties = _first_names(wanted), _first_names(saved)
    for name in both:
        if name not in wrong and ties[name] != saved_ties[name]:
            wrong[name] = f"{_tie(name, saved_ties)} when saved, {_tie(name, ties)} in the model"
    return LoadReport(
        matched=tuple(name for name in both if name not in wrong),
        missing=tuple(name for name in wanted if name not in saved),
        unexpected=tuple(name for name in saved if name not in wanted),
        wrong=wrong,
    )


def _mismatches(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: why
        for name in wanted
        if name in saved
        and name.rpartition(".")[2] != _EXTRA
        and (why := mismatch(saved[name], wanted[name], "when saved", convert=False))
    }


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name to the first, in the order of names, that has the same memory."""
    ordered = dict(sorted(tensors.items()))
    return {name: name for name in ordered} | tied_names(ordered)


def _tie(name: str, first_names: Mapping[str, str]) -> str:
    first = first_names[name]
    return "a tensor of its own" if first == name else f"tied to {first}"
