"""All bytes of float32: nothing is dropped."""

from __future__ import annotations

import torch
from torch import Tensor


class Identity:
    """Values as they are."""

    linear = True
    segmentable = True
    unbiased = True
    fixed_size = True

    def size(self, count: int) -> int:
        """Four bytes for each value."""
        return 4 * count

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Copy the values; nothing is left."""
        size = self.size(values.numel())
        out[:size].view(torch.float32).copy_(values)
        if left is not None:
            left.zero_()
        return size

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add the values."""
        total.add_(payload[: self.size(total.numel())].view(torch.float32), alpha=weight)
