"""What a command makes depends on no command before it, and not on the order of tasks."""

import datetime
import decimal
import json
import os
import random
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from msgspec.structs import replace
from PIL import Image
from test_prepare import Here, ask, made
from tokenizers import Tokenizer, models, pre_tokenizers

from instep.data.shards.dataset import Shards
from instep.data.shards.manifest import read_manifest, write_manifest
from instep.data.splits import SPLITS, Request
from instep.data.splits.columns import Column
from instep.errors import DataError, RecipeError
from instep.prepare import plan
from instep.prepare.job import Job
from instep.prepare.messages import Map, Sum
from instep.prepare.prepare import prepare
from instep.prepare.workers.crew import Interrupted

FUNCTIONS = """
import random
import numpy as np
import torch

BUFFER, TENSOR = np.zeros(2), torch.zeros(2)

def drawn(raw):
    return {"id": raw["id"], "x": random.random()}

def seldom(raw):
    return {"id": raw["id"], "x": random.random() if raw["id"] % 7 == 5 else 0.0}

def by_torch(raw):
    return {"id": raw["id"], "x": float(torch.rand(())) if raw["id"] == 3 else 0.0}

def buffer(raw):
    BUFFER[:] = raw["id"]
    return {"x": BUFFER}

def view(raw):
    BUFFER[:] = raw["id"]
    return {"x": BUFFER[:1]}

def tensor(raw):
    TENSOR.fill_(raw["id"])
    return {"x": TENSOR.view(1, 2)}

def one_dict(raw, sample={}):
    sample["x"] = [raw["id"]]
    return sample

def yields_one(raw):
    sample = {}
    for part in range(2):
        sample["x"] = [raw["id"] + part / 2]
        yield sample

def turned(samples):
    key = samples[0]["k"]
    return {"a": key, "b": -key} if key % 2 else {"b": -key, "a": key}

def renamed(samples):
    key = samples[0]["k"]
    return {"a": key} if key < 30 else {"c": key}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where commands are given; each file is a task, or several."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "SMALLEST", 50)
    Path("clean.py").write_text(FUNCTIONS)
    return tmp_path


def write(name, rows):
    path = Path(name)
    path.parent.mkdir(exist_ok=True)
    path.write_text(
        "".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)
    )


def table(to="out"):
    """Columns with their types, and all values."""
    dataset = Shards(to)
    types = [(column.name, str(column)) for column in dataset.manifest.columns]
    return types, [repr(dataset[at]) for at in range(len(dataset))]


LARGE = (1 << 53) + 1

EDITS = {
    "columns in another order": (
        {"b": [{"x": 1, "y": 2}] * 5},
        {"a": [{"y": 20, "x": 10}] * 5},
    ),
    "floats beside that go": (
        {"a": [{"x": LARGE}] * 5, "b": [{"x": 0.5}] * 5},
        {"b": None},
    ),
    "floats before that go": ({"a": [{"x": 0.5}] * 5, "b": [{"x": 1}] * 5}, {"a": None}),
    "lists of two lengths": ({"a": [{"x": [1, 2]}] * 5, "b": [{"x": [1, 2, 3]}] * 5}, {"b": None}),
    "another type, corrected": (
        {"a": [{"x": 1}] * 5, "b": [{"x": "b"}] * 5},
        {"a": [{"x": "a"}] * 5},
    ),
}


def _edit(files):
    for name, rows in files.items():
        if rows is None:
            Path(f"{name}.jsonl").unlink()
        else:
            write(f"{name}.jsonl", rows)


@pytest.mark.parametrize("name", EDITS)
def test_a_command_after_an_edit_makes_what_a_fresh_one_makes(name, folder):
    before, after = EDITS[name]
    _edit(before)
    if "floats beside" in name:  # which no column can hold
        with pytest.raises(DataError, match="'x'"):
            made(ask(sources=["*.jsonl"]))
    else:
        made(ask(sources=["*.jsonl"], unreadable="skip"))
    _edit(after)
    again, _, _ = made(ask(sources=["*.jsonl"]))
    fresh, _, _ = made(ask(sources=["*.jsonl"], to="fresh"))
    assert table() == table("fresh")
    assert (again.sha256, again.bad) == (fresh.sha256, fresh.bad)


VALUES = (1, 2.5, "text", [1], [1, 2], [0.5], True)


@pytest.mark.parametrize("seed", range(6))
def test_after_any_edits_a_command_makes_what_a_fresh_one_makes(seed, folder):
    draw = random.Random(seed)
    options = draw.choice([{}, {"shuffle": True}, {"key": "k", "reduce": "clean.py:turned"}])
    write("m.jsonl", [{"k": 1, "x": 1}])
    for step in range(6):
        name = draw.choice("abmz")
        if step and name != "m" and draw.random() < 0.3:
            Path(f"{name}.jsonl").unlink(missing_ok=True)
        else:
            kinds = draw.sample(VALUES, draw.randint(1, 2))
            names = draw.choice([("k", "x"), ("x", "k")])
            rows = [{"k": draw.randrange(50), "x": draw.choice(kinds)} for _ in range(8)]
            write(f"{name}.jsonl", [{each: row[each] for each in names} for row in rows])
        options["unreadable"] = draw.choice(["some", "skip", "skip"])
        again = outcome(ask(sources=["*.jsonl"], **options))
        assert again == outcome(ask(sources=["*.jsonl"], to=f"fresh{step}", **options))
        assert again[0] is None or table() == table(f"fresh{step}")


def outcome(asked):
    """What a command makes, or says."""
    try:
        found, _, _ = made(asked)
    except DataError as error:
        return None, str(error)
    return found.sha256, found.bad, found.statistics


class Forwards(Here):
    """First task first."""

    def do(self, tasks, *args):
        yield from super().do(reversed(list(tasks)), *args)


def _rewritten(path):
    path.write_text(path.read_text().replace("1", "2"))


def _moved_over(path):
    _rewritten(other := Path(shutil.copy2(path, "other")))
    os.replace(other, path)


CHANGES = {
    "touched": (os.utime, True, set(), {}),
    "mode": (lambda path: path.chmod(0o600), False, set(), {}),
    "copied back": (lambda path: os.replace(shutil.copy2(path, "other"), path), False, set(), {}),
    "rewritten": (_rewritten, False, {"b.jsonl"}, {}),
    "moved over": (_moved_over, False, {"b.jsonl"}, {}),
    "no time tells": (_rewritten, None, {"b.jsonl"}, {"checksums": True}),
}
"""What is done to a file, whether its time changes, and which files are read again."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_is_read_again_if_its_contents_differ_and_only_then(name, folder):
    do, new_time, wanted, options = CHANGES[name]
    _edit({"a": [{"x": 1}] * 9, "b": [{"x": 1}] * 9})
    made(ask(sources=["*.jsonl"]))
    path, before = Path("b.jsonl"), os.stat("b.jsonl")
    do(path)
    if not new_time:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    if new_time is None:  # as on a disk that keeps no times
        manifest, (_, file) = read_manifest("out"), plan.files_of(ask(sources=["*.jsonl"]))
        sources = [replace(each, stamp=file.stamp) for each in manifest.sources]
        write_manifest(Path("out"), replace(manifest, sources=sources))
    again, _, here = made(ask(sources=["*.jsonl"], **options))
    tasks = [task for task in here.tasks if isinstance(task, Map)]
    assert {piece.path for task in tasks for piece in task.pieces} == wanted
    assert again.sha256 == made(ask(sources=["*.jsonl"], to="fresh"))[0].sha256
    _, _, here = made(ask(sources=["*.jsonl"]))
    assert here.tasks == []


