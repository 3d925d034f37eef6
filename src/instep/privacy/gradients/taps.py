"""Inputs of plain layers and what is sent back to them, in one backward pass for many samples.

Zeros are added to the output of a layer, and it is they that are differentiated: their gradient is
what is sent back, and what the layer read is remembered. Under `vmap` each sample has its own of
both, as if it were alone. A layer whose parameters are used elsewhere too is none of them, and
where a pass calls one otherwise than it was seen to be called, `CalledOtherwise` says so. Way in:
`Taps`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.privacy.gradients.products import (
    ConvolutionGradients,
    EmbeddingGradients,
    LinearGradients,
    SampleGradients,
    WholeGradients,
)

LARGE = 1 << 14
"""Numbers of an embedding from which on it is quicker to go through the rows of each sample."""


class CalledOtherwise(Exception):
    """A pass calls a layer twice, or not at all, or with another shape."""


class Tapped(NamedTuple):
    """A layer that is called once for a sample."""

    layer: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Embedding
    weight: int
    """Place among the parameters."""
    bias: int | None
    shape: tuple[int, ...]
    """Shape of its output for one sample; the first dimension is 1."""


class Taps:
    """Layers of a model of which gradients need not be made by the backward pass.

    Args:
        model: whose.
        parameters: that are trained.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        places = {id(each): place for place, each in enumerate(parameters)}
        layers = [each for each in model.modules() if _is_plain(each)]
        uses: dict[int, int] = {}
        for module in model.modules():
            for parameter in module._parameters.values():
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
        self._places = places
        self._layers = [
            each
            for each in layers
            if id(each.weight) in places
            and all(uses[id(own)] == 1 for own in each._parameters.values() if own is not None)
        ]
        self._calls: list[tuple[nn.Module, Any, Tensor]] | None = None
        self._added: list[Tensor] = []
        self._read: dict[int, Tensor] = {}
        self.tapped: list[Tapped] = []

    def look(self, calls: Callable[[], Tensor]) -> None:
        """Find the layers that are called once, with one tensor, and whose parameters nothing else
        uses.

        Args:
            calls: a function that runs a forward pass of one sample, to its loss.
        """
        found: list[tuple[nn.Module, Any, Tensor]] = []
        self._calls = found
        try:
            with self._hooked(self._layers), torch.enable_grad():
                loss = calls()
        finally:
            self._calls = None
        seen: dict[int, int] = {}
        for layer, _, _ in found:
            seen[id(layer)] = seen.get(id(layer), 0) + 1
        elsewhere = _used(loss, [each for layer, _, _ in found for each in layer.parameters()])
        self.tapped = [
            self._as_tapped(layer, output)
            for layer, given, output in found
            if seen[id(layer)] == 1
            and _fits(layer, given, output)
            and not any(id(each) in elsewhere for each in layer.parameters())
        ]

    def _as_tapped(self, layer: Any, output: Tensor) -> Tapped:
        bias = getattr(layer, "bias", None)
        place = self._places.get(id(bias)) if bias is not None else None
        return Tapped(layer, self._places[id(layer.weight)], place, tuple(output.shape))

    @property
    def covered(self) -> set[int]:
        """Places of the parameters whose gradients these layers give."""
        pairs = ((each.weight, each.bias) for each in self.tapped)
        return {place for pair in pairs for place in pair if place is not None}

    @property
    def numbers(self) -> int:
        """Numbers that are kept of a sample."""
        return sum(2 * torch.Size(each.shape).numel() for each in self.tapped)

    def zeros(self, samples: int) -> list[Tensor]:
        """Something to add to the output of each, whose gradient is what is sent back to it."""
        made = [torch.zeros(1, device=each.layer.weight.device) for each in self.tapped]
        pairs = zip(made, self.tapped, strict=True)
        return [zero.expand(samples, *each.shape).requires_grad_() for zero, each in pairs]

    @contextmanager
    def adding(self, added: list[Tensor]) -> Iterator[dict[int, Tensor]]:
        """In this context a forward pass adds these to the outputs.

        Returns:
            By place of the weight, what the layer read.

        Raises:
            CalledOtherwise: not each layer was called once, as it was seen to be.
        """
        self._added, self._read = added, {}
        with self._hooked([each.layer for each in self.tapped]):
            yield self._read
        self._added = []
        if len(self._read) != len(self.tapped):
            raise CalledOtherwise

    @contextmanager
    def _hooked(self, layers: Sequence[nn.Module]) -> Iterator[None]:
        handles = [each.register_forward_hook(self._hook) for each in layers]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, layer: nn.Module, given: Any, output: Tensor) -> Tensor | None:
        if self._calls is not None:
            self._calls.append((layer, given, output))
            return _cut_off(layer, given[0]) if _fits(layer, given, output) else None
        number = next(n for n, each in enumerate(self.tapped) if each.layer is layer)
        tapped = self.tapped[number]
        again = tapped.weight in self._read or not _fits(layer, given, output)
        if again or output.shape != tapped.shape:
            raise CalledOtherwise
        self._read[tapped.weight] = given[0]
        return output + self._added[number]

    def gradients(
        self, read: Mapping[int, Tensor], sent: Sequence[Tensor]
    ) -> Iterator[tuple[int, SampleGradients]]:
        """Gradients, each with the place of its parameter.

        Args:
            read: by place of the weight, [samples, 1, ...] what the layer read.
            sent: of each layer, [samples, 1, ...] what was sent back to its output.
        """
        for (layer, weight, bias, _), back in zip(self.tapped, sent, strict=True):
            given = read[weight]
            if isinstance(layer, nn.Conv1d | nn.Conv2d):
                sent_back = back.flatten(0, 1).flatten(2)
                yield weight, ConvolutionGradients(layer, given.flatten(0, 1), sent_back)
                if bias is not None:
                    yield bias, WholeGradients(sent_back.sum(2))
                continue
            each = back.flatten(1, -2)
            if isinstance(layer, nn.Embedding):
                yield (
                    weight,
                    EmbeddingGradients(
                        given.flatten(1), each, layer.num_embeddings, layer.padding_idx
                    ),
                )
                continue
            yield weight, LinearGradients(given.flatten(1, -2), each)
            if bias is not None:
                yield bias, WholeGradients(each.sum(1))


