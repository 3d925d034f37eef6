"""Copies of checkpoints: what is restored is whole and the newest, wherever copying was cut off."""

import json
import shutil
import time
import zlib

import pytest
import torch

from instep.data.shards import download
from instep.errors import CheckpointError, DataError, RunError, SpecError
from instep.job import file as spec_file
from instep.state.files.manifest import published
from instep.state.intact import check
from instep.state.retention import METRICS, Best
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot
from instep.store.copies import layout, upload
from instep.store.copies.follow import END_S, CopyFollower
from instep.store.copies.restore import restore
from instep.store.copies.upload import Copies
from instep.store.folder import make_run_folder
from loopback_store import Store, installed


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PAUSES_S", (0.0,) * 6)
    monkeypatch.setattr(layout, "BLOCK", 1000)
    monkeypatch.setattr(upload, "BLOCK", 1000)
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
        self.follower = CopyFollower(
            copies, self.url, lambda name, **fields: self.told.append((name, fields)), now
        )

    def save(self, step, value=0.0):
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
        tensors = {"model": {"a": torch.full((700,), float(step))}, "own": {"b": torch.ones(step)}}
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
        monkeypatch.setattr(download, "STALL_S", 0.5)
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


def test_copies_of_steps_that_a_run_went_back_from_are_removed(store, tmp_path):
    run = Run(tmp_path, store.loop)
    for step in (10, 20):
        run.save(step)
        run.copy()
    shutil.rmtree(run.newest)
    assert not run.copy()
    assert step_in(run.restored(tmp_path)) == 10


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