@pytest.mark.parametrize("function", ["drawn", "seldom", "by_torch"])
def test_draws_depend_on_seed_file_and_record_wherever_they_are_made(function, folder):
    """Whatever else a task reads, whatever a process has done before, behind bad records too."""
    for name in "abc":
        write(f"{name}.jsonl", ["{broken\n" * (name != "b"), *({"id": n} for n in range(30))])
    one, _, _ = made(ask(sources=["*.jsonl"], map=f"clean.py:{function}"))
    other, _, _ = made(ask(sources=["*.jsonl"], map=f"clean.py:{function}", to="other"), Forwards)
    assert other.sha256 == one.sha256
    made(ask(sources=["b.jsonl"], map=f"clean.py:{function}", to="alone"))
    assert Shards("alone").column("x").tolist() == Shards("out").column("x")[30:60].tolist()
    if function != "by_torch":  # which draws once in each file
        drawn = [value for value in Shards("out").column("x").tolist() if value]
        assert len(set(drawn)) == len(drawn) >= 12


def test_files_of_one_name_have_draws_and_documents_of_their_own(folder):
    for name in "ab":
        write(f"{name}/x.jsonl", [{"id": number, "text": "words"} for number in range(5)])
    sources = ["a/x.jsonl", "b/x.jsonl"]
    made(ask(sources=sources, map="clean.py:drawn"))
    assert len(set(Shards("out").column("x").tolist())) == 10
    made(ask(sources=sources, tokens="bytes", to="tokens"))
    assert len(set(Shards("tokens").column("document").tolist())) == 10


