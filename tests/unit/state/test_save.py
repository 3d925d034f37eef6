"""Checkpoints are written atomically, one after the other, and deleted in time."""

from __future__ import annotations

import errno
import os
import random
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time

import pytest
import safetensors.torch
import torch
from torch import nn

from disks import Ext4
from instep.errors import CheckpointError
from instep.state.files.manifest import published
from instep.state.files.model_file import check_hash
from instep.state.files.staging import save_model
from instep.state.intact import newest_intact
from instep.state.load import load
from instep.state.save import CheckpointWriter, Saved
from instep.state.snapshot import Snapshot
from instep.system.processes import wait_readable


def snapshot_of(step, size=100):
    """A state in which every part has the step."""
    return Snapshot(
        step=step,
        tensors={
            "model": {"w": torch.full((size,), float(step)), "n": torch.tensor(step)},
            "optimizer": {"m": torch.full((size,), -float(step), dtype=torch.float64)},
        },
        facts={"position": step * 64},
    )


def assert_is_of_step(snapshot, step):
    assert snapshot.step == step
    assert snapshot.facts == {"position": step * 64}
    assert snapshot.tensors["model"]["w"].unique().tolist() == [step]
    assert snapshot.tensors["model"]["n"].item() == step
    assert snapshot.tensors["optimizer"]["m"].unique().tolist() == [-step]


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, *steps, **options):
    writer = CheckpointWriter(folder, **options)
    for step in steps:
        writer.save(snapshot_of(step))
    writer.finish()
    return writer.poll()


