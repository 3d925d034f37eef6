"""What is prepared is a function of the raw files and of what is asked for, and nothing else.

Tasks are done here, in this process; `test_prepare_processes.py` has them done by others.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from disks import Syncs
from instep.data.order import key
from instep.data.shards import manifest
from instep.data.shards.dataset import Shards
from instep.data.shards.manifest import Manifest
from instep.data.shards.verify import damaged
from instep.errors import DataError, InstepError, RecipeError, RunError, SpecError
from instep.prepare import function, job, mapping, plan
from instep.prepare.asked import Asked
from instep.prepare.folder import Folder
from instep.prepare.job import Job
from instep.prepare.messages import Done, Map, Setup, Task
from instep.prepare.prepare import prepare
from instep.prepare.task import Doer

FUNCTIONS = """
import random

def record(raw):
    if raw["id"] % 7 == 3:
        return None
    if raw["id"] % 50 == 9:
        raise ValueError("a nine")
    return {"id": raw["id"], "x": [raw["id"] / 2] * 3, "user": f"u{raw['id'] % 11}"}

def several(raw):
    return [{"id": raw["id"], "part": part} for part in range(raw["id"] % 3)]

def yielding(raw):
    for part in range(2):
        if raw["id"] == 7 and part:
            raise ValueError("a seven")
        yield {"id": raw["id"], "part": part}

def drawn(raw):
    return {"id": raw["id"], "x": random.random()}

def changing(raw, seen=[]):
    seen.append(raw)
    return {"x": len(seen)}

def failing(raw):
    return {"x": raw["nothing"]}

def misfit(raw):
    return {"x": 1.5 if raw["id"] > 5 else raw["id"]} if raw["id"] != 8 else {"y": 1}

def session(samples):
    return {"user": samples[0]["user"], "n": len(samples), "ids": [s["id"] for s in samples]}
"""


class Here:
    """A crew of one, in this process; the second try of records is another `Doer`'s."""

    def __init__(self, setup: Setup) -> None:
        self._doers = [Doer(setup, lambda *_: None) for _ in range(2)]
        self.tasks: list[Task] = []

    def do(self, tasks: Iterable[Task], repeat=lambda _: None, again=()) -> Iterator[Done]:
        """As `Crew.do`, last task first: order is of no meaning."""
        for task in again:
            self._try(task)
        for task in reversed(list(tasks)):
            self.tasks.append(task)
            done = self._doers[0].do(task)
            if (task := repeat(done)) is not None:
                self._try(task)
            yield done

    def _try(self, task: Task) -> None:
        if text := self._doers[1].do(task).value:
            raise RecipeError(f"not repeatable: {text}")