@pytest.mark.parametrize("function", ["buffer", "view", "tensor", "one_dict", "yields_one"])
def test_what_a_function_gives_again_and_changes_is_read_when_it_was_given(function, folder):
    write("a.jsonl", [{"id": number} for number in range(300)])
    made(ask(sources=["a.jsonl"], map=f"clean.py:{function}"))
    found = [float(np.ravel(Shards("out")[at]["x"])[0]) for at in range(len(Shards("out")))]
    each = (0.0, 0.5) if function == "yields_one" else (0.0,)
    assert found == [number + more for number in range(300) for more in each]


def test_samples_of_keys_have_one_order_of_columns_in_all_ranges(folder):
    write("a.jsonl", [{"k": number} for number in range(60)])
    made(ask(sources=["a.jsonl"], key="k", reduce="clean.py:turned", shard_bytes=100))
    dataset = Shards("out")
    assert len(dataset) == 60
    assert dataset.column("a").tolist() == (-dataset.column("b")).tolist()
    assert sorted(dataset.column("a").tolist()) == list(range(60))
    asked = ask(sources=["a.jsonl"], key="k", reduce="clean.py:renamed", shard_bytes=100, to="two")
    manifest, job, _ = made(asked)
    assert (manifest.samples, manifest.bad) == (30, 30)
    assert "key " in job.first_bad[0]


def test_equal_zeros_are_one_key(folder):
    write("a.jsonl", [{"k": 0.0}, {"k": -0.0}, {"k": 1.0}])
    manifest, _, _ = made(ask(sources=["a.jsonl"], key="k", reduce="clean.py:turned"))
    assert manifest.samples == 2


def test_images_that_change_places_are_read_again(folder):
    for label, grey in (("cat", 10), ("dog", 200)):
        (Path("images") / label).mkdir(parents=True)
        Image.new("L", (4, 4), grey).save(f"images/{label}/0.bmp")
    Path("images/.trash").mkdir()
    Image.new("L", (4, 4)).save("images/.trash/9.bmp")
    made(ask(sources=["images"]))
    assert [int(Shards("out")[at]["image"].max()) for at in range(2)] == [10, 200]
    Path("images/cat/0.bmp").rename("images/0.bmp")
    Path("images/dog/0.bmp").rename("images/cat/0.bmp")
    Path("images/0.bmp").rename("images/dog/0.bmp")
    made(ask(sources=["images"]))
    assert [int(Shards("out")[at]["image"].max()) for at in range(2)] == [200, 10]
    assert torch.equal(torch.as_tensor(Shards("out").column("label")), torch.tensor([0, 1]))


def test_a_file_that_is_named_twice_is_read_once(folder):
    write("a.jsonl", [{"id": number} for number in range(5)])
    Path("link.jsonl").symlink_to("a.jsonl")
    sources = ["a.jsonl", str(Path("a.jsonl").absolute()), "*.jsonl"]
    assert made(ask(sources=sources))[0].samples == 5


