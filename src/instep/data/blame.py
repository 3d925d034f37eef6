"""Which sample is at fault, and which line of the user's code.

Words for errors only: nothing here reads data.
"""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

_OURS = str(Path(__file__).resolve().parents[1])
_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), _OURS})
_INSTALLED = ("site-packages", "dist-packages")


def told(error: BaseException) -> str:
    """`ValueError: bad pixel (digits.py:31)`: type, text, and the user's own line.

    The line is the innermost one outside instep, the standard library and
    installed packages; where there is none, it is left out.
    """
    text = str(error).strip() or "no text"
    place = _user_line(error)
    return f"{type(error).__name__}: {text}" + (f" ({place})" if place else "")


def _user_line(error: BaseException) -> str | None:
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        name = frame.f_code.co_filename
        installed = any(part in _INSTALLED for part in Path(name).parts)
        if not installed and not name.startswith((*_LIBRARY, "<frozen")):
            place = f"{name}:{line}"
    return place


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
