"""How an agreed gradient moves the parameters: clipping, optimizer, scheduler.

The same for the training loop of a recipe and for a loop that the user writes.
Every worker does it alone, on the same numbers, with generators set from the
step's key, and so comes to the same parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from instep.data.order import key
from instep.engine.sections import SchedulerSteps
from instep.engine.skipping import scale_gradients
from instep.recipe.build import set_generators
from instep.sync.norm import factor as clipping
from instep.sync.norm import norm, squares

OF_UPDATE = 2
"""What a key is drawn for, beside those of `passes.py`: the update of one step."""


class Update:
    """What moves the parameters of one worker.

    Args:
        optimizer: holds them.
        scheduler: of the learning rate, or None.
        parameters: those that a limit on the norm looks at.
        seed: of the job.
        max_grad_norm: largest global norm of the gradient, or None.
        scaler: of the loss, for float16.
        measure: whether the norm of the gradient is wanted even where nothing clips it.
        turn: which update of a step it is, where there are several; from 0.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        scheduler: Any,
        parameters: Sequence[nn.Parameter],
        *,
        seed: int,
        max_grad_norm: float | None,
        scaler: torch.amp.GradScaler,
        measure: bool = False,
        turn: int = 0,
    ) -> None:
        self.optimizer, self.scheduler, self.scaler = optimizer, scheduler, scaler
        self.parameters, self._seed = list(parameters), seed
        self._max_grad_norm, self._measure = max_grad_norm, measure
        self._turn = (turn,) if turn else ()
        self.known_norm: float | None = None
        """Of the gradient that `apply` finds, where other ranks have parts of it."""
        self.between = SchedulerSteps()
        self.lost: list[str] = []
        """Attributes of optimizer and scheduler that were others where its state is from."""

    def apply(self, step: int) -> float | None:
        """Move the parameters by their `.grad`; `step` is the one that this ends.

        Returns:
            The global norm of the gradient, unscaled and before clipping; None
            where nobody wants it, and where the scaler leaves the step out.
        """
        set_generators(key(self._seed, OF_UPDATE, step, *self._turn))  # some optimizers draw
        found = self.clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.advance()
        return found

    def advance(self) -> None:
        """The scheduler takes its step."""
        if self.scheduler is not None:
            self.scheduler.step()

    @property
    def clips(self) -> bool:
        """Whether `clip` looks at the gradient."""
        return self._max_grad_norm is not None or self._measure

    def clip(self) -> float | None:
        """Unscale and clip the gradient where the job wants it; its global norm before.

        None where nobody wants it, and where the scaler will leave the step out.
        """
        if not self.clips:
            return None
        self.scaler.unscale_(self.optimizer)
        found = self.known_norm
        if found is None:
            found = global_norm(self.parameters)
        if self.scaler.is_enabled() and not math.isfinite(found):
            return None
        by = self.factor(found)
        if by != 1.0:
            scale_gradients(self.parameters, by)
        return found

    def factor(self, found: float) -> float:
        """What a gradient of this norm is multiplied by."""
        return 1.0 if self._max_grad_norm is None else clipping(found, self._max_grad_norm)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer says beside its parameters, as far as it can be compared."""
    return {
        name: value.tolist() if isinstance(value, Tensor) else value
        for name, value in group.items()
        if isinstance(value, (Tensor, bool, int, float, str)) and name != "params"
    }


def global_norm(parameters: Iterable[nn.Parameter]) -> float:
    """The 2-norm of all gradients together; 0 where there are none."""
    gradients = [_dense(p.grad) for p in parameters if p.grad is not None]
    return norm(squares(gradients).tolist())


def _dense(gradient: Tensor) -> Tensor:
    return gradient.coalesce().values() if gradient.is_sparse else gradient
