"""What participants predict on samples that stay the same, to see how they differ."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.data.loader import Loader, Slice
from instep.recipe.forward import Forward

_SAMPLES, _MOST = 64, 1 << 14
"""Of the batch; and samples times classes, at most."""


class Probe:
    """The first samples of the validation set, where the loss is the cross-entropy of classes.

    Args:
        forward: of the recipe.
        loader: of the validation set; None where there is none.
        samples: in it.
    """

    def __init__(self, forward: Forward, loader: Loader | None, samples: int) -> None:
        self._forward, self._loader = forward, loader
        self._count = min(samples, _SAMPLES)
        self._applies = loader is not None and isinstance(forward.recipe.loss, nn.CrossEntropyLoss)
        self._inputs: object = None

    @torch.no_grad()
    def predictions(self) -> Tensor | None:
        """Probabilities [samples, classes], by the model as it is; None where it predicts none."""
        if not self._applies or self._loader is None:
            return None
        if self._inputs is None:
            (read,) = self._loader.read([Slice(0, 0, self._count)])
            if not read.size:
                self._applies = False
                return None
            self._inputs = read.batch
        outputs = self._forward.predicted(self._inputs)
        if not isinstance(outputs, Tensor) or outputs.dim() != 2 or outputs.numel() > _MOST:
            self._applies = False
            return None
        return outputs.double().softmax(-1)
