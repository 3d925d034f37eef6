"""CSV: records are those of Python's csv module, however the file is cut."""

import csv
import io
import sys
from datetime import UTC, datetime

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace
from raw_files import cut_at, zstd_frames

from instep.data.raw import FORMATS, blocks, csv_head, line_numbers
from instep.data.raw import csv as raw_csv
from instep.data.raw.quotes import loops, parity
from instep.data.raw.quotes.parity import BetweenBlocks
from instep.data.raw.quotes.states import STATES
from instep.errors import DataError, SpecError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("raw")


def rows_of(form, pieces):
    """All records as lists, with their places, and all that are bad."""
    rows, bad = [], []
    for piece in pieces:
        for chunk in form.read(piece):
            values = [list(row.values()) for row in chunk.rows.to_pylist()]
            rows += zip(values, chunk.places, strict=True)
            bad += chunk.bad
    return rows, bad


def settled(form, pieces):
    """The same, scanned."""
    if pieces[0].scan:
        return form.settle(pieces, [form.scan(piece) for piece in pieces])
    return pieces


def anyhow(form, path, cuts, known):
    """Pieces of a file that is cut at any bytes."""
    first = form.cut(path, 10**9, known)[0]
    free = max(path.stat().st_size - 4, 1)
    pieces = cut_at(path, "csv", [4 + cut % free for cut in cuts])  # not within a BOM
    pieces = [replace(piece, learned=first.learned, scan=True) for piece in pieces]
    return settled(form, [replace(pieces[0], state=first.state), *pieces[1:]])


def truth(text, width):
    """Rows that fit with their lines, lines of others, and whether a quote is open at the end."""
    reader, good, bad, line = csv.reader(io.StringIO(text, newline="")), [], [], 0
    for number, row in enumerate(reader):
        if row and number:
            fits = len(row) == width
            good += [(row, f"line {line + 1}")] if fits else []
            bad += [] if fits else [f"line {line + 1}"]
        line = reader.line_num
    ended = list(csv.reader(io.StringIO(text + "\nEND", newline="")))
    return good, bad, ended[-1] != ["END"]


TEXTS = st.lists(st.sampled_from('aé1,",\n"\r\r ')).map("".join)
CUTS = st.lists(st.integers(0, 100), max_size=5)


@pytest.mark.parametrize("width", [1, 2])
@given(TEXTS, CUTS, st.sampled_from(["", "\ufeff"]), st.sampled_from(["\n", "\r\n", "\r"]),
       st.integers(4, 30), st.booleans())  # fmt: skip
