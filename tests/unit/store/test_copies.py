"""Copies of checkpoints: what is restored is whole and the newest, wherever copying was cut off."""

import hashlib
import json
import shutil
import time
import zlib

import msgspec
import pytest
import torch

from instep.data.shards.urls import download
from instep.errors import CheckpointError, DataError, RunError, SpecError
from instep.job import file as spec_file
from instep.state.files.manifest import published
from instep.state.intact import check
from instep.state.retention import METRICS, Best
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot
from instep.store.copies import claim, layout, records
from instep.store.copies.follow import END_S, CopyFollower
from instep.store.copies.restore import restore
from instep.store.copies.upload import Copies
from instep.store.folder import make_run_folder
from loopback_store import LeapingClock, Store, installed


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 6)
    monkeypatch.setattr(layout, "BLOCK", 1000)
    monkeypatch.setattr(records, "BLOCK", 1000)
    installed(tmp_path)
    store = Store()
    yield store
    store.close()


class Run:
    """A run that saves, as its files are; and its copies."""

    def __init__(self, folder, to, **spec):
        table = {"name": "net", "recipe": "a.py:recipe", "checkpoint": {"copy_to": to, **spec}}
        self.job = spec_file.build(table, source="a test")
        self.path = make_run_folder(folder / "runs", self.job, named=False)
        self.url, self.told = layout.base_of(self.job, self.path), []
        self.spec = self.job.checkpoint
        self.follow_anew()

    def follow_anew(self, now=time.monotonic):
        copies = Copies(self.path, self.url, self.spec)
        self.follower = CopyFollower(copies, self.url, self._tell, now)

    def _tell(self, name, **fields):
        if name != "copying":
            self.told.append((name, fields))

    def save(self, step, value=0.0, size=700):
        """Saves a checkpoint as a worker does, when the records have grown."""
        for name in ("events.jsonl", "ledger.bin", "steps.bin", "steps.crc", "contents-0.bin"):
            with open(self.path / name, "ab") as file:
                file.write(b"".join(b"%08d %s\n" % (step, name.encode()) for _ in range(45)))
        ledger = (self.path / "ledger.bin").read_bytes()
        facts = {"ledger_bytes": len(ledger), "ledger_crc32": zlib.crc32(ledger)}
        facts[METRICS] = {"loss": value}
        best = Best.by(self.spec) if self.spec.keep_best else None
        keep = {"keep_last": self.spec.keep_last, "keep_every": self.spec.keep_every}
        writer = CheckpointWriter(self.path / "checkpoints", best=best, **keep)
        tensors = {"model": {"a": torch.full((size,), float(step))}, "own": {"b": torch.ones(step)}}
        writer.save(Snapshot(step=step, tensors=tensors, facts=facts))
        writer.finish()
        assert [type(each).__name__ for each in writer.poll()] == ["Saved"]

    def copy(self):
        self.follower.look()
        return self.follower.failing

    @property
    def newest(self):
        return next(published(self.path / "checkpoints"))[1]

    def restored(self, tmp_path, say=lambda _: None):
        """The run folder that the copies give now."""
        target = tmp_path / "restored"
        shutil.rmtree(target, ignore_errors=True)
        return restore(self.url, target, say)


def step_in(folder):
    """The step of a restored folder, all of which is what the run has written."""
    ((step, checkpoint),) = published(folder / "checkpoints")
    facts = check(checkpoint).facts
    ledger = (folder / "ledger.bin").read_bytes()
    assert len(ledger) == facts["ledger_bytes"]
    assert zlib.crc32(ledger) == facts["ledger_crc32"]
    return step


def check_none_is_half_there(objects):
    """What has its last object has all others."""
    for name in [name for name in objects if name.endswith("copy.json")]:
        place, records = (
            name.rpartition("/")[0],
            json.loads(objects[name].split(b"\n")[0])["records"],
        )
        needed = {
            f"{place}/{file}" for file in json.loads(objects[f"{place}/manifest.json"])["files"]
        }
        base = place.rpartition("/")[0]
        needed |= {f"{base}/records/{each[0]}" for blocks in records.values() for each in blocks}
        assert needed <= objects.keys(), name


