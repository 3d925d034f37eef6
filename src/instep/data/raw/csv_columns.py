"""From records of CSV to columns, by pyarrow; and why a record cannot be converted."""

from __future__ import annotations

import csv
import io
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np

from instep.data.raw.base import Chunk
from instep.data.raw.blocks import pyarrow
from instep.errors import one_line
from instep.words import plural

if TYPE_CHECKING:
    import pyarrow as pa

BOM = b"\xef\xbb\xbf"

NULLS = ("", "NA", "N/A", "#N/A", "NULL", "null")
"""No number, in columns that are not text."""


class Columns(msgspec.Struct, frozen=True):
    """The columns of a CSV file."""

    names: list[str]
    """In the order of the file."""
    types: dict[str, str]
    """Names of types, of `csv_head.TYPES`, in the order that all files of the source give."""


class Records(NamedTuple):
    """Records that lie behind each other: all their bytes, and places within these."""

    place: int
    """Of the first byte, in the file."""
    data: bytes
    starts: Any
    """[count] int64, as the two that follow."""
    stops: Any
    """Before the line break."""
    fields: Any
    """How many each has."""


def parse(body: bytes, names: list[str], types: dict[str, str], delimiter: int) -> pa.RecordBatch:
    """The columns that `types` has, of records; types that are not given are found out.

    Raises:
        pyarrow.ArrowInvalid: something cannot be converted.
    """
    pa = pyarrow("CSV files")
    from pyarrow import csv as reader

    # at the very start, a BOM would not be text, as it is in a record
    body = b"\n" + body if body.startswith(BOM) else body
    table = reader.read_csv(
        pa.BufferReader(body),
        reader.ReadOptions(use_threads=False, block_size=len(body) + 1, column_names=names),
        reader.ParseOptions(delimiter=chr(delimiter), newlines_in_values=b'"' in body),
        reader.ConvertOptions(
            column_types={name: arrow_type(one) for name, one in types.items()},
            include_columns=list(types) or None,
            null_values=NULLS,
            true_values=("true", "True", "TRUE"),
            false_values=("false", "False", "FALSE"),
            strings_can_be_null=False,
        ),
    )
    return one_batch(table)


def arrow_type(name: str) -> pa.DataType:
    """What pyarrow calls a type of `csv_head.TYPES`."""
    pa = pyarrow("CSV files")
    if name == "timestamp":
        return pa.timestamp("us")
    return pa.timestamp("us", "UTC") if name == "timestamp_utc" else pa.type_for_alias(name)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """All rows of a table."""
    pa = pyarrow("CSV files")
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else pa.RecordBatch.from_pylist([], table.schema)


class Converter:
    """Makes columns of the records of one file.

    Args:
        learned: `Columns` as JSON.
        delimiter: code of the character between fields.
    """

    def __init__(self, learned: str, delimiter: int) -> None:
        self._columns, self._delimiter = msgspec.json.decode(learned, type=Columns), delimiter

    def chunk(self, records: Records) -> Chunk:
        """The columns of records, and those that are bad."""
        width = len(self._columns.names)
        wrong = records.fields != width
        bad = {
            int(row): f"it has {plural(int(records.fields[row]), 'field')}, and the header {width}"
            for row in np.flatnonzero(wrong)
        }
        batches = list[Any]()
        self._convert(records, np.flatnonzero(~wrong), batches, bad)
        places = records.starts + records.place
        good = np.delete(places, list(bad)) if bad else places
        failed = [(int(places[row]), bad[row]) for row in sorted(bad)]
        bounds = zip(records.starts.tolist(), records.stops.tolist(), strict=True)
        texts = [records.data[a:b] for row, (a, b) in enumerate(bounds) if row in bad]
        return Chunk(self._joined(batches), good.tolist(), failed, texts)

    def _convert(
        self, records: Records, rows: Any, batches: list[Any], bad: dict[int, str]
    ) -> None:
        """Convert some rows; where this fails each half of them, down to one record."""
        pa = pyarrow("CSV files")
        if not len(rows):
            return
        data, starts, stops = records.data, records.starts[rows], records.stops[rows]
        if len(rows) == rows[-1] - rows[0] + 1:
            body = data[starts[0] : stops[-1]]
        else:
            body = b"\n".join(data[a:b] for a, b in zip(starts, stops, strict=True))
        try:
            batch = parse(body, self._columns.names, self._columns.types, self._delimiter)
        except pa.ArrowInvalid as error:
            if len(rows) == 1:
                bad[int(rows[0])] = self._reason(body, one_line(error))
                return
        else:
            if batch.num_rows == len(rows):
                batches.append(batch)
                return
            assert len(rows) > 1, f"pyarrow does not find one record in {body[:1000]!r}"
        middle = len(rows) // 2
        self._convert(records, rows[:middle], batches, bad)
        self._convert(records, rows[middle:], batches, bad)

    def _joined(self, batches: list[Any]) -> pa.RecordBatch:
        pa = pyarrow("CSV files")
        if len(batches) == 1:
            return batches[0]
        types = self._columns.types.items()
        schema = pa.schema([(name, arrow_type(one)) for name, one in types])
        return one_batch(pa.Table.from_batches(batches, schema))

    def _reason(self, body: bytes, said: str) -> str:
        """Why one record cannot be converted; pyarrow says which column it is."""
        try:
            text = body.decode()
        except UnicodeDecodeError as error:
            return f"it is no UTF-8: {error.reason}"
        column = re.search(r"column #(\d+)", said)
        if column is None:
            return f"it cannot be read: {said}"
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=chr(self._delimiter))
        name, value = self._columns.names[int(column[1])], next(reader)[int(column[1])]
        return (
            f"column {name!r} has {value[:40]!r}, and is {self._columns.types[name]} by the first "
            "records of the source: give it another type, or change the value"
        )
