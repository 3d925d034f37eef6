"""Samples as Python has them, to columns: what each value is, and its bytes.

A number may be Python's, numpy's or a tensor; an array a list of numbers, of numpy or a tensor; an
image one of pillow's. Floats of Python are float64, integers int64. Nothing here knows files.
Way in: `encode`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.data.shards.columns import VARIES, Column, Misfit, converted, widened
from instep.data.shards.views import Array, View

_LIMITS = np.iinfo(np.int64)
_EXACT = {"float16": 1 << 11, "float32": 1 << 24, "float64": 1 << 53}
"""Up to here each whole number has a float of its own."""

_SIMPLE: dict[type, tuple[Any, str]] = {
    bool: ("number", "bool"),
    int: ("number", "int64"),
    float: ("number", "float64"),
    str: ("text", ""),
    bytes: ("bytes", ""),
}

_NATIVE = {np.dtype(code) for code in "?bhilqBHILQefd"}


class Encoded(NamedTuple):
    """Samples as columns."""

    columns: list[Column]
    """Those that were expected, widened by what the samples have."""
    views: list[View]
    misfits: list[tuple[int, str]]
    """Samples that are not in it: the number of each, and why."""


def encode(samples: Sequence[Any], expected: Sequence[Column] | None) -> Encoded:
    """Lay samples out in columns.

    Args:
        samples: dicts from names to values.
        expected: columns of the samples before; None or empty if these are the first. Then the
            first sample says which there are.
    """
    expected = expected or None
    misfits: list[tuple[int, str]] = []
    good = list(samples)
    names = [column.name for column in expected] if expected is not None else None
    try:
        return Encoded(*_columns(good, names, expected), misfits)
    except Misfit:
        pass
    good, known = [], list(expected) if expected else None
    for number, sample in enumerate(samples):
        try:
            found, _ = _columns([sample], [c.name for c in known] if known else None, known)
        except Misfit as error:
            misfits.append((number, str(error)))
            continue
        known = found
        good.append(sample)
    if known is None:
        return Encoded([], [], misfits)
    return Encoded(*_columns(good, [column.name for column in known], known), misfits)


def _columns(
    samples: list[Any], names: list[str] | None, expected: Sequence[Column] | None
) -> tuple[list[Column], list[View]]:
    """The same where every sample fits.

    Raises:
        Misfit: one does not.
    """
    if names is None:
        _check(samples[0])
        names = list(samples[0])
    wanted = set(names)
    for sample in samples:
        if type(sample) is not dict:
            _check(sample)
        if sample.keys() != wanted:
            raise Misfit(_other_columns(sample, wanted))
    columns, views = [], []
    for at, name in enumerate(names):
        values = [sample[name] for sample in samples]
        known = expected[at] if expected is not None else None
        column, values = _column(name, values, known)
        columns.append(column)
        views.append(_view(column, values))
    return columns, views


def _check(sample: Any) -> None:
    if not isinstance(sample, Mapping):
        raise Misfit(
            f"the sample is {type(sample).__name__}, but a dict of numbers, arrays or text is "
            "wanted, as {'x': ..., 'y': ...}"
        )
    if not sample:
        raise Misfit("the sample is an empty dict; return None to leave a record out")
    for name in sample:
        if not isinstance(name, str) or not name:
            raise Misfit(f"the column {name!r} has no name: keys of a sample are text")


def _other_columns(sample: Mapping[str, Any], wanted: set[str]) -> str:
    lacks, more = sorted(wanted - sample.keys()), sorted(map(str, sample.keys() - wanted))
    parts = [f"no column {', '.join(map(repr, lacks))}"] if lacks else []
    parts += [f"a column {', '.join(map(repr, more))} that samples before have not"] if more else []
    return f"the sample has {' and '.join(parts)}"


def _column(name: str, values: list[Any], known: Column | None) -> tuple[Column, list[Any]]:
    """The column of some values, and the values as numpy or Python has them."""
    kinds = set(map(type, values))
    if type(None) in kinds and _has_fractions(known, kinds):
        values = [math.nan if value is None else value for value in values]
        kinds = set(map(type, values))
    if (
        kinds == {np.ndarray}
        and {v.dtype for v in values} <= _NATIVE
        and all(v.ndim for v in values)
    ):
        pass
    elif len(kinds) > 1 or (kinds and next(iter(kinds)) not in _SIMPLE):
        values = [_plain(name, value) for value in values]
        kinds = set(map(type, values))
    column, empty = known, False
    kind: Any
    for kind in kinds:
        if kind in _SIMPLE:
            column = _merged(column, Column(name, *_SIMPLE[kind]))
            continue
        for dtype, shape in {(v.dtype, v.shape) for v in values if type(v) is kind}:
            if (dtype, shape) == (np.float64, (0,)):  # an empty list of Python: of any type
                empty = True
            else:
                column = _merged(column, _of_array(name, kind, dtype, shape))
    if empty:
        column = _with_empty(name, column)
    assert column is not None, "no values, and nothing known"
    return column, values


def _has_fractions(known: Column | None, kinds: set[type]) -> bool:
    """Whether a column is of floating-point numbers, in which a missing one is NaN."""
    if known is None:
        return kinds == {float, type(None)}
    return known.kind == "number" and known.element.kind == "f"


def _with_empty(name: str, column: Column | None) -> Column:
    if column is None:
        return Column(name, "array", "float64", (VARIES,))
    if column.kind != "array":
        raise Misfit(f"column {name!r} is an empty list, and {column} in the samples before")
    return Column(name, "array", column.dtype, (VARIES, *column.shape[1:]))


def _merged(known: Column | None, found: Column) -> Column:
    if known is None:
        return found
    if known.kind == "image" and found.kind == "bytes":
        return known
    return widened(known, found)


class ImageFile(bytes):
    """The bytes of an image file, which a dataset decodes: PNG, JPEG and what else pillow reads."""

    dtype, shape = np.dtype(np.uint8), ()


def _of_array(name: str, kind: type, dtype: np.dtype, shape: tuple[int, ...]) -> Column:
    if kind is ImageFile:
        return Column(name, "image")
    if not shape:
        return Column(name, "number", dtype.name)
    if 0 in shape[1:]:
        raise Misfit(f"column {name!r} is an array of shape {list(shape)}, which has no elements")
    # Arrow has no arrays of a fixed length of nothing
    return Column(name, "array", dtype.name, shape if shape[0] else (VARIES, *shape[1:]))


def _plain(name: str, value: Any) -> Any:
    """A value as bool, int, float, str, bytes or an array of numbers."""
    if type(value) in _SIMPLE or isinstance(value, ImageFile):
        return value
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        value = _of_tensor(name, value)
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, (list, tuple)):
        value = _of_list(name, value)
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf" or value.dtype.itemsize > 8:
            raise Misfit(f"column {name!r} is an array of {value.dtype}, which is no number type")
        return value.astype(value.dtype.newbyteorder("="), copy=False)
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value)
    kind: Any
    for kind in (str, bytes, int, float):  # classes of them
        if isinstance(value, kind):
            return kind(value)
    if hasattr(value, "save") and hasattr(value, "mode"):
        return _of_image(value)
    held = "None" if value is None else f"of type {type(value).__name__}"
    raise Misfit(f"column {name!r} is {held}; wanted: a number, an array of numbers, text or bytes")


def _of_tensor(name: str, value: Any) -> Array:
    try:
        found: Array = value.detach().cpu().numpy()
    except (TypeError, RuntimeError) as error:
        raise Misfit(f"column {name!r} is a tensor that numpy has no type for: {error}") from None
    return found


def _of_list(name: str, value: Sequence[Any]) -> Array:
    try:
        found = np.asarray(value)
    except ValueError:
        raise Misfit(f"column {name!r} is a list of lists of different lengths") from None
    if found.dtype.kind not in "biuf":
        raise Misfit(f"column {name!r} is a list of something else than numbers")
    if found.ndim == 1 and found.dtype.kind != "b" and bool in set(map(type, value)):
        raise Misfit(f"column {name!r} is a list of truth values and numbers")
    if found.dtype.kind == "f":
        _check_exact(name, np.array(value, object).ravel().tolist(), found.ravel())
    return found


def _of_image(value: Any) -> ImageFile:
    file = io.BytesIO()
    value.save(file, "PNG")
    return ImageFile(file.getvalue())


def _view(column: Column, values: list[Any]) -> View:
    if column.kind in ("text", "bytes", "image"):
        parts = [v.encode() for v in _valid(column, values)] if column.kind == "text" else values
        offsets = np.zeros(len(parts) + 1, np.int64)
        np.cumsum([len(part) for part in parts], out=offsets[1:])
        return View(np.frombuffer(b"".join(parts), np.uint8), offsets)
    if column.kind == "number":
        return View(_numbers(column, values))
    element = column.element
    if element.kind == "f" and not {value.dtype.kind for value in values} <= {"f"}:
        values = [converted(column.name, value, element) for value in values]
    if not column.ragged:
        rows = np.empty((len(values), *column.shape), element)
        for at, value in enumerate(values):
            rows[at] = value
        return View(rows)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum([len(value) for value in values], out=offsets[1:])
    data = np.empty((int(offsets[-1]), *column.row_shape), element)
    for at, value in enumerate(values):
        if len(value):
            data[offsets[at] : offsets[at + 1]] = value
    return View(data, offsets)


def _numbers(column: Column, values: list[Any]) -> Array:
    try:
        found = np.array(values, column.element)
    except OverflowError:
        large = next(v for v in values if not _LIMITS.min <= v <= _LIMITS.max)
        raise Misfit(f"column {column.name!r} is {large}, and int64 ends at 2^63 - 1") from None
    if column.element.kind == "f":
        _check_exact(column.name, values, found)
    return found


def _check_exact(name: str, values: Sequence[Any], floats: Array) -> None:
    """Refuse a whole number that its float is not.

    Raises:
        Misfit: names it.
    """
    if floats.size and np.nanmax(np.abs(floats), initial=0) >= _EXACT[floats.dtype.name]:
        for value, made in zip(values, floats.tolist(), strict=True):
            whole = isinstance(value, int | np.integer)
            if whole and int(made) != int(value):
                raise Misfit(
                    f"column {name!r} is {value}, which has more digits than {floats.dtype} of the "
                    "samples before; wanted: whole numbers alone, or text"
                )


def _valid(column: Column, values: list[Any]) -> list[Any]:
    try:
        for value in values:
            value.encode()
    except UnicodeEncodeError:
        raise Misfit(f"column {column.name!r} has text that is not valid Unicode") from None
    return values
