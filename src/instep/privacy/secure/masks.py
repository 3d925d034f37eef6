"""Masks: words that nobody can tell from random ones without the key, added modulo a power of 2.

What two members have in common, one adds and the other subtracts; it cancels exactly. The words
are AES-256 in counter mode, so that each part of a mask can be had by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

Whole = np.ndarray[Any, np.dtype[Any]]

_BLOCK = 1 << 18
"""Bytes at a time: they stay in the cache of a core until all masks are added."""

_ZEROS = bytes(_BLOCK)


class Mask(NamedTuple):
    """A key, and whether its words are added or taken off."""

    key: bytes
    """256 bits."""
    added: bool

    def opposite(self) -> Mask:
        """Mask that takes it off again."""
        return Mask(self.key, not self.added)


def apply_mask(mask: Mask, numbers: Whole, first: int = 0) -> None:
    """Add one mask, as `apply_masks` does."""
    apply_masks([mask], numbers, first)


def apply_masks(masks: Sequence[Mask], numbers: Whole, first: int = 0) -> None:
    """Add masks to numbers, in place.

    Args:
        masks: as above.
        numbers: [count], contiguous, of int32 or int64; they wrap.
        first: where in each mask they begin, in bytes; a multiple of 16.
    """
    assert first % 16 == 0, "whole blocks"
    assert numbers.dtype.kind == "i", "whole numbers"
    total = numbers.view(numbers.dtype.str.replace("i", "u")).reshape(-1)
    counter = modes.CTR((first // 16).to_bytes(16, "big"))
    streams = [
        (Cipher(algorithms.AES256(key), counter).encryptor(), np.add if added else np.subtract)
        for key, added in masks
    ]
    size, step = total.dtype.itemsize, _BLOCK // total.dtype.itemsize
    room = np.empty(_BLOCK + 16, np.uint8)
    words, given = room[:_BLOCK].view(f"<u{size}"), memoryview(_ZEROS)
    for at in range(0, len(total), step):
        part = total[at : at + step]
        some = given[: len(part) * size]
        for stream, put in streams:
            stream.update_into(some, room.data)
            put(part, words[: len(part)], out=part)
