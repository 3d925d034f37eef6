"""Where gradients leave the backward pass: each is given on as soon as it is complete."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

from torch import Tensor, nn


class Gradients:
    """Listens to parameters, until `close`.

    Args:
        parameters: each has a slot, its place among them.
        take: called with slot and gradient, while the backward pass continues. The gradient
            is its own to keep, and the parameter has none afterwards.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], take: Callable[[int, Tensor], None]
    ) -> None:
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
