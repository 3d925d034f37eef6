"""Which sample is at fault, and which line of the user's code.

Words for errors only: nothing here reads data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from instep.errors import one_line, own_line


def told(error: BaseException) -> str:
    """`ValueError: bad pixel (digits.py:31)`: type, text on one line, and the user's own line.

    The line is the innermost one outside instep, the standard library and
    installed packages; where there is none, it is left out.
    """
    text = one_line(error) or "no text"
    place, _ = own_line(error)
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


def odd_one_out(indices: Sequence[int], samples: Sequence[Any]) -> str | None:
    """The first sample of another shape than the first: a sentence, or None if all agree."""
    first = shape_of(samples[0])
    for index, sample in zip(indices, samples, strict=True):
        if (shape := shape_of(sample)) != first:
            return (
                f"sample {index} cannot be stacked with sample {indices[0]}: "
                f"it is {shape}, that one is {first}."
            )
    return None


def shape_of(sample: Any) -> str:
    """`(float32 [3, 4], int64 [])`: what a sample is made of, without its values."""
    if isinstance(sample, torch.Tensor):
        return f"{str(sample.dtype).removeprefix('torch.')} {list(sample.shape)}"
    if isinstance(sample, np.ndarray):
        return f"{sample.dtype} {list(sample.shape)}"
    if isinstance(sample, tuple | list):
        return f"({', '.join(shape_of(part) for part in sample)})"
    if isinstance(sample, Mapping):
        return "{" + ", ".join(f"{name}: {shape_of(part)}" for name, part in sample.items()) + "}"
    return type(sample).__name__
