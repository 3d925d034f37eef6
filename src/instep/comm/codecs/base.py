"""What a codec is: a pure function from values to bytes, and back.

It declares what can be done with its payloads, so that a reducer can choose a route without
knowing the codec: a plain sum, two phases, or a gather.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

ALIGNED_BYTES = 16
"""A payload begins at a multiple of this in its memory, so that it can be viewed as wider types."""

CUT = 4096
"""Values of a `segmentable` codec may be cut at multiples of this, and coded in parts."""


def aligned(size: int) -> int:
    """Bytes to where the next payload may begin."""
    return -(-size // ALIGNED_BYTES) * ALIGNED_BYTES


def draw_key(*parts: int) -> int:
    """63 bits that differ wherever one of the parts does: what random rounding is drawn from."""
    mixed = 0
    for part in parts:
        mixed = (mixed ^ (part & 0xFFFFFFFFFFFFFFFF)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        mixed ^= mixed >> 29
    return mixed >> 1


class Codec(Protocol):
    """A pure function on flat segments, on the CPU or on CUDA; equal arguments give equal bytes.

    Values are float32; the caller converts other types. A payload can be decoded by any process
    that knows how many values were encoded.
    """

    @property
    def linear(self) -> bool:
        """Whether the sum of payloads, viewed as float32, is a payload of the sum of values."""

    @property
    def segmentable(self) -> bool:
        """Whether values may be cut at multiples of `CUT`: the parts decode to the same values as
        the whole, or with random rounding to values that are as near."""

    @property
    def unbiased(self) -> bool:
        """Whether the mean of the decoded values, over all keys, is what was encoded. Then what is
        dropped need not be carried over."""

    @property
    def fixed_size(self) -> bool:
        """Whether `encode` always writes `size` bytes."""

    def size(self, count: int) -> int:
        """The most bytes that a payload of `count` values has; 0 for none."""

    def encode(self, values: Tensor, out: Tensor, *, key: int, left: Tensor | None = None) -> int:
        """Write the payload of `values` to the beginning of `out`.

        Args:
            values: [n] float32, only read; with error feedback, the residual is already added.
            out: [size(n) or more] uint8, at a multiple of `ALIGNED_BYTES`.
            key: what random rounding is drawn from; a deterministic codec ignores it.
            left: [n] float32, gets the residual: `values` minus what is decoded from the
                payload, to rounding. Shares no memory with `values`.

        Returns:
            The bytes written.

        A value that is not finite never becomes finite: if `values` has NaN or an infinity, so
        have the decoded values, perhaps in several places. `left` is always finite, so that the
        next step can be right again.
        """

    def add_into(self, total: Tensor, payload: Tensor, weight: float = 1.0) -> None:
        """Add `weight` times the values of a payload.

        Args:
            total: [n] float32, as many as were encoded.
            payload: uint8, what `encode` wrote, at a multiple of `ALIGNED_BYTES`.
        """
