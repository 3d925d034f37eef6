"""How an agreed gradient moves the parameters: clipping, optimizer, scheduler.

The same for the training loop of a recipe and for a loop that the user writes.
Every worker does it alone, on the same numbers, with generators set from the
step's key, and so comes to the same parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from instep.data.order import key
from instep.run.recipe import set_generators

OF_UPDATE = 2
"""What a key is drawn for, beside those of `passes.py`: the update of one step."""


class Update:
    """What moves the parameters of one worker.

    Args:
        optimizer: holds them.
        scheduler: of the learning rate, or None.
        parameters: those that a limit on the norm looks at.
        seed: of the job.
        clip_norm: largest global norm of the gradient, or None.
        scaler: of the loss, for float16.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Any,
        parameters: Sequence[nn.Parameter],
        *,
        seed: int,
        clip_norm: float | None,
        scaler: torch.amp.GradScaler,
    ) -> None:
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self._parameters, self._seed, self._clip_norm = list(parameters), seed, clip_norm

    def apply(self, step: int) -> None:
        """Move the parameters by their `.grad`; `step` is the one that this ends."""
        set_generators(key(self._seed, OF_UPDATE, step))  # some optimizers draw
        if self._clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()
