"""A sample in a few words, however large it is: shapes, types and first values of what it holds.

The summary is plain JSON, for `--json`, a terminal and a page. It reads no more of an array than
it shows. Ways in: `sample_table`, `in_words`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import islice
from math import prod
from reprlib import Repr
from typing import Any

MOST_VALUES, MOST_LETTERS, MOST_FIELDS, _DEEPEST = 8, 200, 50, 4
"""Values of an array or a list, characters of a text, names of a mapping that are shown."""

_REPR = Repr()
_REPR.maxother = MOST_LETTERS


def fields_of(sample: Any) -> dict[str, Any]:
    """The parts of a sample by name, or by number where it is a list or a tuple."""
    if isinstance(sample, Mapping):
        return {str(name): value for name, value in sample.items()}
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    return {str(number): value for number, value in enumerate(parts)}


def sample_table(number: int, sample: Any) -> dict[str, Any]:
    """One sample for `--json`: its number, and the summary of each of its parts."""
    parts = {name: summary_of(value) for name, value in fields_of(sample).items()}
    return {"number": number, "values": parts}


def shape_of(value: Any) -> tuple[int, ...] | None:
    """The shape of an array of one or more dims; None of anything else."""
    shape = getattr(value, "shape", None)
    if not isinstance(shape, tuple) or not shape or not hasattr(value, "dtype"):
        return None
    return tuple(map(int, shape))


def summary_of(value: Any, depth: int = 0) -> Any:
    """A value as plain JSON of bounded size.

    Returns:
        A number, bool, None or short text as it is (NaN and infinities as text). Of an array
        `shape`, `dtype` and the `first` values in its order; of a long text `text` and `length`; of
        bytes `bytes`, how many, and the `first` in hexadecimal digits; of a list `length` and the
        `first`, if they are not all of it; of a mapping its `fields`, whose names may be any, and
        `length`, if they are not all; else `type` and `text`.
    """
    if isinstance(value, str):
        cut = value[:MOST_LETTERS]
        return value if len(cut) == len(value) else {"text": cut, "length": len(value)}
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": len(value), "first": bytes(value[:MOST_VALUES]).hex()}
    if depth >= _DEEPEST:
        return _other(value)
    if (shape := shape_of(value)) is not None:
        return _of_array(value, shape)
    if isinstance(value, Mapping):
        some = islice(value.items(), MOST_FIELDS)
        fields = {str(name): summary_of(each, depth + 1) for name, each in some}
        more = {"length": len(value)} if len(value) > MOST_FIELDS else {}
        return {"fields": fields, **more}
    if isinstance(value, list | tuple):
        first = [summary_of(each, depth + 1) for each in value[:MOST_VALUES]]
        return first if len(value) <= MOST_VALUES else {"length": len(value), "first": first}
    try:
        return summary_of(value.item(), _DEEPEST)  # a number of numpy, a tensor without dims
    except Exception:
        return _other(value)


def _other(value: Any) -> dict[str, str]:
    return {"type": type(value).__name__, "text": _REPR.repr(value)[:MOST_LETTERS]}


def _of_array(value: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    told = {"shape": list(shape), "dtype": str(value.dtype).removeprefix("torch.")}
    try:
        return {**told, "first": [summary_of(each, _DEEPEST) for each in _first(value, shape)]}
    except Exception:  # sparse, quantised, or of the user's own
        return told


def _first(value: Any, shape: tuple[int, ...]) -> list[Any]:
    """The first values in the order of an array, without a copy of it."""
    if 0 in shape:
        return []
    while len(shape) > 1 and prod(shape[1:]) >= MOST_VALUES:
        value, shape = value[0], shape[1:]
    found: list[Any] = value[:MOST_VALUES].reshape(-1)[:MOST_VALUES].tolist()
    return found


def in_words(summary: Any) -> str:
    """`float32 [3, 224, 224]: 0.1, 0.2, ...`, of what `summary_of` gives."""
    if not isinstance(summary, dict):
        return summary if isinstance(summary, str) else json.dumps(summary)
    first = summary.get("first", [])
    if "fields" in summary:
        named = ", ".join(f"{name}: {in_words(each)}" for name, each in summary["fields"].items())
        return f"{{{named}}}"[:MOST_LETTERS]
    if "shape" in summary:
        cut = [] if prod(summary["shape"]) == len(first) else ["..."]
        values = ", ".join([*map(_short, first), *cut])
        return f"{summary['dtype']} {summary['shape']}: {values}"
    if "bytes" in summary:
        more = " ..." if len(first) < 2 * summary["bytes"] else ""
        return f"{summary['bytes']:,} bytes: {first}{more}"
    if "text" in summary and "length" in summary:
        return f"{summary['text']} ... ({summary['length']:,} characters)"
    if "text" in summary and "type" in summary:
        return str(summary["text"])
    return json.dumps(summary)[:MOST_LETTERS]


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
