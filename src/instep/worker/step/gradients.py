"""Where gradients leave the backward pass: each is given on as soon as it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor, nn

Take = Callable[[int, Tensor], None]
"""Called with slot and gradient."""


class Listener(Protocol):
    """Listens to the gradients of parameters, until `close`."""

    count: int
    """Taken so far: a sign of life."""

    def close(self) -> None:
        """Stop listening; a second call does nothing."""


class Split(Protocol):
    """How parameters lie on several ranks of a replica."""

    def slots(self, parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
        """For each parameter one that is this rank's part of it, on the same memory."""

    def listen(self, slots: Sequence[nn.Parameter], take: Take) -> Listener:
        """Have `take` called with each gradient of these slots, once it is summed over the
        replica; the gradient is its own to keep."""

    def counts(self, parameter: nn.Parameter) -> bool:
        """Whether this rank adds its part to a sum over the replica; one rank does, of those that
        have the same."""


class Gradients:
    """Listens to parameters, until `close`.

    Args:
        parameters: each has a slot, its place among them.
        take: called with slot and gradient, while the backward pass goes on. The gradient is
            its own to keep, and the parameter has none afterwards.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], take: Take) -> None:
        self.count = 0
        """Taken so far: a sign of life."""
        self._take = take
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._of(slot))
            for slot, parameter in enumerate(parameters)
        ]

    def _of(self, slot: int) -> Callable[[Tensor], None]:
        listener = weakref.ref(self)  # hooks are out of the garbage collector's sight

        def give(parameter: Tensor) -> None:
            here = listener()
            if here is None:
                return
            gradient, parameter.grad = parameter.grad, None
            if gradient is None:  # the parameter was frozen since the forward pass
                return
            here.count += 1
            here._take(slot, gradient)

        return give

    def close(self) -> None:
        """Stop listening; a second call does nothing."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
