"""Cuts a batch into parts along its samples."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from instep.errors import RecipeError


def sizes_of(samples: int, parts: int) -> list[int]:
    """Samples of each part: as even as possible, larger ones first; fewer parts if there are fewer
    samples than parts, so none is empty."""
    parts = min(samples, parts)
    return [samples // parts + (part < samples % parts) for part in range(parts)]


def rows_in(batch: Any, samples: int) -> list[bool] | None:
    """Which leaves of a batch have a row for each sample; None if one sample does not show it."""
    found: list[bool] = []
    _rows(batch, samples, 0, samples, found, None)
    return found if samples > 1 else None


def cut(
    batch: Any, samples: int, parts: int, rows: Sequence[bool] | None = None
) -> list[tuple[Any, int]]:
    """The parts of a batch, in order, each with its number of samples.

    Tensors whose first dimension is the samples are cut (views, no copies), and so are lists of
    one text or number for each sample. Everything else goes into each part.

    Args:
        batch, samples: to be cut.
        parts: how many.
        rows: `rows_in` another batch: a leaf that has as many rows as samples by chance, such as
            the weights of classes, then stays whole.

    Raises:
        RecipeError: no tensor of the batch has its samples in the first dimension.
    """
    sizes = sizes_of(samples, parts)
    if len(sizes) == 1:
        return [(batch, samples)]
    cut_leaves: list[bool] = []
    found: list[tuple[Any, int]] = []
    first = 0
    for size in sizes:
        known = None if rows is None else iter(rows)
        found.append((_rows(batch, samples, first, first + size, cut_leaves, known), size))
        first += size
    if sizes and not any(cut_leaves):
        raise RecipeError(
            f"mesh.pipeline_batches = {parts} cuts a batch of {samples} samples along its first "
            "dimension, and no tensor of the batch has so many rows. Collate samples along the "
            "first dimension, or set mesh.pipeline_batches = 1."
        )
    return found


def _rows(
    value: Any,
    samples: int,
    first: int,
    stop: int,
    cut_leaves: list[bool],
    known: Iterator[bool] | None,
) -> Any:
    if isinstance(value, Tensor):
        has_rows = bool(value.dim()) and value.shape[0] == samples
    elif isinstance(value, Mapping):
        rows = {
            key: _rows(each, samples, first, stop, cut_leaves, known) for key, each in value.items()
        }
        return rows if type(value) is dict else type(value)(rows)  # type: ignore[call-arg]
    elif isinstance(value, (tuple, list)):
        plain = all(isinstance(each, (str, int, float)) for each in value)
        if not plain or hasattr(value, "_fields"):
            rest = [_rows(each, samples, first, stop, cut_leaves, known) for each in value]
            return type(value)(*rest) if hasattr(value, "_fields") else type(value)(rest)
        has_rows = len(value) == samples
    else:
        return value
    wanted = has_rows if known is None else next(known, has_rows)
    if wanted and not has_rows:
        raise RecipeError(
            f"mesh.stages: a batch of {samples} samples has a part without a row for each of "
            "them, which had one in the batch with which the model was examined. Collate samples "
            "along the first dimension."
        )
    cut_leaves.append(wanted)
    return value[first:stop] if wanted else value