@example('"a\n\n,b"x,"""\n",c"c\r\n1,2', [3, 9, 13], "\ufeff", "\r\n", 5, True)
@example("a,b\n\ufeff,\n\ufeff,b", [1, 2, 3, 4, 5, 6, 7, 8], "", "\n", 4, False)
def test_records_are_those_of_the_csv_module_at_any_cut(
    folder, width, text, cuts, bom, end, block, zstd
):
    text = ",".join("xy"[:width]) + end + text
    path, form = folder / "a.csv", FORMATS["csv"]()
    path.write_bytes((bom + text).encode())
    known = form.learn([path], dict.fromkeys("xy"[:width], "string"))
    good, bad, is_open = truth(text, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", block)
        patch.setattr(blocks, "BEYOND", block)
        patch.setattr(line_numbers, "_last", {})  # of the example before
        try:
            pieces = anyhow(form, path, cuts, known)
            if zstd:
                parts = [path.read_bytes()[piece.start : piece.stop] for piece in pieces]
                path = folder / "a.csv.zst"
                path.write_bytes(b"".join(zstd_frames(parts, len(cuts) % 2)))
                pieces = settled(form, form.cut(path, 1, known))
            rows, failed = rows_of(form, pieces)
        except DataError as error:
            rows, failed = None, str(error)
    if is_open:
        assert "the quote that opens here is not closed" in failed
        return
    assert [(row, form.where(path, place)) for row, place in rows] == good
    assert [form.where(path, place) for place, _ in failed] == bad


@given(TEXTS, st.integers(0, 4), st.integers(1, 9), st.integers(1, 9), st.integers(1, 3))
@example('"a","b""c"\n"",a"', 0, 1, 1, 1)
def test_where_parity_does_it_finds_what_the_compiled_machine_finds(
    text, state, begun, opened, fields
):
    data, ends = text.encode(), np.isin(np.arange(256), list(b",\n\r"))
    before = BetweenBlocks(state, -begun if state else 0, fields if state else 0, -opened)
    memory, room, codes = (
        np.array(before),
        np.empty((3, len(data) + 1), np.int64),
        np.frombuffer(data, np.uint8),
    )
    count = loops.split(codes, ord(","), ends, memory, *room)
    if (found := parity.split(data, ord(","), before)) is not None:
        assert [each.tolist() for each in found[:3]] == room[:, :count].tolist()
        assert found.memory[:: 1 if found.memory.state else 3] == tuple(
            memory[:: 1 if memory[0] else 3]
        )
    else:
        assert '"' in text
    states = np.arange(STATES)
    loops.pass_over(codes, ord(","), states)
    if data and (passed := parity.passed(data, ord(","), [*range(STATES)])) is not None:
        assert passed == states.tolist()


def test_a_file_whose_quotes_are_none_of_the_text_needs_no_compiler(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "instep.data.raw.quotes.loops", None)
    monkeypatch.setattr(blocks, "BLOCK", 50)
    path, form = tmp_path / "a.csv", FORMATS["csv"]()
    expected = [[i, f'{i},\n"b"' if i % 3 else ""] for i in range(200)]
    path.write_text(
        "x,y\n" + "".join(f'{i},"{y.replace(chr(34), chr(34) * 2)}"\n' for i, y in expected)
    )
    for target in (1 << 20, 300):
        rows, _ = rows_of(form, settled(form, form.cut(path, target)))
        assert [row for row, _ in rows] == expected


@pytest.mark.parametrize("at", [5, 40, 77])
def test_an_open_quote_is_named_by_the_line_where_it_opens(tmp_path, at):
    path, form = tmp_path / "a.csv", FORMATS["csv"]()
    lines = ["x,y", *(f'{i},"a\n""b"' for i in range(100))]
    lines[at] = f'{at},"'
    path.write_text("\n".join(lines[: at + 1] + ["", "c,d"] * 200))
    for target in (1 << 20, 100):
        with pytest.raises(DataError, match=rf"a.csv, line {2 * at}: the quote that opens here"):
            rows_of(form, settled(form, form.cut(path, target)))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (["1", "-2", ""], [1, -2, None]),
        (["1", "2.5", "NA", "nan", "1e3"], [1.0, 2.5, None, "nan", 1000.0]),
        (["true", "False", "null"], [True, False, None]),
        (["007", "1"], ["007", "1"]),
        (["12345678901234567890", "1"], ["12345678901234567890", "1"]),
        (["2024-01-01", ""], [datetime(2024, 1, 1), None]),
        (["2024-01-01 10:00", "2024-01-02"], [datetime(2024, 1, 1, 10), datetime(2024, 1, 2)]),
        (["2024-01-01T10:00:00.125Z"], [datetime(2024, 1, 1, 10, 0, 0, 125000, UTC)]),
        (["2024-01-01 10:00:00.1234567"], ["2024-01-01 10:00:00.1234567"]),
        (["10:00", "11:30"], ["10:00", "11:30"]),
        (["1", "NA", "a"], ["1", "NA", "a"]),
        (["", ""], ["", ""]),
    ],
    ids=str,
)
def test_types_are_those_of_the_head_and_what_would_change_stays_text(tmp_path, values, expected):
    path, form = tmp_path / "a.csv", FORMATS["csv"]()
    path.write_text("x,y\n" + "".join(f"{value},0\n" for value in values))
    rows, _ = rows_of(form, form.cut(path, 1 << 20))
    given = ["nan" if row[0] != row[0] else row[0] for row, _ in rows]
    assert given == expected
    assert [type(value) for value in given] == [type(value) for value in expected]


