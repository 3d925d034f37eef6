"""Finds the layer that looks at the other samples of its batch, for the verdict of a trial.

Such a layer gives a sample other outputs in another batch, though its inputs are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instep.parallel.nested import tensors_in
from instep.worker.trial.model import TrialModel

Outputs = dict[str, tuple[list[Tensor], list[Tensor]]]
"""Name of each module to the tensors of its inputs and outputs, in the order the modules ended."""


def outputs_of(model: TrialModel, batch: Any) -> Outputs:
    """Run a forward pass, and record the inputs and outputs of every module."""
    found: Outputs = {}
    hooks = []
    for name, module in model.model.named_modules():
        if not name:
            continue

        def keep(_: nn.Module, given: Any, made: Any, name: str = name) -> None:
            found.setdefault(name, (_floats(given), _floats(made)))

        hooks.append(module.register_forward_hook(keep))
    try:
        model.run(batch, 1, backward=False)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def first_that_mixes(apart: Sequence[Outputs], whole: Outputs, near: float) -> str:
    """The innermost module that gives samples other outputs in another batch; empty if none does.

    Args:
        apart: of passes over parts of a batch.
        whole: of a pass over the whole batch.
        near: the relative difference that counts as rounding.
    """
    for name, (given, made) in whole.items():
        if not made or any(name not in outputs for outputs in apart):
            continue
        given_alike, made_alike = (
            rows_alike([outputs[name][place] for outputs in apart], tensors, near)
            for place, tensors in enumerate((given, made))
        )
        if given_alike and made_alike is False:
            return name
    return ""


def layer_in_words(model: nn.Module, name: str) -> str:
    """`BatchNorm2d 'body.1' (and 3 more of its kind)`."""
    module = model.get_submodule(name)
    more = sum(type(each) is type(module) for each in model.modules()) - 1
    others = f" (and {more} more of its kind)" if more else ""
    return f"{type(module).__name__} {name!r}{others}"


def batch_norm_buffers(model: nn.Module) -> dict[str, str]:
    """The buffers of batch normalisation, and their layers in words."""
    return {
        f"{prefix}.{name}" if prefix else name: layer_in_words(model, prefix)
        for prefix, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        for name in module._buffers
    }


def rows_alike(apart: Sequence[list[Tensor]], whole: list[Tensor], near: float) -> bool | None:
    """Whether the tensors of the whole are those of the parts, one after the other.

    None if that is unknown: none of them consists of rows of the others, as when batches are
    padded to different lengths.
    """
    alike = None
    for tensor, *parts in zip(whole, *apart, strict=False):
        for dim in range(min(2, tensor.dim())):
            if any(part.dim() != tensor.dim() for part in parts):
                break
            rests = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in (tensor, *parts)}
            if len(rests) == 1 and tensor.shape[dim] == sum(part.shape[dim] for part in parts):
                joined = torch.cat(parts, dim).double()
                given, nan = tensor.double(), joined.isnan() & tensor.isnan()
                gap = float(torch.where(nan, 0.0, joined - given).norm())
                same = gap <= near * float(joined.nan_to_num().norm()) + 1e-12
                alike = same and alike is not False
                break
    return alike


def _floats(given: Any) -> list[Tensor]:
    return [each.detach().clone() for each in tensors_in(given) if each.is_floating_point()]