@pytest.mark.parametrize("kind", ["blocks", "tasks", "bad"])
def test_what_lies_beside_the_shards_is_made_again_when_it_is_damaged(kind, folder):
    write("a.jsonl", ["{\n", *({"id": number} for number in range(5))])
    first, _, _ = made(ask(sources=["a.jsonl"]))
    (path,) = Path("out").glob(f"{kind}-*")
    path.unlink()
    again, _, _ = made(ask(sources=["a.jsonl"]))
    assert again.sha256 == first.sha256
    assert path.exists()
    if kind == "blocks":
        path.write_bytes(bytes(path.stat().st_size))
        made(ask(sources=["a.jsonl"]))
        assert any(path.read_bytes())


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"shuffle": True}, id="shuffled", marks=pytest.mark.tail),
    ],
)
def test_a_flipped_bit_in_what_is_kept_is_made_again(options, folder, monkeypatch):
    """In shards that another command keeps, and in results of a command that was interrupted."""
    for name in "ab":
        write(f"{name}.jsonl", [{"id": n, "x": [n] * 20} for n in range(40)])
    made(ask(sources=["*.jsonl"], to="fresh", **options))
    monkeypatch.setattr(Job, "_publish", _interrupted)
    with pytest.raises(Interrupted):
        made(ask(sources=["*.jsonl"], **options))
    kept = [*Path("out/.preparing").glob("*.arrow"), *Path("out/.preparing").glob("*.sorted")]
    for path in [*kept, *Path("out/.preparing").glob("*.npy"), *Path("out").glob("*.arrow")]:
        flip(path)
    monkeypatch.undo()
    monkeypatch.chdir(folder)
    monkeypatch.setattr(plan, "SMALLEST", 50)
    again, _, _ = made(ask(sources=["*.jsonl"], **options))
    assert again.sha256 == Shards("fresh").manifest.sha256
    for path in Path("out").glob("*.arrow"):
        flip(path)
    write("c.jsonl", [{"id": 99, "x": [1] * 20}])
    again, _, _ = made(ask(sources=["*.jsonl"], **options))
    fresh, _, _ = made(ask(sources=["*.jsonl"], to="other", **options))
    assert again.sha256 == fresh.sha256


def _interrupted(*_):
    raise Interrupted


def test_results_of_other_tasks_that_were_interrupted_go_with_the_next_command(folder, monkeypatch):
    write("a.jsonl", [{"id": number} for number in range(40)])
    made(ask(sources=["a.jsonl"], shuffle=True))
    kept = {path.name for path in Path("out/.preparing").glob("*.done")}
    assert kept
    with monkeypatch.context() as context:
        context.setattr(Job, "_publish", _interrupted)
        with pytest.raises(Interrupted):
            made(ask(sources=["a.jsonl"], shuffle=True, map="clean.py:drawn"))
    assert {path.name for path in Path("out/.preparing").glob("*.done")} > kept
    _, job, _ = made(ask(sources=["a.jsonl"], shuffle=True))
    assert job.done_before == job.tasks
    assert {path.name for path in Path("out/.preparing").glob("*.done")} == kept


def test_a_function_that_cannot_be_repeated_is_refused_each_time(folder):
    Path("chance.py").write_text("import os\ndef f(raw):\n    return {'x': os.urandom(4).hex()}\n")
    write("a.jsonl", [{"id": number} for number in range(9)])
    for _ in range(2):
        with pytest.raises(RecipeError, match="not repeatable"):
            made(ask(sources=["a.jsonl"], map="chance.py:f"))


def _appended(path):
    path.write_text(path.read_text() + "\n")


def _moved_over_at_once(path):
    """With the same size and time."""
    before = path.stat()
    _moved_over(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("name", "does", "after"),
    [
        ("a.jsonl", _appended, Map),
        ("a.jsonl", _rewritten, Sum),  # when nothing is left to read of it but its checksum
        ("a.jsonl", _moved_over_at_once, Map),
        ("clean.py", _appended, Map),
        ("clean.py", _appended, Sum),
    ],
)
def test_what_changes_while_it_is_used_is_named(name, does, after, folder):
    write("a.jsonl", [{"id": number} for number in range(9)])

    class Changes(Here):
        def do(self, tasks, *args):
            tasks = list(tasks)
            yield from super().do(tasks, *args)
            if any(isinstance(task, after) for task in tasks):
                does(Path(name))

    with pytest.raises(DataError, match=r"has changed while it .*Give the same command again"):
        made(ask(sources=["a.jsonl"], map="clean.py:drawn"), Changes)
    assert not Path("out/manifest.json").exists()


