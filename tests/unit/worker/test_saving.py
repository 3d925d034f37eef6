"""What worker 0 tells, and when, while it saves."""

from __future__ import annotations

import errno
import os
import shutil
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from instep.data.order import Position
from instep.engine.clock import Clock
from instep.engine.state.committed import CommittedState
from instep.engine.turns import TurnState
from instep.engine.update import Update
from instep.errors import CheckpointError, RunError
from instep.events import LEDGER
from instep.job import file as spec_file
from instep.state.files.manifest import published, read_manifest
from instep.state.retention import Best
from instep.store.folder import make_run_folder, run_id
from instep.sync.base import make_strategy
from instep.worker.loop.saving import Saver

WHERE = Position(0, 0, 64)


class MasterConnection:
    """A member that writes down what it is told to do, and what was on disk by then."""

    lease = SimpleNamespace(fenced=False)

    def __init__(self, folder, job):
        self.run, self.job = folder, job
        self.told = []
        self.records = self

    def flush(self):
        self.told.append(("flush", sorted(step for step, _ in published(self.run / "checkpoints"))))

    def emit(self, name, **fields):
        self.told.append((name, fields.get("step", fields.get("text"))))


@pytest.fixture
def saver(make_saver, tmp_path):
    return make_saver(tmp_path)


@pytest.fixture
def make_saver():
    return make


def make(runs, best=None, now=time.monotonic, **kept):
    kept = {"every": 1, **kept}
    table = {"name": "net", "recipe": "/digits.py:recipe", "checkpoint": kept}
    job = spec_file.build(table, source="test")
    model = nn.Linear(2, 1)
    update = Update(
        torch.optim.SGD(model.parameters(), lr=0.1),
        None,
        list(model.parameters()),
        seed=0,
        max_grad_norm=None,
        measure=False,
        scaler=torch.amp.GradScaler("cuda", enabled=False),
    )
    connection = MasterConnection(make_run_folder(runs, job, named=True), job)
    saver = Saver(connection, model, best, now=now)
    turn = TurnState("", list(model.parameters()), update, make_strategy("all_reduce", {}))
    saver.state = CommittedState(model, [turn])
    return saver, connection


def after(saver, step, last=False, metrics=None, **shards):
    saver.state.progress = saver.state.progress._replace(step=step)
    engine = SimpleNamespace(
        state=saver.state,
        clock=Clock(),
        records=SimpleNamespace(
            ledger=SimpleNamespace(size_bytes=step * LEDGER.itemsize, crc32=lambda: 0xFACADE)
        ),
        buffers=SimpleNamespace(moved=set()),
    )
    due = last or saver.late() or saver.is_best(step, metrics)
    due = due or saver._member.job.checkpoint.due(step)
    saver.after_step(engine, WHERE, due=due, last=last, metrics=metrics, **shards)


def test_what_was_set_aside_is_no_longer_the_best(make_saver, tmp_path):
    saver, connection = make_saver(tmp_path, Best(count=1), every=100)
    for step, loss in {1: 0.5, 2: 0.3, 3: 0.1}.items():
        after(saver, step, metrics={"loss": loss})
    saver.drop_after(2)
    after(saver, 4, metrics={"loss": 0.2})  # the third is not validated the second time
    saver.hand_over()
    assert 4 in [step for step, _ in published(connection.run / "checkpoints")]


def test_what_was_set_aside_is_not_told_as_the_newest(saver):
    saver, connection = saver
    for step in (1, 2, 3):
        after(saver, step)
    saver.drop_after(2)
    (connection.run / "checkpoints" / ".saving-step-00000003").write_text(
        "in the way of the folder"
    )
    after(saver, 3, last=True)
    with pytest.raises(RunError, match=r"The newest checkpoint is that of step 2\."):
        saver.finish(3)


def test_a_server_whose_disk_is_full_is_told_of_once_and_named_at_the_end(saver):
    saver, connection = saver
    for step in (1, 2, 3):
        why = CheckpointError(f"no checkpoint of step {step}: server 2 could not write its part")
        why.__cause__ = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        after(saver, step, last=step == 3, shards=why)
    with pytest.raises(RunError, match=r"checkpoint could not be saved .*No space left on device"):
        saver.finish(3)
    warnings = [text for name, text in connection.told if name == "warning"]
    assert warnings == ["no checkpoint of step 1: server 2 could not write its part"]


def test_what_was_recorded_leaves_before_the_checkpoint_is_made(saver):
    saver, connection = saver
    after(saver, 1)
    saver.finish(1)
    assert connection.told[0] == ("flush", [])
    assert [name for name, _ in connection.told] == ["flush", "checkpoint_saved", "model_saved"]


def test_a_checkpoint_says_of_which_run_and_job_it_is_and_what_the_ledger_was(saver):
    saver, connection = saver
    after(saver, 1)
    saver.finish(1)
    ((_, checkpoint),) = published(connection.run / "checkpoints")
    facts = read_manifest(checkpoint).facts
    assert facts["run"] == run_id(connection.run)
    assert facts["job"] == (connection.run / "job.toml").read_text()
    assert (facts["ledger_bytes"], facts["ledger_crc32"]) == (LEDGER.itemsize, 0xFACADE)


def test_a_checkpoint_that_was_saved_is_told_though_the_next_could_not_be(saver):
    saver, connection = saver
    saver._writer.poll = lambda poll=saver._writer.poll: [*poll(), CheckpointError("the disk.")]
    after(saver, 1)
    saver._writer.finish()
    saver._tell()
    told = [each for each in connection.told if each[0] != "flush"]
    assert ("checkpoint_saved", 1) in told
    assert told[-1] == ("warning", "the disk.")


