"""Cuts a batch into parts along its samples."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from instep.errors import RecipeError


def sizes_of(samples: int, parts: int) -> list[int]:
    """Samples of each part: as even as possible, larger ones first; fewer parts if there are fewer
    samples than parts, so none is empty."""
    parts = min(samples, parts)
    return [samples // parts + (part < samples % parts) for part in range(parts)]


def cut(batch: Any, samples: int, parts: int) -> list[tuple[Any, int]]:
    """The parts of a batch, in order, each with its number of samples.

    Tensors whose first dimension is the samples are cut (views, no copies), and so are lists of
    one text or number for each sample. Everything else goes into each part.

    Raises:
        RecipeError: no tensor of the batch has its samples in the first dimension.
    """
    sizes = sizes_of(samples, parts)
    if len(sizes) == 1:
        return [(batch, samples)]
    found: list[tuple[Any, int]] = []
    first, any_cut = 0, [False]
    for size in sizes:
        found.append((_rows(batch, samples, first, first + size, any_cut), size))
        first += size
    if sizes and not any_cut[0]:
        raise RecipeError(
            f"mesh.pipeline_batches = {parts} cuts a batch of {samples} samples along its first "
            "dimension, and no tensor of the batch has so many rows. Collate samples along the "
            "first dimension, or set mesh.pipeline_batches = 1."
        )
    return found


def _rows(value: Any, samples: int, first: int, stop: int, any_cut: list[bool]) -> Any:
    if isinstance(value, Tensor):
        if not value.dim() or value.shape[0] != samples:
            return value
        any_cut[0] = True
        return value[first:stop]
    if isinstance(value, Mapping):
        rows = {key: _rows(each, samples, first, stop, any_cut) for key, each in value.items()}
        return rows if type(value) is dict else type(value)(rows)  # type: ignore[call-arg]
    if isinstance(value, (tuple, list)):
        if len(value) == samples and all(isinstance(each, (str, int, float)) for each in value):
            return value[first:stop]
        rest = [_rows(each, samples, first, stop, any_cut) for each in value]
        return type(value)(*rest) if hasattr(value, "_fields") else type(value)(rest)
    return value