def test_where_the_system_gives_no_thread_the_save_is_made_without_one(tmp_path, monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    writer = CheckpointWriter(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        writer.save(snapshot_of(1))
        (first,) = writer.poll()
    writer.save(snapshot_of(2))  # asks for a thread again
    assert writer._worker is not None
    writer.finish()
    (second,) = writer.poll()
    assert [first.step, second.step] == [1, 2]
    for saved in (first, second):
        assert_is_of_step(load(saved.path), saved.step)


def test_one_that_may_not_publish_any_more_leaves_the_checkpoints_as_they_are(tmp_path):
    write(tmp_path, 1)
    (outcome,) = write(tmp_path, 2, may_publish=lambda: False)
    assert isinstance(outcome, CheckpointError)
    assert "step 2 was not saved: another worker saves by now" in str(outcome)
    assert [step for step, _ in published(tmp_path)] == [1]
    write(tmp_path, 3)  # the next writer deletes what was left
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


@pytest.mark.parametrize("harm", [shutil.rmtree, lambda run: run.rename(run.with_name("moved"))])
def test_a_run_folder_that_is_gone_is_not_made_anew_but_a_folder_of_checkpoints_is(tmp_path, harm):
    run = tmp_path / "run"
    run.mkdir()
    writer = CheckpointWriter(run / "checkpoints")
    shutil.rmtree(run / "checkpoints")
    writer.save(snapshot_of(5))
    writer.finish()
    assert [step for step, _ in published(run / "checkpoints")] == [5]
    harm(run)
    writer.save(snapshot_of(6))
    writer.finish()
    _, outcome = writer.poll()
    assert isinstance(outcome, CheckpointError)
    assert "the checkpoint of step 6 was not saved" in str(outcome)
    assert not run.exists()
    with pytest.raises(CheckpointError, match="cannot be kept in"):
        CheckpointWriter(run / "checkpoints")


def test_a_save_is_reported_once_and_loads(tmp_path):
    (tmp_path / "run").mkdir()
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints")
    held_s = writer.save(snapshot_of(5))
    writer.finish()
    (saved,) = writer.poll()
    assert writer.poll() == []
    assert saved.step == 5
    assert saved.path.name == "step-00000005"
    assert saved.size_bytes == sum(path.stat().st_size for path in saved.path.iterdir())
    assert saved.held_s == held_s
    assert held_s > 0
    assert saved.seconds > 0
    assert_is_of_step(load(saved.path), 5)
    assert newest_intact(saved.path.parent)[0] == saved.path
    assert not [t.name for t in threading.enumerate() if t.name.startswith("checkpoint")]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has this policy")
def test_the_thread_that_writes_never_pushes_training_off_its_core(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.save(snapshot_of(1))
    (thread,) = [t for t in threading.enumerate() if t.name.startswith("checkpoint")]
    writer._writing.result()  # the thread is there and waits for more
    assert os.sched_getscheduler(thread.native_id) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    writer.finish()


def test_a_program_that_never_calls_finish_still_gets_its_last_checkpoint(tmp_path):
    code = (
        "import sys, torch; from pathlib import Path\n"
        "from instep.state.save import CheckpointWriter\n"
        "from instep.state.snapshot import Snapshot\n"
        "tensors = {'model': {'w': torch.ones(1_000_000)}}\n"
        "CheckpointWriter(Path(sys.argv[1])).save(Snapshot(step=1, tensors=tensors, facts={}))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    assert load(tmp_path / "step-00000001").tensors["model"]["w"].sum() == 1_000_000


def test_training_may_change_everything_as_soon_as_save_returns(tmp_path):
    state = snapshot_of(1, size=1_000_000)
    writer = CheckpointWriter(tmp_path)
    writer.save(state)
    for group in state.tensors.values():
        for tensor in group.values():
            tensor.zero_()
    state.facts["position"] = None
    writer.finish()
    assert_is_of_step(load(writer.poll()[0].path), 1)


def test_the_last_few_are_kept(tmp_path):
    saved = write(tmp_path, 1, 2, 3, 4, keep_last=2)
    assert [s.step for s in saved] == [1, 2, 3, 4]
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_going_back_makes_the_newest_the_one_saved_last(tmp_path):
    write(tmp_path, 10, 20, 30, keep_last=3)
    write(tmp_path, 15, keep_last=3)
    assert names(tmp_path) == ["step-00000010", "step-00000015"]


def test_the_same_step_saved_again_replaces_the_first(tmp_path):
    write(tmp_path, 7, keep_last=1)
    writer = CheckpointWriter(tmp_path, keep_last=1)
    writer.save(Snapshot(step=7, tensors={}, facts={"second": True}))
    writer.finish()
    writer.poll()
    assert names(tmp_path) == ["step-00000007"]
    assert load(tmp_path / "step-00000007").facts == {"second": True}


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    write(tmp_path, 7)
    (tmp_path / "step-00000007").rename(tmp_path / "step-00000007.old")
    found = newest_intact(tmp_path)[0]
    assert found is not None
    assert found.name == "step-00000007.old"
    assert_is_of_step(load(found), 7)
    CheckpointWriter(tmp_path)
    assert names(tmp_path) == ["step-00000007"]


def test_left_overs_of_a_killed_run_are_cleared_and_nothing_else(tmp_path):
    write(tmp_path, 1)
    for name in (".saving-step-00000002", ".deleting-step-00000000", "mine", "step-00000001.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    CheckpointWriter(tmp_path)
    assert names(tmp_path) == ["mine", "step-00000001"]


def test_the_layout_may_change_from_save_to_save(tmp_path):
    writer = CheckpointWriter(tmp_path, keep_last=9)
    shapes = [{"a": 3}, {"a": 3, "b": 5}, {"b": 2}, {}]
    for step, parts in enumerate(shapes):
        tensors = {name: torch.full((size,), step) for name, size in parts.items()}
        writer.save(Snapshot(step=step, tensors={"model": tensors}, facts={}))
    writer.finish()
    for step, (parts, saved) in enumerate(zip(shapes, writer.poll(), strict=True)):
        found = load(saved.path).tensors["model"]
        assert {name: t.tolist() for name, t in found.items()} == {
            name: [step] * size for name, size in parts.items()
        }


@pytest.mark.parametrize(
    ("facts", "says"),
    [
        ({"a": float("nan")}, "plain JSON"),
        ({"a": torch.ones(1)}, "plain JSON"),
        ({"a": {"b": (1, 2)}}, r"facts\['a'\]"),
        ({"a": {1: 2}}, r"facts\['a'\]"),
    ],
)
def test_facts_that_json_would_change_are_refused_at_once(tmp_path, facts, says):
    with pytest.raises(CheckpointError, match=says):
        CheckpointWriter(tmp_path).save(Snapshot(step=1, tensors={}, facts=facts))


def test_a_tensor_that_no_file_holds_is_refused_at_once(tmp_path):
    tensors = {"model": {"w": torch.ones(2, 2).to_sparse()}}
    with pytest.raises(CheckpointError, match="'w' is a sparse"):
        CheckpointWriter(tmp_path).save(Snapshot(step=1, tensors=tensors, facts={}))
    assert names(tmp_path) == []


def test_a_tensor_that_no_longer_fits_in_a_file_is_refused_too(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.save(Snapshot(step=1, tensors={"model": {"w": torch.ones(2, 2)}}, facts={}))
    tensors = {"model": {"w": torch.ones(2, 2).to_sparse()}}
    with pytest.raises(CheckpointError, match="'w' is a sparse"):
        writer.save(Snapshot(step=2, tensors=tensors, facts={}))
    writer.finish()


def test_what_changes_its_form_in_its_own_memory_is_saved_as_it_is_now(tmp_path):
    t = torch.arange(6.0).view(2, 3)
    square = torch.arange(4.0).view(2, 2)
    forms = [lambda: None, lambda: t.t_(), lambda: t.resize_(1), lambda: square.t_()]
    forms.append(lambda: setattr(t, "data", torch.tensor([7], dtype=torch.int16)))
    writer = CheckpointWriter(tmp_path, keep_last=9)
    expected = []
    for step, change in enumerate(forms):
        change()
        tensors = {"a": t, "b": square, "tied": square}
        expected.append({name: tensor.clone() for name, tensor in tensors.items()})
        writer.save(Snapshot(step=step, tensors={"model": tensors}, facts={}))
    writer.finish()
    for saved, wanted in zip(writer.poll(), expected, strict=True):
        found = load(saved.path).tensors["model"]
        for name, tensor in wanted.items():
            assert found[name].dtype == tensor.dtype
            assert found[name].tolist() == tensor.tolist(), (saved.step, name)


def test_a_tie_that_ends_without_a_new_tensor_is_detected(tmp_path):
    memory = torch.arange(4.0)
    one, other = memory.view(2, 2), memory.view(2, 2)
    writer = CheckpointWriter(tmp_path)
    for step in (1, 2):
        writer.save(Snapshot(step=step, tensors={"model": {"one": one, "other": other}}, facts={}))
        writer.finish()
        found = load(writer.poll()[0].path).tensors["model"]
        assert found["one"].tolist() == one.tolist()
        assert found["other"].tolist() == other.tolist()
        other.t_()


def test_a_failed_write_is_returned_by_poll_and_the_next_save_retries(tmp_path):
    writer = CheckpointWriter(tmp_path)
    writer.save(snapshot_of(1))
    writer.finish()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # stands in for a full disk
    try:
        writer.save(snapshot_of(2, size=100_000))
        writer.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    first, failed = writer.poll()
    assert first.step == 1
    assert isinstance(failed, CheckpointError)
    assert re.fullmatch(r"the checkpoint of step 2 was not saved .*\(EFBIG\)\. .*", str(failed))
    assert names(tmp_path) == ["step-00000001"]
    writer.save(snapshot_of(3))
    writer.finish()
    assert [s.step for s in writer.poll()] == [3]


def test_a_folder_that_cannot_be_listed_for_once_stops_no_later_save(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path, keep_last=1)
    listed = os.listdir

    def refuse(folder):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "listdir", refuse)
    writer.save(snapshot_of(1))
    writer.finish()
    monkeypatch.setattr(os, "listdir", listed)
    saved, warning = writer.poll()
    assert saved.step == 1
    assert re.fullmatch(
        r".* step 1 is saved, but older .* cannot be listed: .*EIO\)\.", str(warning)
    )
    writer.save(snapshot_of(2))
    writer.finish()
    assert [s.step for s in writer.poll()] == [2]
    assert names(tmp_path) == ["step-00000002"]


def test_a_bug_in_the_thread_is_raised_once_and_the_next_save_works(tmp_path, monkeypatch):
    writer = CheckpointWriter(tmp_path)
    monkeypatch.setattr(writer, "_delete_old", lambda step: 1 / 0)
    writer.save(snapshot_of(1))
    with pytest.raises(ZeroDivisionError):
        writer.finish()
    monkeypatch.undo()
    writer.save(snapshot_of(2))
    writer.finish()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_files_that_a_checkpoint_needs_are_synced_before_it_is_published(tmp_path, monkeypatch):
    ledger, synced, sync = tmp_path / "ledger", [], os.fsync
    ledger.write_text("steps")

    def watch(descriptor):
        synced.append((os.fstat(descriptor).st_ino, (folder / "step-00000001").exists()))
        sync(descriptor)

    folder = tmp_path / "checkpoints"
    writer = CheckpointWriter(folder, sync_first=[ledger, tmp_path / "not there"])
    monkeypatch.setattr(os, "fsync", watch)
    writer.save(snapshot_of(1))
    writer.finish()
    assert (ledger.stat().st_ino, False) in synced
    assert (tmp_path.stat().st_ino, False) in synced  # the folder knows the file
    saved = folder / "step-00000001"
    for path in (saved, *saved.iterdir()):  # the new folder, under the name that it had before
        assert (path.stat().st_ino, False) in synced, path
    assert (folder.stat().st_ino, True) in synced
    assert [type(outcome).__name__ for outcome in writer.poll()] == ["Saved"]


def test_a_place_that_is_no_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"\(EEXIST\)|\(ENOTDIR\)"):
        CheckpointWriter(tmp_path / "file")


def drawn_for(step):
    """A state that depends on the step alone: a byte of another step in it would show."""
    generator = torch.Generator().manual_seed(step)
    draw = torch.randint(0, 256, (3, 80_000), dtype=torch.uint8, generator=generator)
    return Snapshot(
        step=step,
        tensors={
            "model": {"w": draw[0].view(torch.int32), "n": torch.tensor(step)},
            "optimizer": {"m": draw[1].view(torch.int64), "v": draw[2]},
        },
        facts={"position": step * 64},
    )


def assert_equals_what_was_saved(found):
    wanted = drawn_for(found.step)
    assert found.facts == wanted.facts
    assert found.tensors.keys() == wanted.tensors.keys()
    for group, tensors in wanted.tensors.items():
        assert found.tensors[group].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(found.tensors[group][name], tensor), (found.step, group, name)


def save_until_killed(folder, announce):
    """The life of a child: go on from the newest checkpoint, save at every step."""
    torch.set_num_threads(1)
    newest = newest_intact(folder)[0]
    step = load(newest).step if newest else 0
    writer = CheckpointWriter(folder)
    while True:
        step += 1
        writer.save(drawn_for(step))
        os.write(announce, struct.pack("<q", step))
        writer.poll()


def kill_at(folder, delay_s):
    """Run a child, kill it `delay_s` after its first save; returns the last step it asked for."""
    listen, announce = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(listen)
            save_until_killed(folder, announce)
        finally:
            os._exit(1)
    os.close(announce)
    heard = os.read(listen, 8)
    until = time.monotonic() + delay_s
    while (left := until - time.monotonic()) > 0:
        if wait_readable([listen], left):
            heard += os.read(listen, 1 << 16)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    while more := os.read(listen, 1 << 16):
        heard += more
    os.close(listen)
    assert os.WIFSIGNALED(status), "the child ended by itself"
    return struct.unpack("<q", heard[-8:])[0]


@pytest.mark.process
@pytest.mark.parametrize("kills", [40, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint_one_save_old_at_most(tmp_path, kills):
    """Each child goes on where the one before was killed; it saves without a pause."""
    writer = CheckpointWriter(tmp_path)
    writer.save(drawn_for(0))
    writer.finish()
    draw, half_written = random.Random(7), 0
    for _ in range(kills):
        asked = kill_at(tmp_path, draw.uniform(0, 0.06))
        newest, *older = [load(path) for _, path in published(tmp_path)]  # all are whole
        for snapshot in (newest, *older):
            assert_equals_what_was_saved(snapshot)
        assert asked - 1 <= newest.step <= asked + 1  # a kill may come before the announcement
        half_written += any(name.startswith((".saving-", ".deleting-")) for name in names(tmp_path))
    assert half_written >= kills // 10, "the kills did not come while saves were under way"
    CheckpointWriter(tmp_path)
    assert not [name for name in names(tmp_path) if not name.startswith("step-")]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.fine = nn.Parameter(torch.tensor([1.0, float("inf")], dtype=torch.bfloat16))


def test_a_model_file_keeps_tied_weights_once_and_other_programs_read_it(tmp_path):
    model, twin = Tied(), Tied()
    path = tmp_path / "model.safetensors"
    assert save_model(path, model, {"step": "9"}) == path.stat().st_size
    assert list(safetensors.torch.load_file(path)) == ["embedding.weight", "fine"]
    assert safetensors.torch.load_model(twin, path) == (set(), [])
    assert torch.equal(twin.head.weight, model.embedding.weight)
    assert torch.equal(twin.fine, model.fine)
    with safetensors.safe_open(path, "pt") as file:
        told = file.metadata()
        assert re.fullmatch("[0-9a-f]{64}", told.pop("file_sha256"))
        assert told == {"format": "pt", "step": "9", "head.weight": "embedding.weight"}
    assert names(tmp_path) == ["model.safetensors"]


def test_a_model_that_cannot_be_written_says_so(tmp_path):
    with pytest.raises(CheckpointError, match=r"not saved: .*\(ENOENT\)"):
        save_model(tmp_path / "missing" / "model.safetensors", Tied(), {})


def test_all_types_and_shapes_come_back_to_the_bit(tmp_path):
    generator = torch.Generator().manual_seed(0)
    raw = torch.randint(0, 256, (24,), dtype=torch.uint8, generator=generator)
    kinds = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64]
    kinds += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
    kinds += [torch.uint64, torch.uint32, torch.uint16, torch.float8_e4m3fn, torch.float8_e5m2]
    tensors = {str(kind): raw.view(kind) for kind in kinds}
    tensors |= {"bool": raw > 99, "scalar": torch.tensor(3.5), "empty": torch.empty(0, 2)}
    tensors["turned"] = torch.arange(6.0).view(2, 3).T
    tensors["channels last"] = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last)
    tensors["tied"] = tensors["turned"]
    tensors["ä/\n'"] = torch.ones(1)
    writer = CheckpointWriter(tmp_path)
    writer.save(Snapshot(step=1, tensors={"all": tensors, "none": {}}, facts={}))
    writer.finish()
    found = load(writer.poll()[0].path).tensors
    assert found["none"] == {}
    assert found["all"].keys() == tensors.keys()
    for name, tensor in tensors.items():
        other = found["all"][name]
        assert other.dtype == tensor.dtype
        assert other.shape == tensor.shape
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (other, tensor)]
        assert torch.equal(*as_bytes), name
    assert found["all"]["tied"] is found["all"]["turned"]


def test_a_writer_leaves_alone_what_one_before_it_is_still_writing(tmp_path):
    before = CheckpointWriter(tmp_path)
    writing, may_go_on = threading.Event(), threading.Event()

    def may_publish():
        writing.set()
        return may_go_on.wait(600)

    before._may_publish = may_publish
    before.save(snapshot_of(5))
    assert writing.wait(600)
    after = CheckpointWriter(tmp_path)  # as of another worker, which has rank 0 now
    assert len(names(tmp_path)) == 1
    after.save(snapshot_of(5))
    after.save(snapshot_of(6))
    after.finish()
    assert [type(each) for each in after.poll()] == [Saved, Saved]
    may_go_on.set()
    before.finish()
    assert [type(each) for each in before.poll()] == [Saved]
    assert "step-00000006" in names(tmp_path)
    assert_is_of_step(load(tmp_path / "step-00000005"), 5)


@pytest.mark.tail
def test_what_a_killed_writer_left_is_cleared_away(tmp_path):
    code = (
        "import os, sys, torch; from pathlib import Path\n"
        "from instep.state.save import CheckpointWriter\n"
        "from instep.state.snapshot import Snapshot\n"
        "writer = CheckpointWriter(Path(sys.argv[1]), may_publish=lambda: os._exit(9))\n"
        "writer.save(Snapshot(step=1, tensors={'model': {'w': torch.ones(9)}}, facts={}))\n"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert names(tmp_path) == [".saving-step-00000001"]
    CheckpointWriter(tmp_path)
    assert names(tmp_path) == []


def test_a_reported_checkpoint_is_found_after_a_power_failure(tmp_path):
    """A copy of the disk is taken at that moment, and what was not synced is not on it."""
    disk = Ext4(tmp_path / "disk", 32 << 20)
    try:
        ledger = disk.path / "ledger.bin"
        ledger.write_bytes(b"committed")
        options = {"sync_first": [ledger]}
        (saved,) = write(disk.path / "checkpoints", 3, **options)
        found = disk.after_a_power_failure(tmp_path / "found")
    finally:
        disk.close()
    try:
        checkpoint = newest_intact(found.path / "checkpoints")[0]
        assert checkpoint is not None
        assert checkpoint.name == saved.path.name
        assert_is_of_step(load(checkpoint), 3)
        assert (found.path / "ledger.bin").read_bytes() == b"committed"
    finally:
        found.close()


def test_a_model_that_was_saved_is_found_after_a_power_failure(tmp_path):
    disk = Ext4(tmp_path / "disk", 32 << 20)
    try:
        model = nn.Linear(3, 2)
        save_model(disk.path / "model.safetensors", model, {})
        found = disk.after_a_power_failure(tmp_path / "found")
    finally:
        disk.close()
    try:
        tensors = safetensors.torch.load_file(found.path / "model.safetensors")
        assert torch.equal(tensors["weight"], model.weight)
        assert check_hash(found.path / "model.safetensors", required=True)
    finally:
        found.close()
