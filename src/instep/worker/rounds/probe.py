"""What participants predict on samples that stay the same, to see how they differ."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor, nn

from instep.data.loader import Loader, Slice
from instep.recipe.forward import Forward

_SAMPLES, _MOST = 64, 1 << 14
"""Of the batch; and samples times classes, at most."""


class Probe:
    """The first samples of the validation set, or of each participant's part of it, where the
    loss is the cross-entropy of classes.

    Args:
        forward: of the recipe.
        loader: of the validation set; None where there is none.
        sizes: of its parts.
    """

    def __init__(self, forward: Forward, loader: Loader | None, sizes: Sequence[int]) -> None:
        self._forward, self._loader = forward, loader
        self._cuts = _first_of_each(sizes)
        self._applies = loader is not None and isinstance(forward.recipe.loss, nn.CrossEntropyLoss)
        self._inputs: list[object] = []

    @torch.no_grad()
    def predictions(self) -> Tensor | None:
        """Probabilities [samples, classes], by the model as it is; None where it predicts none."""
        if not self._applies or self._loader is None:
            return None
        if not self._inputs:
            reads = self._loader.read(self._cuts)
            self._inputs = [read.batch for read in reads if read.size]
        outputs = [self._forward.predicted(inputs) for inputs in self._inputs]
        self._applies = bool(outputs) and _of_classes(outputs)
        return torch.cat(outputs).double().softmax(-1) if self._applies else None


def _of_classes(outputs: Sequence[object]) -> bool:
    """Whether these are values of classes for each sample, and few."""
    tensors = [each for each in outputs if isinstance(each, Tensor) and each.dim() == 2]
    return len(tensors) == len(outputs) and sum(each.numel() for each in tensors) <= _MOST


def _first_of_each(sizes: Sequence[int]) -> list[Slice]:
    """The first samples of parts that stand one after the other; of some, where they are many."""
    ends = list(accumulate(sizes))
    parts = [(end - size, end) for size, end in zip(sizes, ends, strict=True) if size]
    parts = parts[:: -(-len(parts) // _SAMPLES) or 1]
    each = _SAMPLES // max(1, len(parts))
    return [Slice(0, begin, min(begin + each, end)) for begin, end in parts]
