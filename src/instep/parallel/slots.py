"""Slots: for each parameter a plain one on the memory of what this rank has of it.

Strategies, norms and checksums know plain tensors, and want a gradient once for each pass of the
replica; the model's own parameters may be DTensors, and get theirs in parts.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from instep.comm.dtensors import local_part


class Slots:
    """The slots of a model that is split.

    Args:
        parameters: of the model, after it was split.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._slots = {
            each: nn.Parameter(local_part(each).detach(), requires_grad=each.requires_grad)
            for each in parameters
        }

    def of(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The slot of each parameter, which may have no elements; the same objects each time."""
        return [self._slots[parameter] for parameter in parameters]

    def tell(self, parameter: nn.Parameter, gradient: Tensor | None) -> None:
        """Give a gradient that is complete to the slot, and run the slot's hooks.

        They are those of `register_post_accumulate_grad_hook`, and may take the gradient away;
        what they leave is added to the next time.

        Args:
            parameter: whose slot.
            gradient: the parameter's, or this rank's part of it; None: there is none.
        """
        if gradient is None:
            return
        slot, gradient = self._slots[parameter], local_part(gradient)
        slot.grad = gradient if slot.grad is None else slot.grad + gradient
        for hook in (getattr(slot, "_post_accumulate_grad_hooks", None) or {}).values():
            hook(slot)
