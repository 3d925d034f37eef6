"""Copy the tensors of a checkpoint into a live model, bit for bit, or not at all.

It is for resuming the run that saved them: names, shapes, types and ties must be the same.
To load what fits from any file, use `load.load_model`. It knows no files. Way in: `restore`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.load import LoadReport, mismatch
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
    report = _compare(tensors, model_tensors(model))
    if report.missing or report.unexpected or report.wrong:
        raise CheckpointError(
            f"the recipe now builds another model than the one that was trained: {report} "
            "Use the recipe and the arguments that the run was started with."
        )
    try:
        model.load_state_dict(dict(tensors), strict=True)
    except RuntimeError as error:  # a module's own way of loading refuses
        text = " ".join(str(error).split())
        raise CheckpointError(f"the model does not take its own state back: {text}") from error


def _compare(saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> LoadReport:
    both = [name for name in wanted if name in saved]
    wrong = {
        name: why
        for name in both
        if name.rpartition(".")[2] != _EXTRA
        and (why := mismatch(saved[name], wanted[name], "when saved", convert=False))
    }
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


def _first_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Each name to the first, in the order of names, that has the same memory."""
    ordered = dict(sorted(tensors.items()))
    return {name: name for name in ordered} | tied_names(ordered)


def _tie(name: str, first_names: Mapping[str, str]) -> str:
    first = first_names[name]
    return "a tensor of its own" if first == name else f"tied to {first}"
