"""Whatever is wrong with raw files, functions and columns: one sentence, with place and remedy.

A fault of one record leaves it out, with its file and place; one of all ends the command.
"""

import errno
import gzip
import io
import json
import re
import struct
import tarfile
import zlib
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from test_prepare import ask, made

from disks import Disk
from instep.errors import DataError, InstepError, RecipeError, RunError, SpecError
from instep.prepare.prepare import prepare
from instep.prepare.workers.failed import failed_by
from instep.prepare.workers.printed import MOST, Printed

ROWS = [{"x": number, "y": number % 3, "text": f"word {number}"} for number in range(20)]
LINES = [json.dumps(row) + "\n" for row in ROWS]
JSON = "".join(LINES)
CSV = "x,y,text\n" + "".join(f"{r['x']},{r['y']},{r['text']}\n" for r in ROWS)

FUNCTIONS = """
import os

def fine(raw):
    return raw

def divides(raw):
    return {"x": 1 / (raw["x"] - 7)}

def number(raw):
    return 5

def others(raw):
    return {"x": 1} if raw["x"] < 9 else {"z": 1}

def a_set(raw):
    return {"x": {1, 2}}

def chance(raw):
    return {"x": int.from_bytes(os.urandom(4), "big")}

def never(raw):
    raise ValueError("never good")

def none(raw):
    return None

def sums(samples):
    return sum(samples)

def first(samples):
    return samples[0]

no_function = 3
"""


def arrow_file() -> bytes:
    sink, table = io.BytesIO(), pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue()


def nested(rows: list[object], kind: pa.DataType) -> bytes:
    """An Arrow file with one column of lists in lists."""
    sink, table = io.BytesIO(), pa.table({"x": pa.array(rows, kind)})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write(table)
    return sink.getvalue()


PAIRS = pa.list_(pa.list_(pa.list_(pa.int32(), 2), 1))


def parquet_file() -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(ROWS), sink)
    return sink.getvalue()


def tar_file() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        for number in range(3):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 600
            tar.addfile(member, io.BytesIO(b"a" * 600))
    return sink.getvalue()


def picture() -> bytes:
    sink = io.BytesIO()
    Image.new("RGB", (30, 30)).save(sink, "PNG")
    return sink.getvalue()


def picture_of(width: int, height: int) -> bytes:
    """A picture whose head says another size."""
    size = struct.pack(">II", width, height)
    head = b"IHDR" + size + picture()[24:29]
    return picture()[:12] + head + struct.pack(">I", zlib.crc32(head)) + picture()[33:]


