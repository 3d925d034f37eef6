"""Files of lines: the records of the pieces are those of the file, however it is cut."""

import gzip
import io
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from raw_files import cut_at, read, zstd_frames

from instep.data.raw import FORMATS, blocks, format_of, line_numbers, lines, sources
from instep.errors import DataError, SpecError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("raw")


CUTS = st.lists(st.integers(0, 1000), max_size=6)
LINES = [b"{}", b'{"a":', b"1}", b"[{}", b"\n", b"\n", b"\r", b" ", b'{"b":{}}', b"{", b"}", b"NaN"]
LINES += [b'"\xff"', b"9" * 20, b'{"c":' + b"9" * 20 + b"}\n", b'{"d":-9223372036854775808}\n']
LINES += [lines.BOM, b'{"e":1e999}\n', b'{"f":"\\ud800"}\n', b'{"g":NaN}\n']


def json_truth(data):
    rows, bad, place = [], [], 0
    for line in data.split(b"\n"):
        start = 3 if place == 0 and line.startswith(lines.BOM) else 0
        try:
            if line[start:].strip(b" \r\t"):
                record = json.loads(line[start:].decode(), parse_constant=int)
                assert isinstance(record, dict)
                assert all(-(2**63) <= v < 2**64 for v in record.values() if type(v) is int)
                assert all(v != float("inf") for v in record.values())
                json.dumps(record, ensure_ascii=False).encode()
                rows.append((record, place + start))
        except (ValueError, AssertionError):
            bad.append(place + start)
        place += len(line) + 1
    return rows, bad


@given(st.lists(st.sampled_from(LINES), max_size=30).map(b"".join), CUTS, st.integers(1, 40))
def test_json_lines_are_what_json_reads_line_by_line_at_any_cut(folder, data, cuts, block):
    path = folder / "a.jsonl"
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", max(block, 4))
        patch.setattr(blocks, "BEYOND", block)
        rows, bad = read(FORMATS["json_lines"](), cut_at(path, "json_lines", cuts))
    assert (rows, [place for place, _ in bad]) == json_truth(data)


@given(st.lists(st.sampled_from(["a", "é", "\n", "\r\n", "\0", " "])).map("".join), CUTS)
def test_text_is_what_open_reads_line_by_line_at_any_cut(folder, text, cuts):
    path = folder / "a.txt"
    path.write_bytes(text.encode())
    expected = [line.removesuffix("\n") for line in io.StringIO(text, newline=None)]
    rows, bad = read(FORMATS["text"](), cut_at(path, "text", cuts))
    assert [row for row, _ in rows] == expected
    assert not bad


