"""Arrow files as the package `datasets` of Hugging Face writes them, without that package.

The files are streams of record batches, mapped into memory; what `datasets` knows beyond Arrow
(images, arrays of a fixed shape) lies in the schema's metadata. A batch becomes views when a sample
of it is first read. Way in: `HuggingFace`.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from instep.data.order import Indices
from instep.data.shard_sizes import sizes_within
from instep.data.shards.arrow_in import encode_batch
from instep.data.shards.columns import Column, Misfit
from instep.data.shards.rows import Rows
from instep.data.shards.views import Array, View, from_numpy, to_numpy
from instep.errors import DataError
from instep.plain_file import check_plain

MOST_BATCHES = 1024
"""Batches of a file whose views are kept."""

Batches = Callable[[], list[pa.RecordBatch]]
"""Opens one file, in whatever process; may be sent to another."""


class HuggingFace(Rows):
    """The samples of a Hugging Face dataset.

    Args:
        name: for messages.
        files: of the dataset, in their order, and the name of each.
        columns: names of those that samples are to have; None for all.
        transform: called with each sample, a dict; gives what the dataset returns.
        order: gives the row of each sample, [samples]; None if they are the rows.

    Raises:
        DataError: a file cannot be read or is damaged; or a column has values that no sample can.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[tuple[str, Batches]],
        columns: Sequence[str] | None,
        transform: Callable[[dict[str, Any]], Any] | None,
        order: Callable[[], Indices] | None = None,
    ) -> None:
        self._files, self._order = list(files), order
        self._open: dict[int, _File] = {}
        self._order_known: Indices | None = None
        opened = [batches() for _, batches in self._files]
        self._features = _features(opened)
        self._stored = _columns(name, opened, columns, self._features)
        sizes = [sum(batch.num_rows for batch in batches) for batches in opened]
        super().__init__(name, _as_read(self._stored, self._features), sizes, columns, transform)
        self._sizes = sizes

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": {}, "_order_known": None}  # each process maps them itself

    def __len__(self) -> int:
        return super().__len__() if self._order is None else len(self._rows_of_samples())

    @property
    def shard_sizes(self) -> list[int] | None:
        """Samples of each file, in their order; None where they are in another."""
        if self._order is None:
            return self._sizes
        rows = self._rows_of_samples()
        if (np.diff(rows) <= 0).any():
            return None
        return list(sizes_within(np.asarray(self._sizes, np.int64), rows).tolist())

    def file(self, number: int) -> _File:
        """Open one of the files."""
        if number not in self._open:
            name, batches = self._files[number]
            self._open[number] = _File(name, batches(), self._stored, self._features)
        return self._open[number]

    def column(self, name: str) -> Array | list[str]:
        """Read one column of all samples."""
        found = super().column(name)
        if self._order is None:
            return found
        rows = self._rows_of_samples()
        return [found[row] for row in rows.tolist()] if isinstance(found, list) else found[rows]

    def _rows(self, wanted: Array) -> Array:
        return wanted if self._order is None else self._rows_of_samples()[wanted]

    def _rows_of_samples(self) -> Indices:
        if self._order_known is None:
            assert self._order is not None, "samples are rows"
            self._order_known = self._order()
        return self._order_known


class _File:
    """Record batches of one file, as views."""

    def __init__(
        self,
        name: str,
        batches: list[pa.RecordBatch],
        columns: list[Column],
        features: Mapping[str, Any],
    ) -> None:
        self._name, self._batches = name, batches
        self._columns, self._features = columns, features
        rows = [batch.num_rows for batch in batches]
        self.starts: Array = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        self._views: OrderedDict[int, list[View]] = OrderedDict()

    def views(self, number: int) -> list[View]:
        """Look at the columns of one record batch.

        Raises:
            DataError: something is missing in it.
        """
        if number in self._views:
            self._views.move_to_end(number)
            return self._views[number]
        names = [column.name for column in self._columns]
        try:
            batch = _chosen(self._batches[number], names, self._features)
            found = encode_batch(batch, self._columns)
        except (Misfit, pa.ArrowException, KeyError) as error:
            raise DataError(
                f"{self._name} does not have the columns of the first: {error}."
            ) from None
        for row, why in found.misfits[:1]:
            place = int(self.starts[number]) + row
            raise DataError(
                f"{self._name}, row {place}: {why}. Leave the column out with columns=[...], or "
                "such rows with the dataset's filter."
            )
        self._views[number] = found.views
        if len(self._views) > MOST_BATCHES:
            self._views.popitem(last=False)
        return found.views