RECORDS: dict[str, tuple[str | bytes, str, dict[str, object], str]] = {
    "cut short": (
        JSON.replace(LINES[4], '{"x": 4,\n'),
        "a.jsonl",
        {},
        "line 5: the line is no JSON",
    ),
    "no object": (JSON + "[1]\n", "a.jsonl", {}, "line 21: the line holds a list, not an object"),
    "no UTF-8": (JSON.encode() + b'{"x": 1, "y": 2, "text": "\xe9"}\n', "a.jsonl", {}, "line 21"),
    "text for a number": (
        JSON + LINES[0].replace('"x": 0', '"x": "four"'),
        "a.jsonl",
        {},
        "line 21: column 'x' is text, and int64 in the samples before",
    ),
    "a column less": (
        JSON + '{"x": 4}\n',
        "a.jsonl",
        {},
        "line 21: the sample has no column 'text'",
    ),
    "a column more": (JSON + LINES[0].replace("}", ', "z": 1}'), "a.jsonl", {}, "line 21"),
    "null": (JSON + LINES[0].replace('"x": 0', '"x": null'), "a.jsonl", {}, "column 'x' is None"),
    "more than 64 bits": (
        JSON + LINES[0].replace('"x": 0', f'"x": {1 << 64}'),
        "a.jsonl",
        {},
        "line 21",
    ),
    "nothing in a list of lists": (
        nested([[[[1, 2]]], [[None]], [None, [[3, 4]]], None, [[[3, None]]]], PAIRS),
        "a.arrow",
        {},
        "row 1: column 'x' has an empty element",
    ),
    "a field less": (CSV + "1,2\n", "a.csv", {}, "line 22: it has 2 fields, and the header 3"),
    "a field more": (CSV + "1,2,a,b\n", "a.csv", {}, "line 22: it has 4 fields, and the header 3"),
    "a type that is said": (
        CSV + "abc,1,t\n",
        "a.csv",
        {"types": {"x": "int64"}},
        "line 22: column 'x' has 'abc', and is int64",
    ),
    "of a tokenizer": (JSON + '{"x": 1}\n', "a.jsonl", {"tokens": "bytes"}, "no text in a column"),
    "a cut image": (
        picture()[:60],
        "images/b/cut.png",
        {},
        "b/cut.png: the image cannot be decoded",
    ),
    "text that is called an image": (b"text", "images/b/no.png", {}, "no known format"),
    "an image of too many pixels": (
        picture_of(12_000, 12_000),
        "images/b/large.png",
        {},
        "it has more than 89,478,485 pixels",
    ),
    "an image of more pixels than Pillow opens": (
        picture_of(60_000, 60_000),
        "images/b/large.png",
        {},
        "it has more than 89,478,485 pixels",
    ),
    "an empty image": (b"", "images/b/empty.png", {}, "b/empty.png: the file is empty"),
    "other columns by a function": (
        JSON,
        "a.jsonl",
        {"map": "clean.py:others"},
        "line 10: the sample has no column 'x' and a column 'z'",
    ),
}
"""Faults of single records: what is written to which file, what is asked for, what is said."""