def texts(connection):
    return [what for name, what in connection.told if name == "warning"]


def saved(connection):
    return [what for name, what in connection.told if name == "checkpoint_saved"]


def test_checkpoints_that_find_no_room_are_one_warning_and_each_next_save_tries_again(
    small_disk, make_saver
):
    saver, connection = make_saver(small_disk.path)
    after(saver, 1)
    saver._writer.finish()
    small_disk.fill(leave=500_000)
    for step in (2, 3, 4):
        after(saver, step)
        saver._writer.finish()
    saver._tell()
    assert len(texts(connection)) == 1
    assert "the checkpoint of step 2 was not saved" in texts(connection)[0]
    assert "1.0 MB are needed" in texts(connection)[0]
    assert "are free (ENOSPC)" in texts(connection)[0]
    small_disk.make_room()
    after(saver, 5)
    saver._writer.finish()
    small_disk.fill(leave=500_000)
    after(saver, 6)
    saver._writer.finish()
    saver._tell()
    assert saved(connection) == [1, 5]
    assert len(texts(connection)) == 2  # it had gone well meanwhile, so that is news


def test_a_folder_of_checkpoints_that_somebody_took_away_is_made_again(saver):
    saver, connection = saver
    shutil.rmtree(connection.run / "checkpoints")
    after(saver, 1)
    saver.finish(1)
    assert saved(connection) == [1]
    assert texts(connection) == []


def test_the_end_says_what_could_not_be_saved_and_what_there_is(small_disk, make_saver):
    saver, connection = make_saver(small_disk.path)
    after(saver, 1)
    saver._writer.finish()
    small_disk.fill(leave=8_000)
    after(saver, 2, last=True)
    with pytest.raises(RunError) as caught:
        saver.finish(2)
    text = str(caught.value)
    assert text.startswith("training is over with step 2, but its checkpoint and model.safetensors")
    assert "(ENOSPC). The newest checkpoint is that of step 1. Make room" in text
    assert not (connection.run / "model.safetensors").exists()
    assert [path.name for path in connection.run.glob(".saving*")] == []
    small_disk.make_room()
    after(saver, 2, last=True)
    saver.finish(2)
    assert (connection.run / "model.safetensors").is_file()


def test_after_the_last_step_no_room_is_left_for_records_of_steps(small_disk, make_saver):
    saver, connection = make_saver(small_disk.path)
    small_disk.fill(leave=500_000)
    after(saver, 1)
    after(saver, 2, last=True)
    saver.finish(2)
    assert saved(connection) == [2]
    assert ["of step 1 was not saved" in text for text in texts(connection)] == [True]
    assert (connection.run / "model.safetensors").is_file()


def test_a_model_without_its_last_checkpoint_is_not_all_that_was_to_be_saved(saver):
    saver, connection = saver
    blocked = connection.run / "checkpoints" / ".saving-step-00000002"
    blocked.parent.mkdir(exist_ok=True)
    blocked.write_text("a file where a folder is to be made")
    after(saver, 2, last=True)
    with pytest.raises(RunError, match=r"its checkpoint could not be saved .* saved no checkpoint"):
        saver.finish(2)
    assert (connection.run / "model.safetensors").is_file()


def test_checkpoints_after_a_step_that_is_gone_back_to_are_not_used(saver):
    saver, connection = saver
    for step in (1, 2):
        after(saver, step)
    saver.drop_after(1)
    assert [step for step, _ in published(connection.run / "checkpoints")] == [1]
    assert ("checkpoint_saved", 2) in connection.told
    after(saver, 2)
    saver.finish(2)
    assert [step for step, _ in published(connection.run / "checkpoints")] == [2, 1]


class Watch:
    """A clock that stands where it is set."""

    def __init__(self):
        self.s = 1000.0

    def __call__(self):
        return self.s


def test_a_time_after_the_last_save_the_next_commit_is_saved(make_saver, tmp_path):
    watch = Watch()
    saver, connection = make_saver(tmp_path, now=watch, every="5m", keep_last=9)
    for step, s in enumerate([0, 200, 299, 301, 302, 590, 602, 2000, 2001], start=1):
        watch.s = 1000 + s
        after(saver, step)
    saver.hand_over()
    assert saved(connection) == [4, 7, 8]


def test_a_save_for_another_reason_counts_as_the_last_one(make_saver, tmp_path):
    watch = Watch()
    saver, connection = make_saver(tmp_path, now=watch, every="5m", keep_every=3, keep_last=9)
    for step, s in enumerate([100, 150, 200, 310, 490, 501], start=1):
        watch.s = 1000 + s
        after(saver, step)
    saver.hand_over()
    assert saved(connection) == [3, 6]


def test_steps_to_be_kept_are_saved_whatever_else_is_said(make_saver, tmp_path):
    saver, connection = make_saver(tmp_path, every="never", keep_every=4)
    for step in range(1, 10):
        after(saver, step)
    saver.hand_over()
    assert saved(connection) == [4, 8]


def test_who_takes_over_saving_counts_from_the_last_save_of_the_one_before(make_saver, tmp_path):
    watch = Watch()
    first, connection = make_saver(tmp_path, now=watch, every="5m", keep_last=9)
    ago = time.time() - 250
    os.utime(connection.run / "job.toml", (ago, ago))
    second = Saver(connection, first._model, now=watch)
    second.state = first.state
    after(second, 1)
    watch.s += 60  # 310 s after the session began
    after(second, 2)
    second.hand_over()
    third = Saver(connection, first._model, now=watch)
    third.state = first.state
    watch.s += 60
    after(third, 3)
    third.hand_over()
    assert saved(connection) == [2]
