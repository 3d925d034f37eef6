"""Half the bytes: 16-bit numbers."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from instep.comm.codecs.kernels import (
    add_bfloat16,
    add_float16,
    encode_bfloat16,
    encode_float16,
)


class Short:
    """Each value rounded to the nearest 16-bit number, deterministically; one that is too large for
    it becomes the largest."""

    linear = False
    segmentable = True
    unbiased = False
    fixed_size = True
    dtype: torch.dtype

    def size(self, count: int) -> int:
        """Two bytes for each value."""
        return 2 * count

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Round; what is left of a value that is not finite is 0."""
        size, largest = self.size(values.numel()), torch.finfo(self.dtype).max
        short = out[:size].view(self.dtype)
        short.copy_(values)
        if short.isinf().any():
            kept = values.clamp(-largest, largest).where(values.isfinite(), values)
            short.copy_(kept)
        if left is not None:
            torch.sub(values, short, out=left).nan_to_num_(0.0)
        return size

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add the values."""
        total.add_(payload[: self.size(total.numel())].view(self.dtype), alpha=weight)


class Compiled(Short):
    """The same, on the CPU by compiled loops."""

    @staticmethod
    @abstractmethod
    def _encode_here(bits: Any, values: Any, out: Any, left: Any) -> None:
        """By a compiled loop; as `kernels.encode_bfloat16`."""

    @staticmethod
    @abstractmethod
    def _add_here(total: Any, given: Any, weight: float) -> None:
        """By a compiled loop; as `kernels.add_bfloat16`."""

    @torch.no_grad()
    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Round; what is left of a value that is not finite is 0."""
        if values.device.type != "cpu":
            return super().encode(values, out, key=key, left=left)
        size, numbers = self.size(values.numel()), values.numpy()
        rest = values.new_empty(0) if left is None else left
        short = out[:size].numpy().view("uint16")
        self._encode_here(numbers.view("uint32"), numbers, short, rest.numpy())
        return size

    @torch.no_grad()
    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add the values."""
        if total.device.type != "cpu":
            super().add_into(total, payload, weight)
        else:
            short = payload[: self.size(total.numel())].numpy().view("uint16")
            self._add_here(total.numpy(), short, weight)


class BFloat16(Compiled):
    """The range of float32, and 8 bits of its precision."""

    dtype = torch.bfloat16
    _encode_here = staticmethod(encode_bfloat16)
    _add_here = staticmethod(add_bfloat16)


class Float16(Compiled):
    """11 bits of precision, up to 65,504. What is below 6e-8 waits until it has added up."""

    dtype = torch.float16
    _encode_here = staticmethod(encode_float16)
    _add_here = staticmethod(add_float16)
