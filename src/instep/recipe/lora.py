"""LoRA: low-rank adapters of linear layers, beside a frozen model.

An adapted layer computes `W x + scale * B A x`, where only A and B are trained (Hu et al. 2021,
arXiv:2106.09685, equation 3). They are two more parameters of the layer itself, `lora_A` and
`lora_B`, and a forward hook adds their part. So every other parameter keeps the name that it has
without adapters, and its layer its type. Each factor is laid out as the weight of its layer is: a
Linear layer has A [rank, inputs] and B [outputs, rank]; a Conv1D layer of transformers, whose
weight is [inputs, outputs], has A [inputs, rank] and B [rank, outputs].

Files, processes and steps are not known here; `state/export/adapter.py` exports what was trained.
Way in: `add`.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from instep.data.order import key
from instep.errors import SpecError
from instep.job.start import LoraSpec
from instep.recipe.start.patterns import matched_by, names_of
from instep.units import readable_count
from instep.words import listed, plural

_SHOWN = 8  # names in a message; a model may have thousands


class Called:
    """Which adapters passes have used. Copies of the model share it."""

    def __init__(self) -> None:
        self.names = set[str]()
        """Of their layers; "" once there was a pass."""

    def __deepcopy__(self, memo: Any) -> Called:
        return self


@dataclass(frozen=True)
class Adapted:
    """What of a model is trained."""

    layers: Sequence[str]
    """Names of the layers that have an adapter, in the order of the model."""

    rank: int
    trained: int
    """Values that are trained: the adapters', and those of `lora.also_train`."""

    total: int
    """Values of the parameters of the model without adapters."""

    called: Called

    @property
    def unused(self) -> list[str]:
        """Layers with an adapter that no pass has called so far; none before the first pass."""
        called = self.called.names
        return [name for name in self.layers if name not in called] if called else []

    def fields(self) -> dict[str, Any]:
        """The fields of the event `lora_added`."""
        text = (
            f"rank {self.rank} on {plural(len(self.layers), 'layer')}: "
            f"{readable_count(self.trained)} values are trained, beside a model of "
            f"{readable_count(self.total)}"
        )
        return {
            "layers": list(self.layers),
            "trained": self.trained,
            "total": self.total,
            "text": text,
        }


def add(lora: LoraSpec, model: nn.Module, seed: int) -> Adapted | None:
    """Give layers of a model an adapter, and freeze all that the job does not train.

    A new adapter changes no output: B is 0. A is uniform within 1 / sqrt(inputs), drawn from
    the seed and the name of its layer alone. Adapters of weights of 16 bits have 32. Batch
    normalisation that is not trained keeps its running statistics, and stays in eval mode; any
    other part of the model follows `train()`, frozen or not.

    Args:
        lora: of the job.
        model: on any device; changed in place. What it is to start from is loaded already.
        seed: of the job.

    Returns:
        What is trained; None if the job has no LoRA.

    Raises:
        SpecError: a pattern matches nothing, or a layer cannot have an adapter.
    """
    if not lora.modules:
        return None
    named = names_of(model)
    total = sum(parameter.numel() for parameter in named)
    layers = _chosen(lora.modules, model)
    for name, layer in layers.items():
        _check(lora, name, layer, model, named)
    numbers = matched_by("lora.also_train", lora.also_train, list(named.values()))
    whole = {parameter for number, parameter in enumerate(named) if number in numbers}
    for name, layer in layers.items():
        if layer.weight in whole:
            raise SpecError(
                f"lora.also_train matches '{name}.weight', and lora.modules gives that layer an "
                "adapter: it is trained in one way. Leave it out of one of them."
            )
    for parameter in named:
        parameter.requires_grad_(parameter in whole)
    for module in model.modules():
        if isinstance(module, _NormBase) and not set(module.parameters()) & whole:
            keep_in_eval_mode(module)
    called = Called()
    for name, layer in layers.items():
        first, second = initial(lora, name, layer, seed)
        layer.register_parameter("lora_A", nn.Parameter(first))
        layer.register_parameter("lora_B", nn.Parameter(second))
        hook = partial(_add, name, called, scale=lora.scale, dropout=lora.dropout)
        layer.register_forward_hook(hook, with_kwargs=True)
    model.register_forward_pre_hook(partial(_note, called))
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Adapted(list(layers), lora.rank, trained, total, called)


def initial(lora: LoraSpec, name: str, layer: nn.Module, seed: int) -> tuple[Tensor, Tensor]:
    """Both factors of a new adapter, on the device of the layer's weight; never the meta device.

    The values follow from the seed, the layer's name and its shape, wherever they are made.
    """
    assert isinstance(layer.weight, Tensor)
    kind, device = layer.weight.dtype, layer.weight.device
    kind = torch.float32 if kind.itemsize < 4 else kind
    outputs, inputs = _sides(layer)
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    generator = torch.Generator().manual_seed(key(seed, number))
    bound = inputs**-0.5
    first = torch.empty(lora.rank, inputs, dtype=kind).uniform_(-bound, bound, generator=generator)
    second = torch.zeros(outputs, lora.rank, dtype=kind)
    if not isinstance(layer, nn.Linear):
        first, second = first.T.contiguous(), second.T.contiguous()
    return (first, second) if device.type == "meta" else (first.to(device), second.to(device))