def read_stream(path: Path) -> list[pa.RecordBatch]:
    """Open the record batches of a file, mapped into memory.

    Raises:
        DataError: it cannot be read, or is damaged.
    """
    try:
        check_plain(path)
        with pa.memory_map(str(path)) as file:
            table = pa.ipc.open_stream(file).read_all()
    except (pa.ArrowException, OSError) as error:
        said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        raise DataError(f"{path} cannot be read: {said}. It is missing, or damaged.") from None
    return list(table.to_batches())


def _features(opened: Sequence[list[pa.RecordBatch]]) -> dict[str, Any]:
    """Read what `datasets` says of each column."""
    for batches in opened:
        for batch in batches:
            kept = (batch.schema.metadata or {}).get(b"huggingface", b"{}")
            with suppress(ValueError, KeyError, TypeError):  # else it is another program's
                return dict(json.loads(kept)["info"]["features"])
            return {}
    return {}


def _columns(
    name: str,
    opened: Sequence[list[pa.RecordBatch]],
    chosen: Sequence[str] | None,
    features: Mapping[str, Any],
) -> list[Column]:
    first = next((batch for batches in opened for batch in batches), None)
    if first is None:
        raise DataError(f"{name} has no samples.")
    empty = first.slice(0, 0)
    known: dict[str, Column] = {}
    unfit: dict[str, str] = {}
    for each in first.schema.names:
        try:
            (known[each],) = encode_batch(_chosen(empty, [each], features), None).columns
        except Misfit:
            unfit[each] = str(first.schema.field(each).type)
    bad = [each for each in (unfit if chosen is None else chosen) if each in unfit]
    if bad:
        raise DataError(
            f"column {bad[0]!r} of {name} is {unfit[bad[0]]}, which no sample can have. Choose "
            f"others: columns={list(known)}."
        )
    return list(known.values())


def _as_read(columns: Sequence[Column], features: Mapping[str, Any]) -> list[Column]:
    """Name the columns, with images as such."""
    return [
        Column(column.name, "image") if _type(features, column.name) == "Image" else column
        for column in columns
    ]


def _type(features: Mapping[str, Any], name: str) -> str:
    feature = features.get(name)
    return str(feature.get("_type", "")) if isinstance(feature, dict) else ""


def _chosen(
    batch: pa.RecordBatch, names: Sequence[str], features: Mapping[str, Any]
) -> pa.RecordBatch:
    """Take some columns of a batch, as plain Arrow has them."""
    arrays = []
    for name in names:
        array, kind = batch.column(batch.schema.get_field_index(name)), _type(features, name)
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if kind == "Image" and pa.types.is_struct(array.type):
            array = array.flatten()[array.type.get_field_index("bytes")]
        elif kind in ("Array2D", "Array3D", "Array4D", "Array5D"):
            array = _shaped(array, features[name]["shape"])
        arrays.append(array)
    return pa.RecordBatch.from_arrays(arrays, names=list(names))


def _shaped(array: pa.Array, shape: Sequence[int | None]) -> pa.Array:
    """Lists of lists as lists of one length, but for the first dim if that is None."""
    if array.null_count or not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        return array
    flat = array
    for _ in shape:
        flat = flat.flatten()
    for size in reversed(shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    if shape[0] is not None:
        return pa.FixedSizeListArray.from_arrays(flat, shape[0])
    lengths = to_numpy(pc.list_value_length(array)).astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return pa.LargeListArray.from_arrays(from_numpy(offsets), flat)
