"""What the heads of CSV files say: names of columns, and types for all files of a source.

Types are int64, float64, bool, timestamp (also of days), timestamp_utc and string. Numbers that
would not come back as they were written stay text: '007', and whole numbers of more digits than a
float has. So do times with more digits than microseconds.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from instep.data.raw import blocks
from instep.data.raw.blocks import pyarrow
from instep.data.raw.csv_columns import BOM, Columns, parse
from instep.data.raw.quotes.splitter import Splitter
from instep.data.raw.quotes.states import RECORD
from instep.errors import DataError, SpecError, near_miss
from instep.words import listed

HEAD = 1 << 20
"""Bytes of the first file that decide."""

_HEADS, _OTHER_HEAD = 16, 1 << 18
"""Files that decide with it at most, and bytes of each."""

TYPES = ("int64", "float64", "bool", "timestamp", "timestamp_utc", "string")

_NAMES = {"int64": "int64", "double": "float64", "bool": "bool", "null": ""}
_NAMES |= {"date32[day]": "timestamp", "timestamp[s]": "timestamp", "timestamp[ns]": "timestamp"}
_NAMES |= {"timestamp[ns, tz=UTC]": "timestamp_utc", "timestamp[s, tz=UTC]": "timestamp_utc"}
"""Of types that pyarrow finds out."""

_FINER = r"\.[0-9]{7}"
_NOT_KEPT = {
    "int64": r"^\s*([+]|-?0[0-9xX])",
    "float64": r"^\s*([+]|-?0[0-9xX]|-?[0-9]{17,}\s*$)",
}
_NOT_KEPT |= {"timestamp": _FINER, "timestamp_utc": _FINER}
"""Values that are written in another way than they would be again."""

_SHORT = 1 << 16
"""Bytes in which most headers end."""


def delimiter_of(path: str | Path) -> int:
    """The code of what is between fields: a tab in '.tsv' files, else a comma."""
    suffixes = [suffix.lower() for suffix in Path(path).suffixes[-2:]]
    return ord("\t") if ".tsv" in suffixes else ord(",")


def columns_of(path: Path, learned: str) -> str:
    """What a reader of one file has to know; of the source, `learn` says it.

    Raises:
        DataError: the file has other columns than its source.
    """
    source, names = msgspec.json.decode(learned, type=Columns), header_of(path)
    if set(names) != set(source.types):
        missing = sorted(set(source.types) - set(names)) or sorted(set(names) - set(source.types))
        what = "lacks" if set(source.types) - set(names) else "has, and others do not,"
        raise DataError(
            f"{path} {what} the column {listed([repr(name) for name in missing], 3)}: "
            "all CSV files of a source need the same. Correct the header, or prepare it alone."
        )
    return msgspec.json.encode(Columns(names, source.types)).decode()


def header_of(path: Path) -> list[str]:
    """The names of the columns, in the first record.

    Raises:
        DataError: there is no header, or one name twice.
    """
    head = _head(path, _SHORT) or _head(path, HEAD)
    if head is None:
        raise DataError(f"{path} has no header: the first line needs the names of the columns.")
    data, starts, stops, _ = head
    try:
        text = data[starts[0] : stops[0]].decode()
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: its header is no UTF-8: {error.reason}.") from None
    names = next(csv.reader(io.StringIO(text, newline=""), delimiter=chr(delimiter_of(path))))
    if len(names) == 1 and (other := next((c for c in ";\t|" if c in names[0]), "")):
        raise DataError(
            f"{path}: its header has one column, {names[0][:40]!r}: fields are divided by commas, "
            f"or by tabs in .tsv files, not by {other!r}. Write it anew with commas."
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise DataError(f"{path}: its header has {twice[0]!r} twice, and columns need names.")
    return names


def _head(path: Path, size: int) -> tuple[bytes, Any, Any, Any] | None:
    """The first bytes, without a BOM, and where the records in them are; None if there is none."""
    data, whole = b"", True
    for block, _ in blocks.bytes_of(blocks.whole(path)):
        data += block
        if len(data) > size:
            data, whole = data[:size], False
            break
    data = data.removeprefix(BOM)
    splitter = Splitter(delimiter_of(path), RECORD)
    starts, stops, fields = splitter.split(data + b"\n" if whole else data)
    return (data, starts, stops, fields) if len(starts) else None


def _types_in(path: Path, size: int) -> dict[str, str]:
    """Types of the columns by the first records; '' where there is no value."""
    pyarrow("CSV files")
    from pyarrow import compute

    head, names = _head(path, size), header_of(path)
    assert head is not None, "there is a header"
    data, starts, stops, fields = head
    rows = np.flatnonzero(fields[1:] == len(names)) + 1
    body = b"\n".join(data[starts[row] : stops[row]] for row in rows)
    if not body:
        return dict.fromkeys(names, "")
    batch = parse(body, names, {}, delimiter_of(path))
    types = {name: _NAMES.get(str(batch.schema.field(name).type), "string") for name in names}
    numbers = {name: "string" for name, one in types.items() if one in _NOT_KEPT}
    texts = parse(body, names, numbers, delimiter_of(path)) if numbers else batch
    for name in numbers:
        found = compute.match_substring_regex(texts.column(name), _NOT_KEPT[types[name]])
        if compute.any(found).as_py():
            types[name] = "string"
    return types


def _both(one: str, other: str) -> str:
    """The type that holds the values of two."""
    if not one or not other or one == other:
        return one or other
    return "float64" if {one, other} == {"int64", "float64"} else "string"


def learn(paths: Sequence[Path], types: Mapping[str, str]) -> str:
    """Decide what the columns of all files of a source are.

    Args:
        types: of columns that the user decides.

    Raises:
        DataError: a file has no header.
        SpecError: `types` names no column, or no type.
    """
    step = max(1, -(-len(paths) // _HEADS))
    names, found = header_of(paths[0]), dict[str, str]()
    for number, path in enumerate(paths[::step]):
        for name, one in _types_in(path, _OTHER_HEAD if number else HEAD).items():
            found[name] = _both(found.get(name, ""), one)
    for name, one in types.items():
        if name not in names:
            raise SpecError(f"no column is called {name!r}. {near_miss(name, names)}")
        if one not in TYPES:
            raise SpecError(f"column {name!r}: there is no type {one!r}. {near_miss(one, TYPES)}")
    decided = {name: types.get(name) or found.get(name) or "string" for name in names}
    return msgspec.json.encode(Columns(names, decided)).decode()
