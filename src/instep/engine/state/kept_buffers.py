"""What the buffers of a model have, to give it back after a pass that is not to count."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.state.sized import in_own_memory, resized


class KeptBuffers:
    """A copy of all buffers of a model, as they are now.

    Args:
        model: whose.
    """

    def __init__(self, model: nn.Module) -> None:
        self._owners = [
            (f"{prefix}.{name}" if prefix else name, module, name, buffer)
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
        ]
        self.values = {
            name: None if buffer is None else buffer.detach().clone()
            for name, _, _, buffer in self._owners
        }
        """By their names; None for one that is None."""

    @torch.no_grad()
    def put_back(self) -> None:
        """Give every buffer its value, and the shape, that it had."""
        for name, module, own, live in self._owners:
            kept = self.values[name]
            if live is not None and kept is not None:
                in_own_memory(resized(live, kept.shape)).copy_(kept)
            module._buffers[own] = live

    @torch.no_grad()
    def now(self) -> dict[str, Tensor]:
        """Copies of what the buffers are now, by name; those that are None are missing."""
        there = ((name, module._buffers[own]) for name, module, own, _ in self._owners)
        return {name: each.detach().clone() for name, each in there if each is not None}
