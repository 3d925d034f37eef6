"""Pictures among the parts of a sample, made small enough to be drawn in a page.

An array is taken for one if it is [channels, height, width] or [height, width, channels] with 1 or
3 channels, or [height, width] of bytes. Way in: `pixels_in`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.report.figures.sample import fields_of, shape_of

MOST_PIXELS, _LEAST = 32, 8
"""Pixels of an edge that are drawn; of fewer, nobody sees a picture."""

Pixels = NDArray[np.uint8]


def pixels_in(sample: Any) -> dict[str, Pixels]:
    """The pictures of a sample, [height, width, 3], by the name of the part; every n-th pixel."""
    found = {}
    for name, value in fields_of(sample).items():
        with suppress(Exception):  # on a device, sparse, or of the user's own
            if (pixels := _pixels(value)) is not None:
                found[name] = pixels
    return found


def _pixels(value: Any) -> Pixels | None:
    shape = shape_of(value)
    if shape is None and hasattr(value, "__array_interface__"):  # as of Pillow
        value = np.asarray(value)
        shape = value.shape
    first = shape is not None and len(shape) == 3 and shape[0] in (1, 3)
    last = shape is not None and len(shape) == 3 and shape[2] in (1, 3)
    flat = shape is not None and len(shape) == 2 and str(value.dtype).endswith("uint8")
    if shape is None or not (first or last or flat):
        return None
    height, width = shape[1:] if first else shape[:2]
    if min(height, width) < _LEAST:
        return None
    step = -(-max(height, width) // MOST_PIXELS)
    every = slice(None, None, step)
    small = value[:, every, every] if first else value[every, every]
    values = np.array(small.tolist(), np.float64)
    if first:
        values = np.moveaxis(values, 0, 2)
    colours = np.broadcast_to(values.reshape(*values.shape[:2], -1), (*values.shape[:2], 3))
    return _as_bytes(colours, str(value.dtype).endswith("uint8"))


def _as_bytes(values: NDArray[np.float64], are_bytes: bool) -> Pixels:
    """Values as bytes: from the least to the largest, where they are none."""
    if are_bytes:
        return values.astype(np.uint8)
    least, largest = float(np.nanmin(values)), float(np.nanmax(values))
    scaled = (values - least) / ((largest - least) or 1.0)
    return (255 * np.nan_to_num(scaled)).clip(0, 255).round().astype(np.uint8)
