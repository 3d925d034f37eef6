"""Record batches of other programs, to columns: Parquet, CSV and Arrow files without a function.

Dates and times become microseconds since 1970 (int64), dictionaries their values, decimals int64 or
float64. What would be another number then is refused. A missing floating-point number becomes NaN;
a row where something else is missing does not fit. Nothing here knows files. Way in:
`encode_batch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from instep.data.shards.columns import VARIES, Column, Misfit, converted, widened
from instep.data.shards.encode import Encoded
from instep.data.shards.views import View, from_numpy, to_numpy

_MICROSECONDS = pa.timestamp("us")


def encode_batch(batch: pa.RecordBatch, expected: Sequence[Column] | None) -> Encoded:
    """The columns of a record batch; as `encode.encode` of its rows, without making rows.

    Raises:
        Misfit: a column has a type that no sample can have, or another than before.
    """
    names = batch.schema.names
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise Misfit(f"the column {twice!r} is there twice, and columns need names of their own")
    if expected is not None and set(names) != {column.name for column in expected}:
        raise Misfit(
            f"the columns are {', '.join(names)}, and "
            f"{', '.join(column.name for column in expected)} in the samples before"
        )
    wanted = names if expected is None else [column.name for column in expected]
    arrays = [_decoded(name, batch.column(batch.schema.get_field_index(name))) for name in wanted]
    arrays, misfits = _without_nulls(wanted, arrays)
    columns, views = [], []
    for at, (name, array) in enumerate(zip(wanted, arrays, strict=True)):
        column, view = _column(name, array)
        if _is_time(batch.schema.field(name).type):
            column = msgspec.structs.replace(column, is_time=True)
        if expected is not None:
            column = widened(expected[at], column)
        columns.append(column)
        views.append(cast(view, column))
    return Encoded(columns, views, misfits)


def cast(view: View, column: Column) -> View:
    """A view as a wider column has it.

    Raises:
        Misfit: the column cannot hold one of its numbers.
    """
    if column.ragged and view.offsets is None:
        rows, length = view.data.shape[:2]
        data = view.data.reshape(rows * length, *view.data.shape[2:])
        view = View(data, np.arange(rows + 1, dtype=np.int64) * length)
    return View(converted(column.name, view.data, column.element), view.offsets)


def _decoded(name: str, array: pa.Array) -> pa.Array:
    """An array of plain numbers, bytes, text, or lists of numbers."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        array, kind = array.storage, array.storage.type
    if pa.types.is_dictionary(kind):
        return _decoded(name, array.dictionary_decode())
    if pa.types.is_null(kind):
        return array.cast(pa.float64())
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        zoned = pa.timestamp("us", kind.tz) if pa.types.is_timestamp(kind) else _MICROSECONDS
        return _exactly(name, array, zoned).view(pa.int64())
    if pa.types.is_duration(kind):
        return _exactly(name, array, pa.duration("us")).view(pa.int64())
    if pa.types.is_time(kind):
        return _exactly(name, array, pa.time64("us")).view(pa.int64())
    if pa.types.is_decimal(kind):
        if kind.scale <= 0:
            return _exactly(name, array, pa.int64())
        # by their text: pyarrow's own cast divides, and is one unit off for one value of eight
        return array.cast(pa.string()).cast(pa.float64())
    if pa.types.is_boolean(kind):
        return array
    if pa.types.is_integer(kind) or pa.types.is_floating(kind):
        return array
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_fixed_size_binary(kind) or pa.types.is_binary_view(kind):
        return array.cast(pa.large_binary())
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return array.cast(pa.large_binary())
    if _is_list(kind) and _innermost(kind) is not None:
        return array
    raise Misfit(
        f"column {name!r} is {kind}, which no sample can have; wanted: numbers, text, bytes or "
        "lists of numbers. A --map makes them of it."
    )


