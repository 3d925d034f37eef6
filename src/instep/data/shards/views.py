"""How the values of a column lie in memory: numpy views of the buffers of an Arrow record batch.

A number is one element of a row, an array of one shape a row of elements; where samples differ in
length, `offsets` says where each begins. Arrow's own scalars are never made: each costs a
microsecond. Way in: `views_of`, and `batch_of` for the way back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from instep.data.shards.columns import Column, as_plain

Array = np.ndarray[Any, Any]

_METADATA = b"instep"


class View(NamedTuple):
    """The values of one column of a record batch."""

    data: Array
    """[rows, *shape], or [elements of all rows, *shape] where there are `offsets`."""
    offsets: Array | None = None
    """[rows + 1] int64: where each row begins in `data`."""

    @property
    def rows(self) -> int:
        """How many samples."""
        return len(self.data) if self.offsets is None else len(self.offsets) - 1

    def row(self, number: int) -> Array:
        """One sample's value, a view."""
        if self.offsets is None:
            return self.data[number]  # type: ignore[no-any-return]
        return self.data[self.offsets[number] : self.offsets[number + 1]]

    def between(self, first: int, stop: int) -> View:
        """The rows of a range, as views; offsets still count from the first of all."""
        if self.offsets is None:
            return View(self.data[first:stop])
        return View(self.data, self.offsets[first : stop + 1])

    @property
    def elements(self) -> Array:
        """The elements that the rows have, one after another."""
        if self.offsets is None:
            return self.data
        return self.data[self.offsets[0] : self.offsets[-1]]

    @property
    def lengths(self) -> Array:
        """[rows] int64: elements of each row, where rows differ in it."""
        assert self.offsets is not None, "rows have one length"
        return np.diff(self.offsets)


def schema_of(columns: Sequence[Column]) -> pa.Schema:
    """The Arrow schema of columns; it says what they are, also without a manifest."""
    fields = [pa.field(column.name, _type(column), nullable=False) for column in columns]
    return pa.schema(fields, {_METADATA: json.dumps(as_plain(columns)).encode()})


def columns_of(schema: pa.Schema) -> list[Column] | None:
    """The columns of a schema that `schema_of` made; None for another program's."""
    kept = (schema.metadata or {}).get(_METADATA)
    if kept is None:
        return None
    return [
        Column(name, kind, dtype, tuple(shape), *is_time)
        for name, kind, dtype, shape, *is_time in json.loads(kept)
    ]


def _type(column: Column) -> pa.DataType:
    if column.kind == "text":
        return pa.large_string()
    if column.kind in ("bytes", "image"):
        return pa.large_binary()
    # bits would have to be unpacked for each read
    element = pa.uint8() if column.dtype == "bool" else pa.from_numpy_dtype(column.element)
    if column.kind == "number":
        return element
    field = pa.field("item", element, nullable=False)
    size = prod(column.row_shape)
    if column.ragged:
        inner = pa.list_(field, size) if column.row_shape else element
        return pa.large_list(pa.field("item", inner, nullable=False))
    return pa.list_(field, size)


def batch_of(columns: Sequence[Column], views: Sequence[View]) -> pa.RecordBatch:
    """A record batch over the memory of views."""
    schema = schema_of(columns)
    arrays = [
        _array(column, view, field.type)
        for column, view, field in zip(columns, views, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _array(column: Column, view: View, kind: pa.DataType) -> pa.Array:
    data = pa.py_buffer(np.ascontiguousarray(view.data))
    if column.kind == "number":
        return pa.Array.from_buffers(kind, view.rows, [None, data])
    if view.offsets is None:
        elements = len(view.data) * prod(column.row_shape)
        values = pa.Array.from_buffers(kind.value_type, elements, [None, data])
        return pa.FixedSizeListArray.from_arrays(values, type=kind)
    offsets = pa.py_buffer(np.ascontiguousarray(view.offsets, np.int64))
    if column.kind in ("text", "bytes", "image"):
        return pa.Array.from_buffers(kind, view.rows, [None, offsets, data])
    inner = kind.value_type
    if column.row_shape:
        elements = len(view.data) * prod(column.row_shape)
        flat = pa.Array.from_buffers(inner.value_type, elements, [None, data])
        values = pa.FixedSizeListArray.from_arrays(flat, type=inner)
    else:
        values = pa.Array.from_buffers(inner, len(view.data), [None, data])
    return pa.Array.from_buffers(kind, view.rows, [None, offsets], children=[values])


def views_of(batch: pa.RecordBatch, columns: Sequence[Column]) -> list[View]:
    """The views of a record batch that has these columns; they keep its memory alive."""
    return [_view(column, batch.column(at)) for at, column in enumerate(columns)]


def _view(column: Column, array: pa.Array) -> View:
    rows, first = len(array), array.offset
    if column.kind in ("text", "bytes", "image"):
        _, offsets, data = array.buffers()
        bounds = _numbers(offsets, np.dtype(np.int64), first, rows + 1)
        return View(_numbers(data, np.dtype(np.uint8), 0, int(bounds[-1])), bounds)
    if column.kind == "number":
        return View(_numbers(array.buffers()[1], column.element, first, rows))
    size = prod(column.row_shape)
    if not column.ragged:
        return View(_elements(array.values, column, first * size, rows * size))
    bounds = _numbers(array.buffers()[1], np.dtype(np.int64), first, rows + 1)
    return View(_elements(array.values, column, 0, int(bounds[-1]) * size), bounds)


def _elements(values: pa.Array, column: Column, first: int, count: int) -> Array:
    while pa.types.is_fixed_size_list(values.type):
        values = values.values
    flat = _numbers(values.buffers()[1], column.element, values.offset + first, count)
    return flat.reshape(-1, *column.row_shape) if column.row_shape else flat


def to_numpy(array: pa.Array) -> Array:
    """[rows]: the numbers of an Arrow array where none is missing, a view but for booleans.

    `pa.Array.to_numpy` imports pandas, where that is installed: half a second in each process.
    """
    if pa.types.is_boolean(array.type):
        return to_numpy(array.cast(pa.uint8())).view(np.bool_)
    dtype = np.dtype(array.type.to_pandas_dtype())
    return _numbers(array.buffers()[1], dtype, array.offset, len(array))


def from_numpy(values: Array) -> pa.Array:
    """An Arrow array over the memory of numbers [rows], without pandas as in `to_numpy`."""
    data = pa.py_buffer(np.ascontiguousarray(values))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, data])


def _numbers(buffer: pa.Buffer | None, dtype: np.dtype, first: int, count: int) -> Array:
    if buffer is None or not count:
        return np.empty(0, dtype)
    return np.frombuffer(buffer, dtype, count, first * dtype.itemsize)


def bytes_of(views: Iterable[View]) -> int:
    """Bytes of the elements of some columns."""
    return sum(view.elements.nbytes for view in views)


def based(view: View) -> View:
    """The view of the same rows, whose offsets begin at 0."""
    if view.offsets is None:
        return view
    return View(view.elements, view.offsets - view.offsets[0])