@pytest.mark.parametrize("sizes_known", [True, False])
@given(parts=st.lists(st.sampled_from([b"", b"a", b"\n", b"bcd\nef", b"\n\n"]), min_size=1))
def test_zstd_is_cut_where_frames_begin_and_records_straddle_them(folder, parts, sizes_known):
    path, plain, form = folder / "a.txt.zst", folder / "b.txt", FORMATS["text"]()
    skipped = b"\x50\x2a\x4d\x18\x02\0\0\0ab"
    path.write_bytes(skipped + b"".join(zstd_frames(parts, sizes_known)))
    plain.write_bytes(b"".join(parts))
    pieces = form.cut(path, 1)
    if any(piece.scan for piece in pieces):
        pieces = form.settle(pieces, [form.scan(piece) for piece in pieces])
    rows, _ = read(form, pieces)
    assert rows == read(form, form.cut(plain, 10**9))[0]
    line_numbers._last.clear()  # of the example before
    for _, place in rows:
        assert form.where(path, place) == form.where(plain, place)
    filled = sum(bool(part) for part in parts)
    assert len(pieces) >= filled


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.jsonl.zst"])
def test_a_compressed_file_that_is_damaged_says_how_far_it_can_be_read(tmp_path, name):
    data = b"".join(b'{"a":%d}\n' % i for i in range(300_000))
    whole = gzip.compress(data) if name.endswith("gz") else zstd_frames([data], False)[0]
    path, form = tmp_path / name, FORMATS[format_of(name)]()
    path.write_bytes(whole)
    rows, _ = read(form, form.cut(path, 1 << 20))
    assert [row["a"] for row, _ in rows] == list(range(300_000))
    damaged = [whole[: len(whole) // 2], whole[:-1], whole[:20] + b"\xff" * 64 + whole[84:]]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(DataError, match=rf"{name} is (damaged or )?cut short: .* byte "):
            read(form, form.cut(path, 1 << 20))


def test_a_bad_line_is_said_in_words(tmp_path):
    said = {
        b"{": "no JSON",
        b"[1]": "holds a list, not an object",
        b'{"a":NaN}': "NaN is no number of JSON: write null",
        b'{"a":-Infinity}': "-Infinity is no number",
        b'{"a":18446744073709551616}': "18446744073709551616 does not fit in 64 bits",
        b'{"a":1e400}': "does not fit in 64 bits",
        b'{"a":"\\ud800"}': "half of a surrogate pair",
        b'{"a":"\xff"}': "no UTF-8",
        b"[" * 100_000: "nested too deeply",
        b'{"a":' * 100_000 + b"1" + b"}" * 100_000: "nested too deeply",
    }
    path, form = tmp_path / "a.jsonl", FORMATS["json_lines"]()
    path.write_bytes(b"{}\n" + b"\n".join(said) + b"\n{}")
    rows, bad = read(form, cut_at(path, "json_lines", [7, 30, 100_000]))
    assert len(rows) == 2
    for number, ((place, text), wanted) in enumerate(zip(bad, said.values(), strict=True)):
        assert wanted in text
        assert form.where(path, place) == f"line {number + 2}"
    assert form.where(path, bad[0][0]) == "line 2"  # backwards


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
def test_a_line_that_is_too_long_is_refused_with_its_number(tmp_path, name, monkeypatch):
    monkeypatch.setattr(lines, "LONGEST", 1 << 20)
    monkeypatch.setattr(blocks, "BLOCK", 1 << 16)
    path, form = tmp_path / name, FORMATS["json_lines"]()
    fits = b'{"a":"' + b"x" * ((1 << 20) - 9) + b'"}\n'
    for more, match in ((b"", None), (b" ", r"a.jsonl.*, line 2: it is longer than 1 MB")):
        data = b"{}\n" + more + fits + b"{}\n"
        path.write_bytes(gzip.compress(data) if name.endswith("gz") else data)
        for target in (1 << 30, 100_000):
            if match is None:
                assert len(read(form, form.cut(path, target))[0]) == 3
            else:
                with pytest.raises(DataError, match=match):
                    read(form, form.cut(path, target))


def test_json_in_one_list_is_refused_with_what_makes_lines_of_it(tmp_path):
    (tmp_path / "a.json").write_text('\n [\n{"a": 1}]')
    with pytest.raises(DataError, match=r"begins with a list.*jq -c"):
        FORMATS["json_lines"]().cut(tmp_path / "a.json", 100)


def test_a_file_that_has_become_shorter_since_it_was_cut_is_refused(tmp_path):
    path, form = tmp_path / "a.txt", FORMATS["text"]()
    path.write_text("a\n" * 100)
    pieces = form.cut(path, 50)
    path.write_text("a\n")
    with pytest.raises(DataError, match=r"has 2 bytes.*has changed"):
        read(form, pieces)


def test_sources_are_files_globs_and_folders_of_one_format(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (
        "b.jsonl",
        "a.jsonl.gz",
        "in/c.txt",
        "in/.hidden",
        "in/_SUCCESS",
        "in/d/e.txt.zst",
    ):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).touch()
    named = [(str(path), name) for path, name in sources(["*.jsonl*", "b.jsonl", "in"])]
    files = ["a.jsonl.gz", "b.jsonl", "in/c.txt", "in/d/e.txt.zst"]
    assert named == list(zip(files, ["json_lines"] * 2 + ["text"] * 2, strict=True))
    with pytest.raises(SpecError, match=r"'\*.csv' names no file"):
        sources(["*.csv"])
    with pytest.raises(SpecError, match=r"Did you mean 'b.jsonl'"):
        sources(["c.jsonl"])
    Path("in/x.jsonl").touch()
    with pytest.raises(SpecError, match=r"not hold files of one format.*.*2 files of text"):
        sources(["in"])
    Path("what.bin").touch()
    with pytest.raises(SpecError, match=r"what.bin: its format is not known.*\.jsonl"):
        sources(["what.bin"])