def _exactly(name: str, array: pa.Array, kind: pa.DataType) -> pa.Array:
    """An array in another type, and no value another one.

    Raises:
        Misfit: a value is too fine or too large for the type.
    """
    try:
        return array.cast(kind)
    except pa.ArrowInvalid:
        raise Misfit(
            f"column {name!r} is {array.type}, and has a value that {kind} cannot hold. "
            "A --map makes other numbers or text of it."
        ) from None


def _is_time(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_time(kind.value_type)
    return bool(pa.types.is_date(kind) or pa.types.is_timestamp(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
    )


def _innermost(kind: pa.DataType) -> pa.DataType | None:
    """The number type of a list of numbers, or of lists of one length of them."""
    inner = kind.value_type
    while pa.types.is_fixed_size_list(inner) and inner.list_size:
        inner = inner.value_type
    number = pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner)
    return inner if number else None


def _without_nulls(
    names: Sequence[str], arrays: list[pa.Array]
) -> tuple[list[pa.Array], list[tuple[int, str]]]:
    """The arrays without the rows in which something is missing, and those rows."""
    missing: dict[int, str] = {}
    for at, array in enumerate(arrays):
        if pa.types.is_floating(array.type):
            if array.null_count:
                arrays[at] = array.fill_null(float("nan"))
            continue
        empty = array.null_count and np.flatnonzero(to_numpy(array.is_null()))
        for row in empty.tolist() if array.null_count else ():
            missing.setdefault(row, f"column {names[at]!r} is empty")
        if _is_list(array.type) and _has_nulls(array):
            for row in range(len(array)):
                if array[row].as_py() is not None and _has_null(array[row].as_py()):
                    missing.setdefault(row, f"column {names[at]!r} has an empty element")
    if missing:
        kept = from_numpy(np.delete(np.arange(len(arrays[0])), list(missing)))
        arrays = [array.take(kept) for array in arrays]
    return arrays, sorted(missing.items())


def _has_null(value: Any) -> bool:
    return any(_has_null(v) if isinstance(v, list) else v is None for v in value)


def _has_nulls(array: pa.Array) -> bool:
    """Tell whether something within lists is missing; what a missing list holds does not count."""
    while _is_list(array.type):
        array = array.flatten()
        if array.null_count:
            return True
    return False


def _column(name: str, array: pa.Array) -> tuple[Column, View]:
    kind = array.type
    if pa.types.is_large_string(kind) or pa.types.is_large_binary(kind):
        _, offsets, data = array.buffers()
        bounds = np.frombuffer(offsets, np.int64, len(array) + 1, 8 * array.offset)
        flat = np.frombuffer(data, np.uint8) if data is not None else np.empty(0, np.uint8)
        view = View(flat[bounds[0] : bounds[-1]], bounds - bounds[0])
        return Column(name, "text" if pa.types.is_large_string(kind) else "bytes"), view
    if not _is_list(kind):
        data = to_numpy(array)
        return Column(name, "number", data.dtype.name), View(data)
    return _list_column(name, array)


def _list_column(name: str, array: pa.Array) -> tuple[Column, View]:
    fixed, shape, inner = array.type, list[int](), array
    if pa.types.is_fixed_size_list(fixed) and fixed.list_size:
        shape.append(fixed.list_size)
        offsets = None
    else:
        offsets = to_numpy(pc.list_value_length(array)).astype(np.int64)
        offsets = np.concatenate([[0], np.cumsum(offsets)])
        shape.append(VARIES)
    inner = array.flatten()
    while pa.types.is_fixed_size_list(inner.type):
        shape.append(inner.type.list_size)
        inner = inner.flatten()
    data = to_numpy(inner)
    column = Column(name, "array", data.dtype.name, tuple(shape))
    if offsets is None:
        return column, View(data.reshape(len(array), *shape))
    lengths = np.diff(offsets)
    if (
        len(lengths) and lengths[0] and (lengths == lengths[0]).all()
    ):  # as lists of Python: one shape until two
        shape[0] = int(lengths[0])
        column = Column(name, "array", data.dtype.name, tuple(shape))
        return column, View(data.reshape(len(array), *shape))
    return column, View(data.reshape(-1, *shape[1:]), offsets)
