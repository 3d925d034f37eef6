"""A model that is cut by a tensor plan: how it is run, and what this rank holds.

All ranks pass the same batch. Each gets the gradients of its own parts from the backward pass, and
those of whole parameters alike on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from instep.parallel.slots import Slots


class CutModel:
    """Tells each gradient of a pass as it is complete.

    Args:
        model: after `apply_plan`.
    """

    def __init__(self, model: nn.Module) -> None:
        self.slots = Slots(model.parameters())
        self._counts = True
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._tell)

    def _tell(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        gradient, parameter.grad = parameter.grad, None
        self.slots.tell(parameter, gradient if self._counts else None)

    def set_counts(self, counts: bool) -> None:
        """Whether the gradients of the next passes count."""
        self._counts = counts

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model; all ranks do so together."""
        return function(*arguments)

    def finish_pass(self) -> None:
        """A backward pass is over: nothing is left to be done."""
