"""Layers that compute with a part of their weight.

A layer keeps its object, name, hooks and other attributes; only its class changes, to a subclass
with another `forward`. Where parts come from and who the other ranks are is not known here.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from instep.comm.dtensors import local_part
from instep.parallel.tensor.links import Links
from instep.parallel.tensor.plan import Cut


def kind_of(module: Any) -> str:
    """`linear`, `embedding`, `conv1d` (of transformers), or empty if it cannot be cut.

    A subclass with another `forward` is none of them, and neither is one whose weight a hook
    computes, as `torch.nn.utils.weight_norm` has it.
    """
    cls: Any = type(module)
    if isinstance(module, nn.Module) and module._parameters.get("weight") is None:
        return ""
    return _kind_of(cls)


@functools.cache
def _kind_of(cls: Any) -> str:
    if issubclass(cls, _Cut):  # itself or, where its calls are intercepted, its base
        cls = next(
            each
            for each in cls.__mro__
            if issubclass(each, nn.Module) and not issubclass(each, _Cut)
        )
    if cls is nn.Linear:
        return "linear"
    if cls is nn.Embedding:
        return "embedding"
    conv1d = (cls.__module__, cls.__name__) == ("transformers.pytorch_utils", "Conv1D")
    return "conv1d" if conv1d else ""


def widths(module: nn.Module) -> tuple[int, int]:
    """Inputs and outputs of a layer that can be cut; inputs of an embedding are its rows."""
    weight = whole_shape(module)
    return (weight[1], weight[0]) if kind_of(module) == "linear" else (weight[0], weight[1])


def whole_shape(module: nn.Module) -> tuple[int, ...]:
    """Of the weight; of a DTensor the whole shape too."""
    return tuple(module.get_parameter("weight").shape)


def cut_dims(kind: str, cut: Cut) -> dict[str, int]:
    """Which dimension of which parameter is cut; a parameter that is left out stays whole."""
    if cut.style in ("row", "vocabulary"):
        return {"weight": 1 if kind == "linear" else 0}
    return {"weight": 0 if kind == "linear" else 1, "bias": 0}


def exchange(module: nn.Module, name: str, cut: Cut, links: Links, width: int) -> type[nn.Module]:
    """Have a module compute as cut; returns its class from before.

    Args:
        width: its outputs, in the whole model.
    """
    before = type(module)
    style: Any = {"row": _RowLayer, "vocabulary": _Vocabulary}.get(cut.style, _Column)
    if cut.style.startswith("column") and kind_of(module) == "embedding":
        style = _ColumnEmbedding
    module.__class__ = _with_base(style, before)
    module._tensor_cut = (name, cut, links, width)  # type: ignore[assignment]
    return before


_classes: dict[tuple[Any, Any], Any] = {}


def _with_base(style: Any, base: Any) -> Any:
    made = _classes.get((style, base))
    if made is None:
        made = _classes[style, base] = type(f"Cut{base.__name__}", (style, base), {})
    return made


class _Cut:
    _tensor_cut: tuple[str, Cut, Links, int]
    weight: Tensor
    bias: Tensor | None

    def _matrix(self) -> Tensor:
        weight: Tensor = local_part(self.weight)
        return weight if kind_of(self) == "linear" else weight.t()


class _Column(_Cut):
    def forward(self, values: Tensor) -> Tensor:
        name, cut, links, width = self._tensor_cut
        values = links.copy(values, cut.group)
        made = F.linear(
            values, self._matrix(), None if self.bias is None else local_part(self.bias)
        )
        return links.gather(made, cut.group, name, width) if cut.style != "column" else made


class _RowLayer(_Cut):
    def forward(self, values: Tensor) -> Tensor:
        name, cut, links, _ = self._tensor_cut
        made = links.sum(F.linear(values, self._matrix()), cut.group, name)
        return made if self.bias is None else made + self.bias.to(made.dtype)


class _ColumnEmbedding(_Cut):
    def forward(self, indices: Tensor) -> Tensor:
        name, cut, links, width = self._tensor_cut
        own: Any = self
        made = F.embedding(
            indices, local_part(self.weight), own.padding_idx, None, 2.0, own.scale_grad_by_freq
        )
        return links.gather(made, cut.group, name, width) if cut.style != "column" else made


class _Vocabulary(_Cut):
    def forward(self, indices: Tensor) -> Tensor:
        name, cut, links, _ = self._tensor_cut
        own: Any = self
        first, stop = links.part(own.num_embeddings)
        elsewhere = (indices < first) | (indices >= stop)
        if own.padding_idx is not None:  # its row gets no gradient
            elsewhere |= indices == own.padding_idx
        weight = local_part(self.weight)
        if first == stop:
            made = weight.new_zeros(*indices.shape, weight.shape[1])
        else:
            made = F.embedding((indices - first).masked_fill(elsewhere, 0), weight)
            made = made.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        if own.padding_idx is not None and first <= own.padding_idx < stop:
            padded = (indices == own.padding_idx).unsqueeze(-1)
            made = torch.where(padded, weight[own.padding_idx - first].detach(), made)
        return links.sum(made, cut.group, name)