FILES: dict[str, tuple[str | bytes, str, dict[str, object], type[InstepError], str]] = {
    "stops if asked": (
        JSON + "{\n",
        "a.jsonl",
        {"unreadable": "stop"},
        DataError,
        "a.jsonl, line 21: the line is no JSON.*--unreadable skip",
    ),
    "empty": ("", "a.jsonl", {}, DataError, "a.jsonl: no record.*Name files that hold some"),
    "a header alone": ("x,y\n", "a.csv", {}, DataError, "a.csv: no record"),
    "no header": ("", "a.csv", {}, DataError, "a.csv has no header"),
    "a name twice": ("x,x\n1,2\n", "a.csv", {}, DataError, "its header has 'x' twice"),
    "an open quote": (
        CSV + '1,2,"open\n3,4,b\n',
        "a.csv",
        {},
        DataError,
        "a.csv, line 22: the quote that opens here is not closed.*Close it",
    ),
    "a list": ("[1, 2]\n", "a.jsonl", {}, DataError, "a.jsonl begins with a list.*jq -c"),
    "a type of no column": (
        CSV,
        "a.csv",
        {"types": {"z": "int64"}},
        SpecError,
        "no column is.*'z'",
    ),
    "a type that is none": (
        CSV,
        "a.csv",
        {"types": {"x": "int9"}},
        SpecError,
        "no type 'int9'.*Known:",
    ),
    "all of another type": (
        CSV,
        "a.csv",
        {"types": {"x": "bool"}},
        DataError,
        "20 are bad, the first is .*a.csv, line 2: column 'x' has '0'",
    ),
    "Parquet cut short": (
        parquet_file()[:-20],
        "a.parquet",
        {},
        DataError,
        "a.parquet is dam.*Get",
    ),
    "Parquet, overwritten": (
        parquet_file()[:40] + bytes(60) + parquet_file()[100:],
        "a.parquet",
        {},
        DataError,
        r"a.parquet is damaged.*[^.]\. Get it again\.$",
    ),
    "Arrow cut short": (arrow_file()[:-30], "a.arrow", {}, DataError, "a.arrow is damaged.*Get it"),
    "lists of lists of nothing": (
        nested([[[]]], pa.list_(pa.list_(pa.int32(), 0))),
        "a.arrow",
        {},
        DataError,
        "which no sample can have.*A --map makes them",
    ),
    "gzip cut short": (
        gzip.compress(JSON.encode())[:-12],
        "a.jsonl.gz",
        {},
        DataError,
        "a.jsonl.gz is damaged or cut short.*Get it again",
    ),
    "no gzip": (JSON, "a.jsonl.gz", {}, DataError, "a.jsonl.gz is damaged or cut short"),
    "zstd cut short": (
        pa.compress(JSON.encode(), "zstd", asbytes=True)[:-12],
        "a.jsonl.zst",
        {},
        DataError,
        "the frame that begins at byte 0 is not whole. Get it again",
    ),
    "tar cut short": (tar_file()[: 1024 + 900], "a.tar", {}, DataError, "up to byte 1,536|1,024"),
    "no tar": (b"no tar" * 200, "a.tar", {}, DataError, "a.tar is damaged or cut short"),
    "of no known format": (JSON, "a.odd", {}, SpecError, "a.odd: its format is not known.*Known:"),
    "no file of that name": (JSON, "a.jsonl", {"sources": ["b.jsonl"]}, SpecError, "Did you mean"),
    "function divides by zero": (
        JSON,
        "a.jsonl",
        {"map": "clean.py:divides"},
        RecipeError,
        r"line 8: divides raised ZeroDivisionError.*clean.py:8 in divides.*ValueError leaves",
    ),
    "function gives a number": (
        JSON,
        "a.jsonl",
        {"map": "clean.py:number"},
        DataError,
        "the sample is int, but a dict",
    ),
    "function gives a set": (
        JSON,
        "a.jsonl",
        {"map": "clean.py:a_set"},
        DataError,
        "column 'x' is of type set; wanted: a number, an array",
    ),
    "function throws dice": (
        JSON,
        "a.jsonl",
        {"map": "clean.py:chance"},
        RecipeError,
        "not repeatable: .*a.jsonl, line 1",
    ),
    "function refuses all": (JSON, "a.jsonl", {"map": "clean.py:never"}, DataError, "never good"),
    "function gives none": (JSON, "a.jsonl", {"map": "clean.py:none"}, DataError, "None for each"),
    "no such function": (JSON, "a.jsonl", {"map": "clean.py:fin"}, SpecError, "Known: .*fine"),
    "no function": (
        JSON,
        "a.jsonl",
        {"map": "clean.py:no_function"},
        SpecError,
        "is an int, but",
    ),
    "reduce fails": (
        JSON,
        "a.jsonl",
        {"key": "y", "reduce": "clean.py:sums"},
        RecipeError,
        "key 0: sums raised TypeError",
    ),
    "key of no column": (
        JSON,
        "a.jsonl",
        {"key": "z", "reduce": "clean.py:first"},
        SpecError,
        "--key 'z': no column has that name. Known: text, x, y",
    ),
    "a tokenizer that is none": (
        JSON,
        "a.jsonl",
        {"tokens": "clean.py"},
        SpecError,
        "--tokens 'clean.py' cannot be read.*tokenizer.json",
    ),
}
"""Faults that end the command: what is written, what is asked for, the error, what is said."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where commands are given."""
    monkeypatch.chdir(tmp_path)
    Path("clean.py").write_text(FUNCTIONS)
    return tmp_path