def check_records(folder, run):
    names = (*layout.RESUMED_FROM, "contents-0.bin")
    for name in [name for name in names if (run.path / name).exists()]:
        assert (run.path / name).read_bytes().startswith((folder / name).read_bytes())
        assert (folder / name).stat().st_size > 0


@pytest.mark.parametrize("fault", ["503", "stall", "cut"])
def test_whatever_the_store_does_the_newest_checkpoint_is_copied_in_the_end(
    store, tmp_path, monkeypatch, fault
):
    if fault == "stall":
        LeapingClock(store, monkeypatch)
    run = Run(tmp_path, store.loop)
    store.faults = lambda _, __, number: fault if number % 9 == 4 else ""
    for step in (10, 20, 30):
        run.save(step)
        while run.copy():
            pass
    store.faults = lambda *_: ""
    folder = run.restored(tmp_path)
    assert step_in(folder) == 30
    check_records(folder, run)
    assert [fields["step"] for name, fields in run.told if name == "checkpoint_copied"] == [
        *(10, 20, 30)
    ]


def test_wherever_copying_is_cut_off_one_of_the_two_newest_is_restored_whole(store, tmp_path):
    run, moments = Run(tmp_path, store.loop, keep_last=1), []
    run.save(10)
    assert not run.copy()
    store.after = lambda method, _: moments.append(dict(store.objects)) if method != "GET" else 0
    run.save(20)
    assert not run.copy()
    store.after, steps = lambda *_: None, []
    for moment in moments:
        check_none_is_half_there(moment)
        store.objects = moment
        steps.append(step_in(run.restored(tmp_path)))
    assert steps == sorted(steps)
    assert {*steps} == {10, 20}
    for moment in moments[:: len(moments) // 8]:  # and it goes on from there
        store.objects = dict(moment)
        run.follow_anew()
        assert not run.copy()
        assert step_in(run.restored(tmp_path)) == 20


@pytest.mark.parametrize(
    "keep", [{"keep_last": 1}, {"keep_last": 3}, {"keep_every": 20}, {"keep_best": 2}]
)
def test_copies_are_kept_as_checkpoints_are_and_nothing_else_is_left(store, tmp_path, keep):
    run = Run(tmp_path, f"{store.loop}/bucket", **keep)
    for step, value in ((10, 3.0), (20, 1.0), (30, 2.0), (40, 5.0), (50, 4.0)):
        run.save(step, value)
        if step == 40:
            run.follow_anew()  # knows what is there
        assert not run.copy()
    base = run.url.removeprefix(f"{store.loop}/")
    names = {name.removeprefix(f"{base}/") for name in store.objects}
    copied = {layout.step_of(name.partition("/")[0]) for name in names} - {None}
    assert copied == {step for step, _ in published(run.path / "checkpoints")}
    pages = [
        json.loads(o.split(b"\n")[0]) for n, o in store.objects.items() if n.endswith("copy.json")
    ]
    blocks = {each[0] for page in pages for every in page["records"].values() for each in every}
    assert {name for name in names if name.startswith("records/")} == {
        f"records/{b}" for b in blocks
    }


def test_a_bucket_that_does_not_exist_is_said_and_not_made(store, tmp_path):
    run = Run(tmp_path, store.loop)
    run.save(10)
    store.faults = lambda method, *_: "404" if method == "PUT" else ""
    assert run.copy()
    assert [name for name, _ in run.told] == ["warning"]


def test_while_a_store_is_away_a_newer_checkpoint_takes_the_place_of_one_that_waits(
    store, tmp_path
):
    run = Run(tmp_path, store.loop, keep_last=9, keep_every=40)
    store.faults = lambda *_: "503"
    pauses = []
    for step in (10, 20, 40, 50, 60):
        run.save(step)
        assert run.copy()
        pauses.append(run.follower.pause_s)
    assert [name for name, _ in run.told] == ["warning"]
    assert "cannot be copied to loop://" in run.told[0][1]["text"]
    assert pauses == [1, 2, 4, 8, 16]
    store.faults = lambda *_: ""
    assert not run.copy()
    steps = [fields.get("step") for name, fields in run.told[1:]]
    assert steps == [None, 60, 40]  # 40 is kept for good
    assert [name for name, _ in run.told[1:]] == ["copies_resumed", *2 * ["checkpoint_copied"]]


def test_after_a_run_copying_ends_when_nothing_has_moved_for_a_minute(store, tmp_path):
    run, later_s = Run(tmp_path, store.loop), [0.0]
    run.follow_anew(lambda: time.monotonic() + later_s[0])
    run.save(10)
    store.faults = lambda *_: "503"
    assert run.copy()
    assert not run.follower.gives_up()
    later_s[0] = 2 * END_S
    assert run.follower.gives_up()
    name, fields = run.told[-1]
    assert (name, fields["text"][:31]) == ("failed", "the newest checkpoint is not at")


def lost(checkpoint):
    shutil.rmtree(checkpoint)


def damaged(checkpoint):
    file = checkpoint / "manifest.json"
    file.write_bytes(file.read_bytes().replace(b"0", b"1"))


def unreadable(checkpoint):
    (checkpoint / "manifest.json").unlink()
    (checkpoint / "manifest.json").mkdir()


@pytest.mark.parametrize("anew", [False, True])
@pytest.mark.parametrize("harm", [lost, damaged, unreadable])
def test_a_newest_checkpoint_that_is_lost_here_is_kept_elsewhere_until_another_is_copied(
    store, tmp_path, harm, anew
):
    run = Run(tmp_path, store.loop)
    for step in (10, 20):
        run.save(step)
        run.copy()
    harm(run.newest)
    if anew:
        run.follow_anew()
    assert run.copy() == (harm is not lost)
    assert step_in(run.restored(tmp_path)) == 20
    if harm is not lost:
        run.copy()
        assert [name for name, _ in run.told].count("warning") == 1
        shutil.rmtree(run.newest)  # as resuming does
    run.save(15)
    assert not run.copy()
    assert step_in(run.restored(tmp_path)) == 15
    assert not [name for name in store.objects if "step-00000020" in name]


def test_when_a_run_goes_back_there_is_a_whole_copy_at_each_moment(store, tmp_path):
    run, moments = Run(tmp_path, store.loop, keep_last=1), []
    for step in (10, 20):
        run.save(step)
        run.copy()
    shutil.rmtree(run.newest)
    store.after = lambda method, _: moments.append(dict(store.objects)) if method != "GET" else 0
    run.save(15)
    assert not run.copy()
    store.after, steps = lambda *_: None, set()
    for moment in moments:
        store.objects = moment
        steps.add(step_in(run.restored(tmp_path)))
    assert steps == {20, 15}


def test_the_best_of_steps_that_a_run_went_back_from_do_not_count(store, tmp_path):
    run = Run(tmp_path, store.loop, keep_last=3, keep_best=1)
    for step, value in ((10, 3.0), (20, 2.0), (30, 1.0)):
        run.save(step, value)
        assert not run.copy()
    for _ in (30, 20):
        shutil.rmtree(run.newest)
    run.spec = msgspec.structs.replace(run.spec, keep_last=1)
    run.follow_anew()
    store.asked.clear()
    run.save(15, 4.0)
    assert not run.copy()
    assert steps_with_objects(store) == {10, 15}
    assert not [asked for asked in store.asked if asked.startswith("PUT") and "00000010-" in asked]


def test_what_is_kept_for_good_is_copied_though_the_newest_cannot_be_read(store, tmp_path):
    run = Run(tmp_path, store.loop, keep_every=20)
    for step in (20, 30):
        run.save(step)
    damaged(run.newest)
    assert run.copy()
    assert "manifest.json" in run.told[-1][1]["text"]
    assert steps_with_objects(store) == {20}
    assert step_in(run.restored(tmp_path)) == 20


def steps_with_objects(store):
    return {layout.step_of(name.split("/")[1]) for name in store.objects} - {None}


def test_of_copies_that_did_not_come_to_their_end_nothing_is_left(store, tmp_path):
    run = Run(tmp_path, store.loop, keep_last=1)
    store.faults = lambda method, name, _: "503" if name.endswith("copy.json") else ""
    run.save(10)
    assert run.copy()
    assert steps_with_objects(store) == {10}
    store.faults = lambda *_: ""
    run.save(20)
    assert not run.copy()
    assert steps_with_objects(store) == {20}
    for name in [name for name in store.objects if name.endswith("copy.json")]:
        del store.objects[name]  # the machine was lost before it was written
    run.save(30)
    run.follow_anew()
    assert not run.copy()
    assert steps_with_objects(store) == {30}


def test_a_copy_whose_end_could_not_be_seen_counts_and_is_not_written_with_other_bytes(
    store, tmp_path
):
    run, pages = Run(tmp_path, store.loop, keep_last=2), set()
    run.save(10)

    def kept(method, name):
        if method == "PUT" and name.endswith("copy.json"):
            pages.add(store.objects[name])

    store.after = kept
    store.faults = lambda method, name, _: (
        "503" if method == "HEAD" and name.endswith("copy.json") else ""
    )
    assert run.copy()
    with open(run.path / "events.jsonl", "ab") as file:
        file.write(b"grown\n")
    assert run.copy()
    store.faults = lambda *_: ""
    with open(run.path / "events.jsonl", "ab") as file:
        file.write(b"grown again\n")
    assert not run.copy()
    assert len(pages) == 1
    assert step_in(run.restored(tmp_path)) == 10


def test_what_a_copy_of_another_format_needs_is_left(store, tmp_path):
    run = Run(tmp_path, store.loop, keep_last=1)
    run.save(10)
    assert not run.copy()
    (name,) = [name for name in store.objects if name.endswith("copy.json")]
    table = json.loads(store.objects[name].split(b"\n")[0]) | {"format": 999}
    line = json.dumps(table).encode() + b"\n"
    store.objects[name] = line + hashlib.sha256(line).hexdigest().encode() + b"\n"
    before = {each for each in store.objects if f"/{claim.FOLDER}/" not in each}
    run.follow_anew()
    for step in (20, 30):
        run.save(step)
        (run.path / "run.id").write_text((run.path / "run.id").read_text() + " ")
        assert not run.copy()
    assert before <= set(store.objects)


def test_at_the_end_a_newest_checkpoint_without_a_copy_is_said(store, tmp_path):
    def told_at_the_end(harm):
        run = Run(tmp_path / harm.__name__, store.loop)
        run.save(10)
        harm(run)
        run.follower.run_is_over()
        assert not run.copy()
        assert run.follower.gives_up()
        return [(name, fields.get("text", "")) for name, fields in run.told][-1]

    def nothing(_):
        pass

    def a_file_is_gone(run):
        (run.newest / "model.safetensors").unlink()

    def another_ledger(run):
        (run.path / "ledger.bin").write_bytes(b"x" * (run.path / "ledger.bin").stat().st_size)

    assert told_at_the_end(nothing)[0] == "finished"
    name, text = told_at_the_end(a_file_is_gone)
    assert (name, text[:31]) == ("failed", "the newest checkpoint is not at")
    assert text.endswith("model.safetensors is missing")
    name, text = told_at_the_end(another_ledger)
    assert name == "failed"
    assert "ledger" in text


def test_checkpoints_that_cannot_be_listed_are_said_once_and_are_a_failure_at_the_end(
    store, tmp_path
):
    run, later_s = Run(tmp_path, store.loop), [0.0]
    run.follow_anew(lambda: time.monotonic() + later_s[0])
    (run.path / "checkpoints").write_text("a file")
    for pause_s in (1, 2, 4):
        assert run.copy()
        assert run.follower.pause_s == pause_s
    assert [name for name, _ in run.told] == ["warning"]
    assert "cannot be listed" in run.told[0][1]["text"]
    run.follower.run_is_over()
    later_s[0] = 2 * END_S
    assert run.follower.gives_up()
    assert run.told[-1][0] == "failed"


def test_after_the_run_an_attempt_is_made_for_a_minute_however_long_the_store_was_away(
    store, tmp_path
):
    run, later_s = Run(tmp_path, store.loop), [0.0]
    run.follow_anew(lambda: time.monotonic() + later_s[0])
    run.save(10)
    store.faults = lambda *_: "503"
    assert run.copy()
    later_s[0] = 100 * END_S
    run.follower.run_is_over()
    assert run.copy()
    assert not run.follower.gives_up()
    later_s[0] += 2 * END_S
    assert run.follower.gives_up()


def test_a_copy_of_which_any_object_is_damaged_is_left_aside_for_the_one_before(store, tmp_path):
    run = Run(tmp_path, store.loop)
    run.save(10)
    run.copy()
    before = set(store.objects)
    run.save(20)
    run.copy()
    whole = dict(store.objects)
    for number, name in enumerate(sorted(set(whole) - before)):
        data, said, store.objects = whole[name], [], dict(whole)
        del store.objects[name]
        if number % 3:
            flipped = data[:-9] + bytes([data[-9] ^ 1]) + data[-8:]
            store.objects[name] = [flipped, data[:-2]][number % 3 - 1]
        assert step_in(run.restored(tmp_path, said.append)) == 10, name
        assert "is not whole" in said[0]
        assert said[-1].startswith("step 10 of loop://")


def test_a_checkpoint_that_is_damaged_here_is_not_copied_and_is_said_once(store, tmp_path):
    run = Run(tmp_path, store.loop)
    run.save(10)
    run.copy()
    run.save(20)
    file = run.newest / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    for _ in range(3):
        assert not run.copy()
    assert [f["text"].count("is damaged") for n, f in run.told if n == "warning"] == [1]
    assert steps_with_objects(store) == {10}
    assert step_in(run.restored(tmp_path)) == 10


def test_copies_in_a_folder_are_as_good(tmp_path):
    run = Run(tmp_path, str(tmp_path / "a b" / "copies"))
    run.save(10)
    assert not run.copy()
    (folder,) = (tmp_path / "a b" / "copies").iterdir()
    assert step_in(restore(str(folder), tmp_path / "again", print)) == 10


def test_what_cannot_be_restored_is_one_sentence(store, tmp_path):
    run = Run(tmp_path, f"{store.loop}/bucket")
    with pytest.raises(SpecError, match=r"has no copies .* Give checkpoint\.copy_to of its job"):
        run.restored(tmp_path)
    run.save(10)
    run.copy()
    with pytest.raises(SpecError, match=r"Give one of the runs in it: loop://.*/bucket/net-"):
        restore(f"{store.loop}/bucket", tmp_path / "new", print)
    with pytest.raises(RunError, match=r"is there already. Continue it with instep resume"):
        restore(run.url, run.path, print)
    store.faults = lambda _, name, __: "503" if name.endswith(".safetensors") else ""
    with pytest.raises(DataError, match=r"503.* tried 7 times"):
        run.restored(tmp_path)
    store.faults = lambda *_: ""
    for name in [name for name in store.objects if name.endswith("model.safetensors")]:
        store.objects[name] = b""
    with pytest.raises(CheckpointError, match=r"no copy of a checkpoint is whole. .* other bytes"):
        run.restored(tmp_path)
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".")]


def test_a_store_that_takes_nothing_is_given_up_however_often_bytes_are_handed_to_it(
    store, tmp_path
):
    run = Run(tmp_path, store.loop)
    copies = Copies(run.path, run.url, run.spec)
    copies.look()
    run.save(10)
    store.faults = lambda method, *_: "503" if method == "PUT" else ""
    moved_at = copies.moved_at
    with pytest.raises(OSError, match="503"):
        copies.copy(run.newest)
    assert copies.moved_at == moved_at
