"""Whether layers of batch normalisation see the global batch whole, at any number of workers.

With `train.batch_norm = "global"` a layer joins what each call sees on all workers. That is the
global batch if a pass calls it with all its samples. A layer that is called with parts of a pass
(ghost batch normalisation) sees other samples together on two workers than on one.

The trial's copy uses running statistics, so inputs of these layers are comparable by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from instep.worker.trial.compared.layers import layer_in_words, rows_alike
from instep.worker.trial.model import TrialModel

Calls = Mapping[str, list[Tensor]]
"""Name of each layer to the inputs of its calls."""


def calls_of(model: TrialModel, batch: Any, samples: int) -> Calls:
    """Compute a batch, and record what layers of batch normalisation are given."""
    found: dict[str, list[Tensor]] = {}
    hooks = []
    for name, module in model.model.named_modules():
        if isinstance(module, _BatchNorm):

            def keep(_: nn.Module, given: tuple[Tensor, ...], name: str = name) -> None:
                found.setdefault(name, []).append(given[0].detach())

            hooks.append(module.register_forward_pre_hook(keep))
    try:
        model.compute(batch, samples)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def first_that_sees_parts(
    model: nn.Module, apart: Sequence[Calls], whole: Calls, near: float
) -> str:
    """The first layer that is not called with all of a batch, in words; empty if all are.

    Args:
        model: has the layers.
        apart: of passes over parts of a batch.
        whole: of a pass over the whole batch.
        near: the relative difference that counts as rounding.
    """
    for name, given in whole.items():
        parts = [calls.get(name, []) for calls in apart]
        if (
            any(len(part) != len(given) for part in parts)
            or rows_alike(parts, given, near) is False
        ):
            return layer_in_words(model, name)
    return ""