@pytest.fixture
def raw(tmp_path, monkeypatch):
    """A folder with raw files and functions, in which commands are given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "SMALLEST", 2000)  # so that small files have several pieces
    Path("clean.py").write_text(FUNCTIONS)
    for name, count in (("a", 200), ("b", 3), ("c", 150)):
        lines = [json.dumps({"id": 1000 * (name == "c") + i, "name": name}) for i in range(count)]
        if name == "a":
            lines[20] = '{"id":'
        Path(f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def ask(**options) -> Asked:
    """What is asked for in these tests, if nothing else is said."""
    sources = options.pop("sources", ["a.jsonl", "b.jsonl", "c.jsonl"])
    return Asked(**{"sources": sources, "to": "out", "shard_bytes": 4000, **options})


def made(asked: Asked, crew: type[Here] = Here) -> tuple[Manifest, Job, Here]:
    """Prepare in this process."""
    folder = Folder(Path(asked.to).absolute())
    with folder.held():
        folder.clean()
        here = crew(Setup(asked, str(folder.work)))
        job = Job(asked, folder, plan.files_of(asked), here, 1, lambda _: None)
        manifest = job.run()
        folder.remove_others(manifest, job.kept())
    assert damaged(folder.path, manifest) == []
    return manifest, job, here


def plain_read(*names: str) -> list[dict]:
    """The records, by a loop over lines."""
    lines = [line for name in names for line in Path(f"{name}.jsonl").read_text().splitlines()]
    return [json.loads(line) for line in lines if line != '{"id":']


def test_samples_are_those_of_a_plain_loop_over_the_records(raw):
    manifest, job, _ = made(ask(map="clean.py:record"))
    wanted = [r for r in plain_read("a", "b", "c") if r["id"] % 7 != 3 and r["id"] % 50 != 9]
    dataset = Shards("out")
    assert dataset.column("id").tolist() == [record["id"] for record in wanted]
    assert dataset.column("user") == [f"u{record['id'] % 11}" for record in wanted]
    assert dataset[5]["x"].tolist() == [wanted[5]["id"] / 2] * 3
    assert len(manifest.shards) > 2
    bad = [json.loads(line) for line in Path("out", manifest.bad_file).read_text().splitlines()]
    nines = [r for r in plain_read("a", "b", "c") if r["id"] % 50 == 9 and r["id"] % 7 != 3]
    assert manifest.bad == len(bad) == 1 + len(nines)
    assert bad[0]["where"] == "a.jsonl, line 10"
    assert bad[1]["where"] == "a.jsonl, line 21"
    assert job.first_bad[0] == "a.jsonl, line 10: a nine"


def test_shards_are_flushed_to_the_disk_before_the_manifest_has_its_name(raw, monkeypatch):
    syncs, there = Syncs(monkeypatch), []
    write = job.write_manifest

    def watched(path, kept):
        there.extend(syncs.done(path / shard.file) for shard in kept.shards)
        write(path, kept)

    monkeypatch.setattr(job, "write_manifest", watched)
    made(ask(map="clean.py:record"))
    assert len(there) > 2
    assert all(there)
    assert syncs.first(raw / "out" / manifest.NAME)


def test_records_are_samples_without_a_function(raw):
    made(ask(sources=["b.jsonl"]))
    assert [Shards("out")[at]["name"] for at in range(3)] == ["b"] * 3


def test_a_record_may_give_several_samples(raw):
    made(ask(map="clean.py:several"))
    wanted = [(r["id"], p) for r in plain_read("a", "b", "c") for p in range(r["id"] % 3)]
    dataset = Shards("out")
    found = zip(dataset.column("id").tolist(), dataset.column("part").tolist(), strict=True)
    assert list(found) == wanted


def test_a_function_may_yield_samples_and_a_record_counts_as_a_whole(raw):
    _, job, _ = made(ask(map="clean.py:yielding"))
    wanted = [(r["id"], p) for r in plain_read("a", "b", "c") if r["id"] != 7 for p in range(2)]
    dataset = Shards("out")
    found = zip(dataset.column("id").tolist(), dataset.column("part").tolist(), strict=True)
    assert list(found) == wanted
    assert job.first_bad[0] == "a.jsonl, line 8: a seven"


def test_draws_depend_on_seed_file_and_record_alone(raw):
    first, _, _ = made(ask(map="clean.py:drawn"))
    values = Shards("out").column("x")
    assert len(set(values.tolist())) == len(values)
    again, _, _ = made(ask(map="clean.py:drawn", to="again", shard_bytes=900))
    assert again.sha256 == first.sha256
    other, _, _ = made(ask(map="clean.py:drawn", to="other", seed=1))
    assert other.sha256 != first.sha256
    made(ask(map="clean.py:drawn", to="alone", sources=["c.jsonl"]))
    assert Shards("alone").column("x").tolist() == values[-150:].tolist()


def test_a_function_that_gives_other_samples_again_is_named_with_the_record(raw):
    with pytest.raises(RecipeError, match=r"not repeatable: .*, line"):
        made(ask(map="clean.py:changing"))


def test_one_record_of_each_block_is_made_twice(raw, monkeypatch):
    """Drawn within the block; and the first of all."""
    monkeypatch.setattr(plan, "SMALLEST", 1 << 20)  # one task
    monkeypatch.setattr(function, "ONE_IN", 20)
    places, again = [], mapping.Notices.try_again

    def noted(notes, piece, place, kept, digest):
        places.append(place)
        again(notes, piece, place, kept, digest)

    monkeypatch.setattr(mapping.Notices, "try_again", noted)
    made(ask(sources=["c.jsonl"], map="clean.py:several"))
    wanted = {0, *(20 * block + key(function._OF_TRIALS, block) % 20 for block in range(8))}
    assert len(set(places)) == len([n for n in wanted if n < 150]) > 6


def test_a_function_that_raises_ends_the_command_with_the_record_and_its_line(raw):
    with pytest.raises(RecipeError) as caught:
        made(ask(sources=["b.jsonl"], map="clean.py:failing"))
    text = str(caught.value)
    assert text.startswith("b.jsonl, line 1: failing raised KeyError: 'nothing' (")
    assert "clean.py:28 in failing). A function that raises ValueError leaves" in text


def test_columns_widen_over_tasks_and_what_does_not_fit_is_bad(raw):
    manifest, job, _ = made(ask(map="clean.py:misfit"))
    assert str(manifest.columns[0]) == "float64"
    assert job.first_bad[0].startswith("a.jsonl, line 9: the sample has no column 'x' and a column")
    wanted = [1.5 if r["id"] > 5 else r["id"] for r in plain_read("a", "b", "c") if r["id"] != 8]
    assert Shards("out").column("x").tolist() == wanted


def test_the_type_of_a_csv_column_may_be_said(raw):
    Path("t.csv").write_text("a,b\n1,2\n3,4\n")
    made(ask(sources=["t.csv"], types={"b": "float64"}))
    assert [str(column) for column in Shards("out").manifest.columns] == ["int64", "float64"]
    with pytest.raises(SpecError, match="no source is one"):
        made(ask(sources=["b.jsonl"], types={"b": "float64"}, to="other"))


def test_bad_records_end_the_command_if_asked(raw):
    with pytest.raises(DataError, match=r"a\.jsonl, line 10: a nine\. To leave such records out"):
        made(ask(map="clean.py:record", unreadable="stop"))


@pytest.mark.parametrize(
    ("name", "lines", "options", "refused"),
    [
        ("other columns", ['{"z": 1}'] * 2, {}, "all 2 records"),
        ("in several pieces", ['{"z": 1}'] * 900, {}, "all 900 records"),
        ("no JSON", ["{"] * 3, {}, "all 3 records"),
        (
            "by a function",
            ['{"id": 9}', '{"id": 109}'],
            {"map": "clean.py:record"},
            "all 2 records",
        ),
        ("left out if asked", ["{"] * 3, {"unreadable": "skip"}, ""),
        ("a record alone", ["{"], {}, ""),
        ("in some of its pieces", ['{"id": 5, "name": "d"}'] * 200 + ['{"z": 1}'] * 300, {}, ""),
        ("None for another", ['{"id": 9}', '{"id": 3}'], {"map": "clean.py:record"}, ""),
    ],
)
def test_a_file_of_bad_records_alone_is_refused(raw, name, lines, options, refused):
    Path("d.jsonl").write_text("\n".join(lines) + "\n")
    asked = ask(sources=["*.jsonl"], **options)
    if refused:
        with pytest.raises(DataError, match=rf"{refused} of d.jsonl .* d.jsonl, line 1: .*skip;"):
            made(asked)
        asked = msgspec.structs.replace(asked, unreadable="skip")
    manifest, job, _ = made(asked)
    assert job.done_before == (job.tasks if refused else 0)
    good = sum("name" in line for line in lines)
    assert manifest.samples - good == made(ask(to="plain", **options))[0].samples


def test_bad_records_are_raw_files_with_their_text(raw):
    first = '{"id": 0, "name": "a", "more": [0.5, null]}'
    Path("d.jsonl").write_bytes(
        f'{first}\n{{"id": \n[1]\n"\xe9"\n{"9" * 70_000}\n'.encode("latin1")
    )
    Path("clean.py").write_text("def text(raw):\n    return raw | {'record': raw['record'][:20]}\n")
    manifest, _, _ = made(ask(sources=["a.jsonl", "d.jsonl"], unreadable="skip"))
    again, _, _ = made(ask(sources=[f"out/{manifest.bad_file}"], to="bad", map="clean.py:text"))
    assert (again.samples, again.bad) == (manifest.bad, 0) == (6, 0)
    bad = Shards("bad")
    assert bad.column("line").tolist() == [21, 1, 2, 3, 4, 5]
    assert bad.column("where")[-1] == "d.jsonl, line 5"
    assert bad.column("length").tolist() == [
        6,
        len(first.replace(" ", "")),
        7,
        3,
        3,
        70_000,
    ]
    texts = ['{"id":', '{"id":0,"name":"a","', '{"id": ', "[1]", '"\ufffd"', "9" * 20]
    assert bad.column("record") == texts


def test_samples_of_a_key_are_put_together_in_the_order_of_sources(raw):
    asked = ask(map="clean.py:record", key="user", reduce="clean.py:session")
    manifest, _, _ = made(asked)
    wanted: dict[str, list[int]] = {}
    for record in plain_read("a", "b", "c"):
        if record["id"] % 7 != 3 and record["id"] % 50 != 9:
            wanted.setdefault(f"u{record['id'] % 11}", []).append(record["id"])
    dataset = Shards("out")
    found = {dataset[at]["user"]: dataset[at]["ids"].tolist() for at in range(len(dataset))}
    assert found == wanted
    assert manifest.bad == made(ask(map="clean.py:record", to="plain"))[0].bad


def test_a_shuffle_is_a_permutation_that_only_the_seed_decides(raw):
    plain, _, _ = made(ask(map="clean.py:record", to="plain"))
    first, _, _ = made(ask(map="clean.py:record", shuffle=True))
    other, _, _ = made(ask(map="clean.py:record", shuffle=True, shard_bytes=2000, to="small"))
    ids = Shards("out").column("id").tolist()
    assert ids != sorted(ids)
    assert sorted(ids) == sorted(Shards("plain").column("id").tolist())
    assert first.sha256 == other.sha256 != plain.sha256
    assert first.bad == plain.bad
    ranks = np.argsort(np.argsort(ids))
    assert abs(np.corrcoef(ranks, np.arange(len(ids)))[0, 1]) < 0.15  # 3 deviations of chance


def test_nothing_is_done_again_and_only_what_has_changed(raw):
    first, job, _ = made(ask(map="clean.py:record"))
    _, again, here = made(ask(map="clean.py:record"))
    assert again.done_before == again.tasks == job.tasks
    assert [type(task).__name__ for task in here.tasks] == []
    with open("c.jsonl", "a") as file:
        file.write('{"id": 5000, "name": "c"}\n')
    then, job, here = made(ask(map="clean.py:record"))
    read = [task for task in here.tasks if isinstance(task, Map)]
    assert {piece.path for task in read for piece in task.pieces} == {"c.jsonl"}
    assert then.samples == first.samples + 1
    assert not [name for name in Path("out").iterdir() if name.name.startswith(".")]
    Path("clean.py").write_text(FUNCTIONS.replace("% 7 == 3", "% 7 == 4"))
    _, job, _ = made(ask(map="clean.py:record"))
    assert job.done_before == 0


@pytest.mark.parametrize(
    "options", [{"shuffle": True}, {"key": "user", "reduce": "reduce.py:session"}]
)
def test_only_what_has_changed_is_mapped_again_where_samples_are_put_into_another_order(
    options, raw
):
    Path("reduce.py").write_text(FUNCTIONS)
    options["map"] = "clean.py:record"
    made(ask(**options))
    _, again, here = made(ask(**options))
    assert again.done_before == again.tasks
    assert here.tasks == []
    with open("c.jsonl", "a") as file:
        file.write('{"id": 5000, "name": "c"}\n')
    then, _, here = made(ask(**options))
    assert {p.path for t in here.tasks if isinstance(t, Map) for p in t.pieces} == {"c.jsonl"}
    assert then.sha256 == made(ask(to="fresh", **options))[0].sha256
    assert {path.suffix for path in Path("out/.preparing").iterdir()} <= {
        "",
        ".done",
        ".arrow",
        ".bad",
    }
    Path("reduce.py").write_text(FUNCTIONS.replace('"n": len', '"count": len'))
    _, job, _ = made(ask(**options))
    assert job.done_before == job.tasks
    made(ask(keep=False, **options))
    assert not Path("out/.preparing").exists()


def test_each_byte_of_a_folder_is_verified(raw):
    manifest, _, _ = made(ask(map="clean.py:record"))
    names = manifest.shards[0].file, manifest.bad_file, manifest.tasks, manifest.blocks
    for path in [Path("out", name) for name in names]:
        good = path.read_bytes()
        for at in {*range(0, len(good), 131), len(good) - 9}:
            path.write_bytes(good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :])
            assert path.name in "".join(damaged(Path("out"), manifest)), (path.name, at)
        path.write_bytes(good)
    assert damaged(Path("out"), manifest) == []


def test_bad_records_of_older_predictions_are_no_damage(raw):
    """Their file was named by the samples."""
    manifest, _, _ = made(ask(map="clean.py:record"))
    older = replace(manifest, bad_file=f"bad-{manifest.sha256[:16]}.jsonl")
    path = Path("out", manifest.bad_file).rename(Path("out", older.bad_file))
    assert damaged(Path("out"), older) == []
    path.unlink()
    assert damaged(Path("out"), older) == [f"{path} is missing, or is not what was written"]


def test_a_shard_that_was_cut_short_is_made_again(raw):
    first, _, _ = made(ask(map="clean.py:record"))
    path = Path("out", first.shards[1].file)
    path.write_bytes(path.read_bytes()[:-100])
    again, _, _ = made(ask(map="clean.py:record"))
    assert again.sha256 == first.sha256


def test_statistics_do_not_depend_on_the_order_in_which_tasks_are_done(raw):
    first, _, _ = made(ask(map="clean.py:record"))
    ids = Shards("out").column("id")
    assert first.statistics["id"]["mean"] == pytest.approx(ids.mean(), rel=1e-12)
    assert first.statistics["user"]["classes"]["u0"] == Shards("out").column("user").count("u0")


def test_a_disk_that_is_too_small_is_refused_before_it_is_full_and_what_is_done_stays(
    raw, monkeypatch
):
    usage = SimpleNamespace(free=3000)
    monkeypatch.setattr("instep.prepare.job.shutil.disk_usage", lambda path: usage)
    with pytest.raises(RunError, match=r"has 3\.0 kB left, and the shards need about .* more"):
        made(ask(map="clean.py:record"))
    done = len(list(Path("out/.preparing").glob("*.done")))
    assert done >= 4
    monkeypatch.undo()
    monkeypatch.chdir(raw)
    monkeypatch.setattr(plan, "SMALLEST", 2000)
    _, job, _ = made(ask(map="clean.py:record"))
    assert job.done_before == done


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ({"shuffle": True}, 2),
        ({"key": "user", "reduce": "clean.py:session"}, 1),
    ],
)
def test_passes_over_a_disk_that_is_too_small_for_them_are_not_begun(
    raw, monkeypatch, options, passes
):
    _, job, _ = made(ask(map="clean.py:record", to="plain"))
    size = sum(result.bytes for result in job._results)
    for free, begun in ((passes * size - 1, False), (passes * size, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("instep.prepare.job.shutil.disk_usage", lambda _, usage=usage: usage)
        if begun:
            made(ask(map="clean.py:record", **options))
            continue
        with pytest.raises(RunError, match=r"need about .* more\. Free some"):
            made(ask(map="clean.py:record", **options))
        assert not list(Path("out/.preparing").glob("*.sorted"))


def test_a_folder_is_prepared_by_one_command_at_a_time_and_the_next_keeps_its_own(raw):
    folder, other = Folder(raw / "out"), Folder(raw / "out")
    with folder.held():
        with pytest.raises(RunError, match="another command prepares"), other.held():
            pass
        folder._remove_work()  # as at the end
        with other.held():
            (other.work / "a.done").touch()  # the next has begun before the first has ended
    assert (other.work / "a.done").exists()


WRONG = {
    "no file": ({"map": "clean.p:record"}, "there is no file 'clean.p'"),
    "no function": ({"map": "clean.py"}, "wanted is FILE.py:FUNCTION"),
    "another function": ({"map": "clean.py:recrod"}, "has no function 'recrod'"),
    "map and tokens": ({"map": "clean.py:record", "tokens": "bytes"}, "--map and --tokens"),
    "no tokenizer": ({"tokens": "tok.json"}, "there is no such file"),
    "length alone": ({"length": 5}, "give --tokens"),
    "key alone": ({"key": "user"}, "--key and --reduce need each other"),
    "key and shuffle": (
        {"key": "id", "reduce": "clean.py:session", "shuffle": True},
        "--shuffle alone",
    ),
    "key of no column": ({"key": "usr", "reduce": "clean.py:session"}, "no column has that name"),
    "no source": ({"sources": ["z*.jsonl"]}, "z*.jsonl"),
    "key of lists": ({"map": "clean.py:record", "key": "x", "reduce": "clean.py:session"}, "float"),
    "another reduce": ({"key": "id", "reduce": "clean.py:sesion"}, "has no function 'sesion'"),
    "no column of CSV": (
        {"sources": ["d.csv"], "types": {"z": "int64"}},
        "no column is called 'z'",
    ),
    "no type": ({"sources": ["d.csv"], "types": {"x": "int"}}, "there is no type 'int'"),
    "types of JSON": ({"types": {"x": "int64"}}, "--type is for columns of CSV"),
    "no format": ({"sources": ["clean.py"]}, "its format is not known"),
    "one image": ({"sources": ["d.png"]}, "is one image"),
    "a file": ({"to": "d.csv"}, "is a file"),
    "a folder of others": ({"to": "full"}, "has files that instep did not make"),
    "a seed below 0": ({"seed": -1}, "--seed -1"),
    "into the source": ({"sources": ["a.jsonl"], "to": "."}, "Name another folder"),
}

MADE = ("out", "__pycache__")


@pytest.mark.process
@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_option_is_one_sentence_with_one_exit_code_and_leaves_nothing(name, raw):
    options, wanted = WRONG[name]
    Path("d.csv").write_text("x\n1\n")
    Path("d.png").touch()
    Path("full").mkdir()
    Path("full/a.txt").touch()
    before = sorted(raw.iterdir())
    with pytest.raises(InstepError) as caught:
        prepare(ask(**options), lambda _: None, workers=1)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == SpecError.exit_code == 2
    assert [path for path in sorted(raw.iterdir()) if path.name not in MADE] == before