def test_a_value_of_another_type_than_the_heads_is_a_bad_record_at_any_cut(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_head, "HEAD", 400)
    path, form = tmp_path / "a.csv", FORMATS["csv"]()
    lines = [f"{i},{i}.5,text" for i in range(1000)]
    lines[500:503] = ["1.5,2,text", "3,two,text", "4,5,\xff"]
    lines[700] = "7"
    path.write_bytes("\n".join(["a,b,c", *lines]).encode("latin-1"))
    for target in (1 << 20, 1000, 70):
        rows, bad = rows_of(form, settled(form, form.cut(path, target)))
        assert [row[0] for row, _ in rows] == [*range(500), *range(503, 700), *range(701, 1000)]
        assert [form.where(path, place) for place, _ in bad] == [
            *("line 502", "line 503", "line 504", "line 702")
        ]
        assert "column 'a' has '1.5', and is int64 by the first records" in bad[0][1]
        assert "column 'b' has 'two', and is float64" in bad[1][1]
        assert "no UTF-8" in bad[2][1]
        assert bad[3][1] == "it has 1 field, and the header 3"


def test_all_files_of_a_source_have_the_same_columns_in_the_order_of_the_first(tmp_path):
    form, paths = FORMATS["csv"](), [tmp_path / name for name in ("a.csv", "b.tsv", "c.csv")]
    texts = ["x,y\n1,a\n", "y\tx\nb,\t2.5\n", "x,z\n1,2\n"]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    known = form.learn(paths[:2])
    for path, row in zip(paths, ([1.0, "a"], [2.5, "b,"]), strict=False):
        assert [row for row, _ in rows_of(form, form.cut(path, 100, known))[0]] == [row]
    with pytest.raises(DataError, match=r"c.csv lacks the column 'y': all CSV files of a source"):
        form.cut(paths[2], 100, known)
    with pytest.raises(SpecError, match="no column is called 'u'"):
        form.learn(paths[:1], {"u": "string"})
    with pytest.raises(SpecError, match=r"there is no type 'int'.*int64"):
        form.learn(paths[:1], {"x": "int"})


@pytest.mark.parametrize(
    ("text", "match"),
    [("", "no header"), ("\n\n", "no header"), ('"a', "no header"), ("a,b,a\n", "'a' twice")],
)
def test_a_file_without_a_good_header_is_refused(tmp_path, text, match):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(DataError, match=f"a.csv.*{match}"):
        FORMATS["csv"]().cut(tmp_path / "a.csv", 100)


def test_a_record_that_is_too_long_is_refused_with_its_line(tmp_path, monkeypatch):
    monkeypatch.setattr(raw_csv, "LONGEST", 1000)
    monkeypatch.setattr(blocks, "BLOCK", 100)
    path, form = tmp_path / "a.csv", FORMATS["csv"]()
    for fill, refused in ((996, False), (997, True)):
        path.write_text("x,y\n1,2\n" + f'1,"{"z" * fill}"\n3,4\n')
        for target in (1 << 20, 77):
            pieces = settled(form, form.cut(path, target))
            if refused:
                with pytest.raises(DataError, match=r"a.csv, line 3: the record is longer than"):
                    rows_of(form, pieces)
            else:
                assert len(rows_of(form, pieces)[0]) == 3
    path.write_text("x,y\n1,2\n1," + "z" * 2000 + "\n3,4\n")
    with pytest.raises(DataError, match=r"line 3: the record is longer .* Cut it up, or remove it"):
        rows_of(form, settled(form, form.cut(path, 1 << 20)))
