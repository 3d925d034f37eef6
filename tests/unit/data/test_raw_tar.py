"""Tar files: records are the members of each key, at any cut."""

import io
import tarfile

import pytest
from raw_files import read

from instep.data.raw import FORMATS
from instep.data.raw import tar as raw_tar
from instep.errors import DataError


def write(path, members, form=tarfile.PAX_FORMAT):
    with tarfile.open(path, "w", format=form) as archive:
        for name, data in members:
            about = tarfile.TarInfo(name)
            about.size = len(data)
            archive.addfile(about, io.BytesIO(data))


MEMBERS = [("README", b"no record"), ("__meta.x__", b"neither")]
MEMBERS += [
    (f"{'folder/' * (i % 40)}é{i}.{field}", f"{i} {field}".encode() * i)
    for i in range(50)
    for field in ("jpg", "CLS", "seg.png")
]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT], ids=["pax", "gnu"])
def test_records_are_the_members_of_each_key_at_any_cut(tmp_path, form):
    path, reader = tmp_path / "a.tar", FORMATS["tar"]()
    write(path, MEMBERS, form)
    expected = {}
    for name, data in MEMBERS[2:]:
        key, _, field = name.partition(".")
        expected.setdefault(key, {"__key__": key})[field.lower()] = data
    for target, count in ((1 << 30, 1), (10_000, None), (1, 50)):
        pieces = reader.cut(path, target)
        assert len(pieces) == (count or len(pieces))
        rows, bad = read(reader, pieces)
        assert [row for row, _ in rows] == list(expected.values())
        assert not bad
        for row, place in rows[::7]:
            assert reader.where(path, place) == f"member {row['__key__'] + '.jpg'!r}"


def test_a_member_beyond_8_gb_is_a_bad_record_and_those_behind_it_are_read(tmp_path):
    path, reader = tmp_path / "a.tar", FORMATS["tar"]()
    size = 9 << 30
    with open(path, "wb") as file:  # a hole
        for name, length in (("a.bin", 3), ("b.bin", size), ("c.bin", 4)):
            about = tarfile.TarInfo(name)
            about.size = length
            file.write(about.tobuf(tarfile.PAX_FORMAT if length == size else tarfile.GNU_FORMAT))
            file.write(b"xyz\0"[:length])
            file.seek(-(-(file.tell() + (length - 4 if length == size else 0)) // 512) * 512)
        file.truncate(file.tell() + 1024)
    for target in (1 << 40, 1):
        rows, bad = read(reader, reader.cut(path, target))
        assert [row for row, _ in rows] == [
            {"__key__": "a", "bin": b"xyz"},
            {"__key__": "c", "bin": b"xyz\0"},
        ]
        ((place, text),) = bad
        assert "larger than 256 MB" in text
        assert reader.where(path, place) == "member 'b.bin'"


def test_what_is_no_record_is_said_with_its_name(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_tar, "LARGEST", 100)
    path, reader = tmp_path / "a.tar", FORMATS["tar"]()
    write(path, [("a.x", b"1"), ("a.y", b"2"), ("a.X", b"3"), ("b.x", b"4" * 101), ("c.x", b"5")])
    with tarfile.open(path, "a") as archive:
        about = tarfile.TarInfo("d.x")
        about.type, about.linkname = tarfile.SYMTYPE, "c.x"
        archive.addfile(about)
    rows, bad = read(reader, reader.cut(path, 1))
    assert [row["__key__"] for row, _ in rows] == ["c"]
    said = ["'a.x' is there twice", "larger than", "'d.x' is no file, but a link"]
    for (_, text), wanted in zip(bad, said, strict=True):
        assert wanted in text
    write(path, [("a.__key__", b"b"), ("a.x", b"1"), ("b\udcff.x", b"2"), ("c.x", b"3")])
    rows, bad = read(reader, reader.cut(path, 1))
    assert [row for row, _ in rows] == [{"__key__": "c", "x": b"3"}]
    said = ["'a.__key__' has the name of the key's field", r"'b\udcff.x' is no UTF-8"]
    for (_, text), wanted in zip(bad, said, strict=True):
        assert wanted in text
    write(path, [("a.x", b"1"), ("b.x", b"2"), ("a.y", b"3")])
    with pytest.raises(DataError, match=r"a.tar has members of the key 'a' in two places"):
        reader.cut(path, 1)


def test_a_file_behind_the_end_of_another_is_refused_with_its_place(tmp_path):
    path, reader = tmp_path / "a.tar", FORMATS["tar"]()
    write(path, [("a.x", b"1"), ("b.x", b"2")])
    whole = path.read_bytes()
    for behind in (b"", bytes(3_000_000)):
        path.write_bytes(whole + behind)
        rows, _ = read(reader, reader.cut(path, 1))
        assert [row["__key__"] for row, _ in rows] == ["a", "b"]
    for zeros in (0, 3_000_000):
        path.write_bytes(whole + bytes(zeros) + whole)
        place = rf"{len(whole) + zeros:,}: it may be several tar files.* tar --concatenate"
        with pytest.raises(DataError, match=f"more begins at byte {place}"):
            reader.cut(path, 1)


def test_a_damaged_file_says_how_far_it_can_be_read(tmp_path):
    path, reader = tmp_path / "a.tar", FORMATS["tar"]()
    write(path, [(f"{i}.x", bytes(700)) for i in range(20)], tarfile.USTAR_FORMAT)
    whole, pieces = path.read_bytes(), reader.cut(path, 5000)
    flipped = bytearray(whole)
    flipped[1536 * 10 + 5] ^= 1  # in a header, which `tarfile` takes for the end
    for damaged, place in (
        (bytes(flipped), "15,360"),
        (whole[: 1536 * 10 + 100], "15,360"),
        (whole[: 1536 * 10 + 600], "15,360"),
        (b"nothing of it", "0"),
    ):
        path.write_bytes(damaged)
        for act in (lambda: reader.cut(path, 1), lambda: read(reader, pieces)):
            with pytest.raises(DataError, match=rf"a.tar is damaged or cut short: .* byte {place}"):
                act()