def _is_plain(layer: nn.Module) -> bool:
    """Whether a layer does what its class does, and nothing besides, and is worth the trouble."""
    kinds = nn.Linear, nn.Conv1d, nn.Conv2d, nn.Embedding
    if type(layer) not in kinds or "forward" in vars(layer):
        return False
    if isinstance(layer, nn.Conv1d | nn.Conv2d) and (
        layer.padding_mode != "zeros" or isinstance(layer.padding, str)
    ):
        return False
    if isinstance(layer, nn.Embedding) and layer.weight.numel() < LARGE:
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks
    plain = not any(hooks) and not layer._backward_pre_hooks
    return plain and not getattr(layer, "scale_grad_by_freq", False)


def _fits(layer: nn.Module, given: Any, output: Any) -> bool:
    """Whether a call is one of a single sample, with one tensor whose first dimension is 1."""
    of_kinds = {nn.Embedding: range(1, 99), nn.Conv1d: range(3, 4), nn.Conv2d: range(4, 5)}
    dims = of_kinds.get(type(layer), range(2, 99))
    return (
        len(given) == 1
        and isinstance(given[0], Tensor)
        and isinstance(output, Tensor)
        and given[0].dim() in dims
        and given[0].shape[0] == output.shape[0] == 1
        and output.dtype == torch.float32
    )


def _cut_off(layer: Any, given: Tensor) -> Tensor:
    """The output of a layer of which the loss is not differentiated by its parameters."""
    weight = layer.weight.detach()
    if isinstance(layer, nn.Embedding):
        return nn.functional.embedding(given, weight, layer.padding_idx)
    bias = layer.bias.detach() if layer.bias is not None else None
    if isinstance(layer, nn.Linear):
        return nn.functional.linear(given, weight, bias)
    found: Tensor = layer._conv_forward(given, weight, bias)
    return found


def _used(loss: Tensor, parameters: Sequence[Tensor]) -> set[int]:
    """Which parameters, by `id`, a loss is made of."""
    trained = [each for each in parameters if each.requires_grad]
    if not trained or not loss.requires_grad:
        return set()
    found = torch.autograd.grad(loss, trained, allow_unused=True)
    return {id(each) for each, slope in zip(trained, found, strict=True) if slope is not None}
