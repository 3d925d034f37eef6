"""Parquet and Arrow: rows are those that pyarrow reads whole, at any cut."""

import functools

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet
import pytest

from instep.data.raw import FORMATS, format_of
from instep.errors import DataError

ROWS = 5000


@functools.cache
def whole():
    """Made where it is needed: pyarrow imports pandas to look at what a list has."""
    return pa.table(
        {
            "number": pa.array([None if i % 7 == 0 else i for i in range(ROWS)]),
            "text": [f"text {i}" * (i % 5) for i in range(ROWS)],
            "kind": pa.array([f"kind {i % 3}" for i in range(ROWS)]).dictionary_encode(),
            "nested": [[{"a": i, "b": ["x"] * (i % 3)}] * (i % 4) for i in range(ROWS)],
        }
    )


def write(path, kind):
    """The table, in 10 groups of rows; as an unmarked stream without a column of dictionaries."""
    table = whole().drop_columns("kind") if kind == "stream" else whole()
    if kind == "parquet":
        pa.parquet.write_table(table, path, row_group_size=ROWS // 10)
    elif kind == "feather":
        pa.feather.write_feather(table, str(path), chunksize=ROWS // 10)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table, ROWS // 10)
    return table


KINDS = {"parquet": ".parquet", "file": ".arrow", "feather": ".feather"}
KINDS |= {"stream": ".arrow", "stream with dictionaries": ".arrows"}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_whole_file_at_any_cut(tmp_path, kind):
    path = tmp_path / f"a{KINDS[kind]}"
    table, form = write(path, kind), FORMATS[format_of(path)]()
    for target, count in ((1 << 40, 1), (path.stat().st_size // 4, None), (1, 10)):
        pieces = form.cut(path, target)
        wanted = 1 if kind.endswith("dictionaries") else count or len(pieces)
        assert len(pieces) == wanted
        chunks = [chunk for piece in pieces for chunk in form.read(piece)]
        assert pa.Table.from_batches([chunk.rows for chunk in chunks]).equals(table)
        places = [place for chunk in chunks for place in chunk.places]
        assert len(places) == ROWS
        assert (np.diff(places) > 0).all()
    words = "row 4321" if kind == "parquet" else "batch 8, row 321"
    assert form.where(path, places[4321]) == words


def test_a_large_batch_and_a_large_row_group_come_in_parts(tmp_path):
    table = pa.table({"x": np.arange(2_000_000)})
    pa.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2_000_000)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    for name in ("a.parquet", "a.arrow"):
        form = FORMATS[format_of(name)]()
        (piece,) = form.cut(tmp_path / name, 1 << 20)
        chunks = list(form.read(piece))
        assert max(chunk.rows.nbytes for chunk in chunks) <= 4 << 20
        assert pa.Table.from_batches([chunk.rows for chunk in chunks]).equals(table)


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_a_data_error_that_names_it(tmp_path, kind):
    path = tmp_path / f"a{KINDS[kind]}"
    write(path, kind)
    whole, form = path.read_bytes(), FORMATS[format_of(path)]()
    pieces = form.cut(path, 1)
    for damaged in (whole[: len(whole) // 2], b"nothing of it", whole[:8]):
        path.write_bytes(damaged)
        for act in (lambda: form.cut(path, 1), lambda: [list(form.read(p)) for p in pieces]):
            with pytest.raises(DataError, match=f"{path.name} is damaged or cut short"):
                act()


def test_offsets_that_lead_nowhere_are_a_data_error(tmp_path):
    path, form = tmp_path / "a.arrow", FORMATS["arrow"]()
    with pa.ipc.new_file(str(path), pa.schema([("x", pa.string())])) as writer:
        writer.write_table(pa.table({"x": ["a", "bc", "def"]}))
    offsets = np.array([0, 1, 3, 6], np.int32)
    wrong = path.read_bytes().replace(offsets.tobytes(), (offsets * 10**8).tobytes())
    path.write_bytes(wrong)
    with pytest.raises(DataError, match="damaged"):
        list(form.read(form.cut(path, 1)[0]))