@pytest.mark.process
def test_an_error_in_a_changed_source_is_not_said_of_the_one_that_was_asked_for(folder):
    write("a.jsonl", [{"id": number} for number in range(9)])
    Path("spoils.py").write_text(
        "def f(raw):\n    open('a.jsonl', 'a').write('no JSON')\n    raise KeyError('id')\n"
    )
    with pytest.raises(DataError, match=r"a.jsonl has changed while it was prepared"):
        prepare(ask(sources=["a.jsonl"], map="spoils.py:f"), print, workers=1)


@pytest.mark.process
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "jsonl"])
def test_a_source_that_is_removed_meanwhile_is_not_called_damaged(suffix, folder):
    for name in "ab":
        table, path = pa.table({"x": range(100)}), f"{name}.{suffix}"
        if suffix == "parquet":
            pq.write_table(table, path)
        elif suffix == "arrow":
            with pa.ipc.new_file(path, table.schema) as file:
                file.write_table(table)
        else:
            write(path, table.to_pylist())
    Path("removes.py").write_text(
        f"import pathlib\ndef f(r):\n    pathlib.Path('b.{suffix}').unlink(True)\n    return r\n"
    )
    sources = [f"a.{suffix}", f"b.{suffix}"]
    with pytest.raises(DataError, match=rf"b.{suffix} was removed while .* Put it back"):
        prepare(ask(sources=sources, map="removes.py:f"), print, workers=1)


def test_records_that_no_process_has_tried_again_yet_are_tried_by_the_next_command(folder):
    """Their results are kept; and where the records are damaged, made again."""

    class Dies(Here):
        def _try(self, task):
            raise KeyboardInterrupt

    write("a.jsonl", [{"id": number} for number in range(9)])
    asked = ask(sources=["a.jsonl"], map="clean.py:drawn")
    with pytest.raises(KeyboardInterrupt):
        made(asked, Dies)
    (again,) = Path("out/.preparing").glob("*.again")
    again.write_bytes(again.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"again is damaged\. Give the same command again"):
        made(asked)
    with pytest.raises(KeyboardInterrupt):
        made(asked, Dies)
    manifest, job, _ = made(asked)
    assert job.done_before == 1
    fresh, *_ = made(ask(sources=["a.jsonl"], map="clean.py:drawn", to="fresh"))
    assert manifest.sha256 == fresh.sha256


def test_a_pipe_is_no_source(folder):
    os.mkfifo("a.jsonl")
    with pytest.raises(DataError, match="is no plain file"):
        made(ask(sources=["a.jsonl"]))


def test_a_name_that_is_no_text_is_refused(folder):
    Path(os.fsdecode(b"\xff\xfe.jsonl")).write_text('{"id": 1}\n')
    with pytest.raises(DataError, match=r"its name is no UTF-8\. Rename it"):
        made(ask(sources=["*.jsonl"]))


def test_dates_of_a_file_are_times_for_a_split(folder):
    """So that a gap of seven days is seven days."""
    days = [f"2026-01-{day:02}" for day in range(1, 29)]
    Path("a.csv").write_text("when,x\n" + "".join(f"{day},1\n" for day in days))
    made(ask(sources=["a.csv"]))
    times = Shards("out").column("when")
    assert times.tolist() == [datetime.datetime.fromisoformat(day) for day in days]
    request = Request(samples=28, validation=0.25, times=Column("times", times), gap="7d")
    sides = SPLITS["time"](request)
    assert (sides.train.tolist(), sides.validate.tolist()) == ([*range(14)], [*range(21, 28)])