def write(content: str | bytes, name: str) -> str:
    """The file, and two good images beside one; returns the source."""
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    if path.parts[0] != "images":
        return name
    for number in range(2):
        Path("images/a").mkdir(exist_ok=True)
        Path(f"images/a/{number}.png").write_bytes(picture())
    return "images"


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_cannot_be_used_is_left_out_and_named(name: str, folder: Path) -> None:
    content, file, options, wanted = RECORDS[name]
    manifest, job, _ = made(ask(sources=[write(content, file)], **options))
    assert manifest.bad > 0
    assert manifest.samples > 0
    assert wanted in job.first_bad[0]
    source = "images" if file.startswith("images") else file
    assert source in job.first_bad[0]
    assert "\n" not in job.first_bad[0]
    with pytest.raises(DataError) as caught:
        made(ask(**{"sources": [source], **options, "unreadable": "stop", "to": "stopped"}))
    said = str(caught.value)
    assert wanted in said
    assert source in said
    assert re.search(r"To leave such records out.*--unreadable skip", said), said
    assert "\n" not in said


@pytest.mark.parametrize("name", FILES)
def test_what_ends_a_preparation_is_one_sentence_with_place_and_remedy(
    name: str, folder: Path
) -> None:
    content, file, options, error, wanted = FILES[name]
    source = write(content, file)
    with pytest.raises(error) as caught:
        made(ask(**{"sources": [source], **options}))
    said = str(caught.value)
    assert re.search(wanted, said), said
    assert "\n" not in said
    assert not re.search(r"[^.]\.\.([^.]|$)", said)
    assert not any(Path("out").glob("*.arrow"))


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.ENOSPC, "its disk is full. Free some, and"),
        (errno.EDQUOT, "your quota"),
        (errno.EFBIG, r"a file may not be so large there. Raise the limit \(ulimit -f\), and"),
    ],
)
def test_what_cannot_be_written_is_said_with_its_cause_and_remedy(number: int, said: str) -> None:
    failed = failed_by(OSError(number, "as the system says"), 3)
    assert re.search(f"cannot be written: {said}.* what is done is kept.$", failed.text)
    assert failed.kind == "RunError"
    assert failed_by(OSError(number, "as the system says"), 3, "a/out").text.startswith("a/out can")


@pytest.mark.process
def test_a_full_disk_is_named_with_its_folder(folder: Path) -> None:
    disk = Disk(folder / "disk", 1 << 20)
    try:
        asked = ask(sources=[write(JSON * 2000, "a.jsonl")], to="disk/out")
        said = r"/disk/out/\.preparing cannot be written: its disk is full\. Free some, and give"
        with pytest.raises(RunError, match=said):
            prepare(asked, print, workers=1)
        assert not any(Path("disk").rglob("manifest.json"))
    finally:
        disk.close()


def test_what_a_function_prints_without_end_keeps_its_begin_and_its_end(tmp_path: Path) -> None:
    log, lines = tmp_path / "log", [f"line {number}\n" for number in range(1_000_000)]
    printed = Printed(log)
    with log.open("a") as worker:  # which does not know that its log is cut
        for first in range(0, len(lines), 100_000):
            worker.write("".join(lines[first : first + 100_000]))
            worker.flush()
            printed.cut()
            assert log.stat().st_size <= MOST
    text, whole = log.read_text(), "".join(lines)
    head, said, tail = re.split(
        r"\n\[([0-9,]+) bytes that were printed here are left out\]\n", text
    )
    assert whole.startswith(head)
    assert whole.endswith(tail)
    assert len(head) + len(tail) + int(said.replace(",", "")) == len(whole)


@pytest.mark.process
def test_workers_that_are_lost_are_named_with_what_they_printed_last(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("ends.py").write_text(
        "import os, sys\ndef ends(raw):\n    print('not my day', flush=True)\n    os._exit(9)\n"
    )
    Path("a.jsonl").write_text(JSON)
    with pytest.raises(InstepError) as caught:
        prepare(ask(sources=["a.jsonl"], map="ends.py:ends"), lambda _: None, workers=1)
    said = re.fullmatch(
        r"3 workers were lost.*, one after another: it .*\. The last one printed: not my day\. "
        r"What they printed is in (.*)\.",
        str(caught.value),
    )
    assert said, str(caught.value)
    assert "not my day" in (Path(said[1]) / "worker-0.log").read_text()
