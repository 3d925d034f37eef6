"""Every format of raw files gives the same records at any cut, and refuses what it cannot read."""

import functools
import io
import re
import tarfile

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest

from instep.data.raw import FORMATS, Piece, opened
from instep.errors import DataError


@functools.cache
def table():
    """Made where it is needed: pyarrow imports pandas to look at what a list has."""
    return pa.table({"a": range(60), "b": [f"{i}\n" for i in range(60)]})


def parquet(path):
    pa.parquet.write_table(table(), path, row_group_size=7)


def arrow(path):
    with pa.ipc.new_file(str(path), table().schema) as writer:
        writer.write_table(table(), 7)


def tar(path):
    with tarfile.open(path, "w") as archive:
        for i in range(60):
            archive.addfile(tarfile.TarInfo(f"{i}.x"), io.BytesIO())


def images(path):
    for i in range(60):
        (path / str(i % 3)).mkdir(parents=True, exist_ok=True)
        (path / str(i % 3) / f"{i}.png").write_bytes(b"x")


SAMPLES = {
    "arrow": arrow,
    "csv": lambda path: path.write_text("a,b\n" + "".join(f'{i},"x\n"\n' for i in range(60))),
    "images": images,
    "json_lines": lambda path: path.write_text("".join(f'{{"a": {i}}}\n' for i in range(60))),
    "parquet": parquet,
    "tar": tar,
    "text": lambda path: path.write_text("".join(f"{i}\n" for i in range(60))),
}
"""How a file or folder of 60 records is written."""


def pieces_of(form, path, target):
    """As they travel to the processes that read them."""
    pieces = form.cut(path, target, form.learn([path]))
    if any(piece.scan for piece in pieces):
        pieces = form.settle(pieces, [form.scan(piece) for piece in pieces])
    return msgspec.json.decode(msgspec.json.encode(pieces), type=list[Piece])


@pytest.mark.parametrize("name", FORMATS)
def test_records_their_order_and_their_places_are_the_same_at_any_cut(tmp_path, name):
    path, form = tmp_path / "sample", FORMATS[name]()
    SAMPLES[name](path)
    read = []
    for target in (1 << 40, 200, 1):
        pieces, rows, places = pieces_of(form, path, target), [], []
        assert {piece.format for piece in pieces} == {name}
        assert target > 1 or len(pieces) > 5
        for piece in pieces:
            for chunk in form.read(piece):
                is_batch = isinstance(chunk.rows, pa.RecordBatch)
                rows += chunk.rows.to_pylist() if is_batch else chunk.rows
                places += chunk.places
                assert not chunk.bad
        assert places == sorted(set(places))
        read.append((rows, [form.where(path, place) for place in places]))
    assert len(read[0][0]) == len(set(read[0][1])) == 60
    assert read[0] == read[1] == read[2]


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "images"])
def test_a_file_that_another_machine_has_is_read_the_same(tmp_path, name, monkeypatch):
    path, form = tmp_path / "sample", FORMATS[name]()
    SAMPLES[name](path)
    pieces = pieces_of(form, path, 200)
    here = [list(form.read(piece)) for piece in pieces]
    data = path.read_bytes()
    path.unlink()
    there = opened.Elsewhere(len(data), lambda: io.BytesIO(data))
    monkeypatch.setattr(opened, "_find", lambda _: there)
    assert [list(form.read(piece)) for piece in pieces] == here


@pytest.mark.parametrize("name", FORMATS)
def test_a_path_that_does_not_exist_is_a_data_error_that_names_it(tmp_path, name):
    path, form = tmp_path / "nowhere", FORMATS[name]()
    for act in (
        lambda: form.cut(path, 100, form.learn([path])),
        lambda: list(form.read(Piece(str(path), name, 0, 1, learned='{"names":[],"types":{}}'))),
    ):
        with pytest.raises(DataError, match=re.escape(str(path))):
            act()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_empty_has_no_piece_or_is_a_data_error_that_names_it(tmp_path, name):
    path, form = tmp_path / "empty", FORMATS[name]()
    path.touch()
    try:
        assert form.cut(path, 100) == []
    except DataError as error:
        assert str(path) in str(error)  # noqa: PT017


def test_no_two_formats_have_a_suffix_in_common():
    suffixes = [suffix for name in FORMATS for suffix in FORMATS[name].suffixes]
    assert len(suffixes) == len(set(suffixes))
    assert all(suffix == suffix.lower() for suffix in suffixes)