def test_grey_images_of_16_bits_are_scaled(folder):
    Path("images/a").mkdir(parents=True)
    grey = np.array([[0, 1000, 30000, 65535]], np.uint16)
    Image.fromarray(grey).save("images/a/0.png")
    made(ask(sources=["images"]))
    assert Shards("out")[0]["image"][:, 0].tolist() == [[0, 3, 117, 255]] * 3


@pytest.mark.process
def test_a_function_may_go_elsewhere_and_what_it_starts_ends_with_it(folder):
    Path("goes.py").write_text(
        "import os, subprocess\n"
        "def f(raw):\n"
        "    child = subprocess.Popen(['sleep', '3600'])\n"
        f"    open({str(folder / 'pids')!r}, 'a').write(f'{{child.pid}}\\n')\n"
        "    os.chdir('/')\n"
        "    return raw\n"
    )
    for name in "ab":
        write(f"{name}.jsonl", ["{\n", *({"id": number} for number in range(3))])
    found = prepare(ask(sources=["*.jsonl"], map="goes.py:f"), lambda _: None, workers=1)
    assert (found.manifest.samples, found.manifest.bad) == (6, 2)
    pids = [int(line) for line in Path("pids").read_text().split()]
    assert len(pids) >= 6
    while any(map(is_there, pids)):  # a killed process takes a moment to be gone
        time.sleep(0.01)


def is_there(pid):
    """Whether a process runs; one that has ended may wait for its parent to look."""
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def test_a_missing_number_among_fractions_is_not_a_number(folder):
    """As in the columns of Parquet and CSV."""
    write("a.jsonl", [{"x": 0.5, "n": 1}, {"x": None, "n": 2}, {"x": 1, "n": None}])
    manifest, job, _ = made(ask(sources=["a.jsonl"]))
    assert repr(Shards("out").column("x").tolist()) == "[0.5, nan]"
    assert (manifest.bad, job.first_bad[0]) == (
        1,
        "a.jsonl, line 3: column 'n' is None; wanted: a number, an array of numbers, text or bytes",
    )


def test_a_function_that_repeats_itself_for_some_records_only_is_found(folder):
    """Also where the data repeat, as the records that are tried again do not."""
    Path("some.py").write_text(
        "import os\ndef f(raw):\n    return {'x': os.urandom(4).hex() if raw['n'] else '0'}\n"
    )
    write("a.jsonl", [{"n": number % 4} for number in range(3000)])
    with pytest.raises(RecipeError, match="not repeatable"):
        made(ask(sources=["a.jsonl"], map="some.py:f"))


def test_padding_and_truncation_of_a_tokenizer_are_not_in_the_samples(folder):
    tokenizer = Tokenizer(models.WordLevel({"a": 1, "b": 2, "[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=5)
    tokenizer.save("tok.json")
    Path("a.txt").write_text("a b a b a b a\n\nb\n")
    made(ask(sources=["a.txt"], tokens="tok.json", length=4))
    found = [Shards("out")[at]["tokens"].tolist() for at in range(len(Shards("out")))]
    assert found == [[1, 2, 1, 2], [1, 2, 1], [2]]


def test_decimals_become_the_nearest_float(folder):
    values = [decimal.Decimal(number) / 100 for number in range(200)]
    table = pa.table({"x": pa.array(values, pa.decimal128(20, 2))})
    pq.write_table(table, "a.parquet")
    made(ask(sources=["a.parquet"]))
    found = Shards("out").column("x").tolist()
    assert found == [float(value) for value in values]


def test_a_file_that_is_divided_by_semicolons_is_named(folder):
    Path("a.csv").write_text("a;b\n1;2\n")
    with pytest.raises(DataError, match=r"divided by commas.* not by ';'"):
        made(ask(sources=["a.csv"]))


def test_times_of_whole_seconds_with_a_zone_are_times(folder):
    Path("a.csv").write_text("t\n2024-01-01T10:00:00Z\n2024-01-02T10:00:00Z\n")
    made(ask(sources=["a.csv"]))
    assert Shards("out").column("t").tolist()[1] == datetime.datetime(2024, 1, 2, 10)