def keep_in_eval_mode(module: nn.Module) -> None:
    """Put a module into eval mode for good, whatever calls `train()`."""
    # on the module itself, as `train()` of the whole model calls that of each part
    module.__dict__["train"] = MethodType(_stay_in_eval_mode, module)
    module.train()


def _stay_in_eval_mode(module: nn.Module, mode: bool = True) -> nn.Module:
    return type(module).train(module, False)


def _note(called: Called, *_: object) -> None:
    called.names.add("")


def _add(
    name: str,
    called: Called,
    layer: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    output: Tensor,
    *,
    scale: float,
    dropout: float,
) -> Tensor:
    """The forward hook of an adapted layer: its output, and the part of its adapter."""
    called.names.add(name)
    first, second = layer.lora_A, layer.lora_B
    assert isinstance(first, Tensor)
    assert isinstance(second, Tensor)
    inputs: Tensor = args[0] if args else next(iter(kwargs.values()))
    inputs = inputs.to(first.dtype)
    if dropout:
        inputs = F.dropout(inputs, dropout, layer.training)
    linear = isinstance(layer, nn.Linear)
    part = F.linear(F.linear(inputs, first), second) if linear else inputs @ first @ second
    return (output + part * scale).to(output.dtype)


def _sides(layer: nn.Module) -> tuple[int, int]:
    """How many outputs and inputs a layer has."""
    assert isinstance(layer.weight, Tensor)
    outputs, inputs = layer.weight.shape
    return (outputs, inputs) if isinstance(layer, nn.Linear) else (inputs, outputs)


def _can_be_adapted(module: nn.Module) -> bool:
    there = sys.modules.get("transformers.pytorch_utils")  # not imported for this
    conv1d = getattr(there, "Conv1D", nn.Linear)
    return isinstance(module, (nn.Linear, conv1d))


def _chosen(patterns: Sequence[str], model: nn.Module) -> dict[str, nn.Module]:
    """The layers that any pattern matches, by their first names."""
    names: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if name:
            names.setdefault(module, []).append(name)
    layers = {module: each for module, each in names.items() if _can_be_adapted(module)}
    found = set[nn.Module]()
    for pattern in patterns:
        hits = {m for m, each in names.items() if any(fnmatchcase(n, pattern) for n in each)}
        if not hits & layers.keys():
            others = {each[0]: type(m).__name__ for m, each in names.items() if m in hits}
            raise _no_layer(pattern, others, [each[0] for each in layers.values()])
        found |= hits & layers.keys()
    return {each[0]: module for module, each in layers.items() if module in found}


def _no_layer(pattern: str, others: Mapping[str, str], layers: Sequence[str]) -> SpecError:
    if others:
        shown = listed([f"{name!r} ({kind})" for name, kind in others.items()], 3)
        why = f"which matches only {shown}: LoRA adapts Linear layers, and Conv1D of transformers."
    else:
        why = "which matches no layer of the model."
    ends = dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in layers if "." in name)
    near = [end for end in ends if end == f"*.{pattern}"]
    near = near or get_close_matches(pattern, [*ends, *layers], n=1)
    guess = f"Did you mean {near[0]!r}? " if near else ""
    known = listed(layers, _SHOWN) or "none"
    return SpecError(f"lora.modules has {pattern!r}, {why} {guess}Linear layers: {known}.")


def _check(
    lora: LoraSpec,
    name: str,
    layer: nn.Module,
    model: nn.Module,
    named: Mapping[nn.Parameter, Sequence[str]],
) -> None:
    weight = layer._parameters.get("weight")
    leave = "Give patterns that leave it out."
    if weight is None or not weight.is_floating_point() or weight.dim() != 2:
        raise SpecError(
            f"lora.modules matches {name!r}, a {type(layer).__name__} whose weight is no plain "
            f"parameter (it is quantized, or computed from others). {leave}"
        )
    if hasattr(layer, "lora_A") or hasattr(layer, "lora_B"):
        raise SpecError(
            f"lora.modules matches {name!r}, which has an adapter already, from the recipe. "
            "Leave [lora] or the recipe's own adapters out."
        )
    if isinstance(model.get_submodule(name.rpartition(".")[0]), nn.MultiheadAttention):
        raise SpecError(
            f"lora.modules matches {name!r}, whose weight nn.MultiheadAttention uses without "
            f"calling the layer: an adapter would have no effect. {leave}"
        )
    places = {id(module): module for module in model.modules()}.values()
    owners = [m for m in places if any(p is weight for p in m._parameters.values())]
    if len(owners) > 1:
        others = [each for each in named[weight] if each.rpartition(".")[0] != name]
        raise SpecError(
            f"lora.modules matches {name!r}, whose weight is tied to {listed(others, 2)}: merged, "
            f"the two would differ. {leave}"
        )
    outputs, inputs = _sides(layer)
    if lora.rank == inputs == outputs:
        # also what tells the two layouts of the factors apart
        raise SpecError(
            f"lora.rank = {lora.rank} is the full rank of the layer {name!r}, with {inputs} inputs "
            "and outputs. Set it lower; or train the layer itself, with lora.also_train."
        )
    if lora.rank > min(outputs, inputs):
        raise SpecError(
            f"lora.rank = {lora.rank} is more than the layer {name!r} has, with {inputs} inputs "
            f"and {outputs} outputs. Set it to at most {min(outputs, inputs)}, or leave the layer "
            "out of lora.modules."
        )
