"""From which checkpoint a run goes on, what it then takes back, and what it refuses."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import zlib

import msgspec
import pytest
import torch

from instep.control import resume
from instep.control.resume import go_back, prepare
from instep.errors import CheckpointError, RunError, SpecError
from instep.events import LEDGER, LEDGER_START, EventLog, read_records
from instep.job import file as spec_file
from instep.state.files.manifest import published
from instep.state.save import CheckpointWriter
from instep.state.snapshot import Snapshot
from instep.store.folder import held, make_run_folder, run_id
from instep.store.ledger import Ledger
from instep.store.run_folder import RunFolder

TABLE = {"name": "net", "recipe": "/digits.py:recipe", "train": {"steps": 40, "global_batch": 64}}


def job_of(**train):
    table = {**TABLE, "train": {**TABLE["train"], **train}}
    return spec_file.build(table, source="test")


def facts_of(folder, job, step, **changes):
    return {
        "run": run_id(folder),
        "job": spec_file.dump(job),
        "ledger_bytes": LEDGER_START + step * LEDGER.itemsize,
        "epoch_so_far": [0.0, 0],
        "optimizer": {},
        "scaler": {},
        **changes,
    }


def save(folder, facts, step):
    writer = CheckpointWriter(folder / "checkpoints", keep_last=9)
    tensors = {"model": {"w": torch.full((3,), float(step))}}
    writer.save(Snapshot(step=step, tensors=tensors, facts=facts))
    writer.finish()


@pytest.fixture
def run(tmp_path):
    """A run that was killed at step 12, with checkpoints of step 5 and 10."""
    job = job_of()
    folder = make_run_folder(tmp_path, job, named=True)
    ledger = Ledger(folder / "ledger.bin")
    for step in range(1, 13):
        ledger.append([(step, 0, 0, 1, 0, 0, 0, 64 * step - 64, 64 * step)])
    ledger.close()
    log = EventLog(folder / "events.jsonl")
    log.emit("run_started", recipe_sha256="sha")
    log.emit("worker_ready", worker=0, samples=640, last_step=40)
    log.close()
    for step in (5, 10):
        save(folder, facts_of(folder, job, step), step)
    return folder


def steps_in(ledger):
    return read_records(ledger / "ledger.bin", LEDGER)["step"].tolist()


def go_on(run, job=None):
    return prepare(run, job or job_of(), recipe_sha256="sha")


def names(run):
    return [path.name for _, path in published(run / "checkpoints")]


def test_a_run_resumes_from_its_newest_checkpoint_and_the_ledger_ends_there(run):
    start_point = go_on(run)
    assert (start_point.step, start_point.checkpoint) == (10, run / "checkpoints" / "step-00000010")
    assert start_point.warnings == ()
    assert steps_in(run) == [*range(1, 11)]


# ---- what is not believed


@pytest.mark.parametrize("flipped", [LEDGER_START, LEDGER_START + 10 * LEDGER.itemsize - 1])
def test_a_ledger_that_is_damaged_before_its_checkpoint_is_refused_and_nothing_changes(
    run, flipped
):
    facts = facts_of(run, job_of(), 10)
    whole = (run / "ledger.bin").read_bytes()
    facts["ledger_crc32"] = zlib.crc32(whole[: facts["ledger_bytes"]])
    save(run, facts, 10)
    damaged = bytearray(whole)
    damaged[flipped] ^= 4
    (run / "ledger.bin").write_bytes(damaged)
    files = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(
        RunError, match=r"ledger\.bin is damaged: .* Restore it from a copy"
    ) as error:
        go_on(run)
    assert error.value.exit_code == 6
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == files
    (run / "ledger.bin").write_bytes(whole[:-3] + b"xyz")  # after the checkpoint it does not count
    assert go_on(run).step == 10
    assert steps_in(run) == [*range(1, 11)]


def test_a_job_file_that_was_edited_by_hand_is_held_against_the_checkpoints_own(run):
    edited = msgspec.structs.replace(job_of(), seed=6)
    (run / "job.toml").write_text(spec_file.dump(edited))
    with pytest.raises(SpecError, match="seed was 0 and cannot become 6"):
        go_on(run, edited)
    assert steps_in(run)[-1] == 12


def test_what_may_change_may_have_changed_since_the_checkpoint(run):
    longer = job_of(steps=80, threads=2)
    assert go_on(run, longer).step == 10
    assert RunFolder(run).spec == longer


def test_a_checkpoint_of_another_run_of_the_same_job_is_refused(run):
    other = make_run_folder(run.parent / "others", job_of(), named=True)
    shutil.copytree(run / "checkpoints", other / "checkpoints")
    shutil.copy(run / "ledger.bin", other / "ledger.bin")
    with pytest.raises(CheckpointError, match=r"step-00000010 is of another run: .*run\.id"):
        go_back(other, job_of())
    mixed = run / "checkpoints" / "step-00000012"
    save(other, facts_of(other, job_of(), 12), 12)
    shutil.copytree(other / "checkpoints" / mixed.name, mixed)
    start_point = go_on(run)
    assert start_point.step == 10
    assert "is of another run" in start_point.warnings[0]


def test_a_run_keeps_its_id_wherever_its_folder_is_moved(run, tmp_path):
    moved = tmp_path / "elsewhere" / "copy"
    shutil.copytree(run, moved)
    assert go_on(moved).step == 10


@pytest.mark.parametrize("missing", ["ledger_bytes", "epoch_so_far", "run", "job"])
def test_a_checkpoint_of_an_earlier_instep_is_refused_with_a_sentence(run, missing):
    shutil.rmtree(run / "checkpoints")
    facts = facts_of(run, job_of(), 10)
    del facts[missing]
    save(run, facts, 10)
    with pytest.raises(CheckpointError, match=rf"did not keep all .*\({missing}\): resume it with"):
        go_on(run)


def test_a_checkpoint_beyond_the_ledger_is_skipped_and_set_aside(run):
    with (run / "ledger.bin").open("r+b") as file:
        file.truncate(LEDGER_START + 8 * LEDGER.itemsize - 3)  # as a crash of the host may leave it
    start_point = go_on(run)
    assert start_point.step == 5
    (warning,) = start_point.warnings
    assert "is no longer known. An earlier checkpoint is used." in warning
    assert steps_in(run) == [1, 2, 3, 4, 5]
    assert names(run) == ["step-00000005"]
    CheckpointWriter(run / "checkpoints")
    assert os.listdir(run / "checkpoints") == ["step-00000005"]


def test_where_no_checkpoint_is_left_the_run_is_not_begun_again(run):
    os.truncate(run / "ledger.bin", LEDGER_START + 4 * LEDGER.itemsize)
    with pytest.raises(CheckpointError, match=r"no checkpoint .* is no longer known"):
        go_on(run)
    assert names(run) == ["step-00000010", "step-00000005"]
    assert steps_in(run) == [1, 2, 3, 4]


def test_a_damaged_checkpoint_that_was_passed_over_is_not_believed_later(run):
    newest = run / "checkpoints" / "step-00000010" / "model.safetensors"
    whole = newest.read_bytes()
    newest.write_bytes(whole[:-1])
    assert go_on(run).step == 5
    assert names(run) == ["step-00000005"]
    assert go_on(run).warnings == ()


def test_what_replaced_a_checkpoint_of_the_same_step_is_passed_over_too(run):
    newest = run / "checkpoints" / "step-00000010"
    shutil.copytree(newest, newest.with_name("step-00000010.old"))
    (newest / "model.safetensors").write_bytes(b"")
    assert go_on(run).checkpoint == newest.with_name("step-00000010.old")
    CheckpointWriter(run / "checkpoints")
    assert names(run) == ["step-00000010", "step-00000005"]
    assert go_on(run).warnings == ()


# ---- who may


def test_what_a_worker_wrote_while_it_was_waited_for_is_seen(run, monkeypatch):
    last = Ledger(run / "ledger.bin")

    def passes(seconds):
        for step in range(13, 16):
            last.append([(step, 0, 0, 1, 0, 0, 0, 64 * step - 64, 64 * step)])
        save(run, facts_of(run, job_of(), 15), 15)
        last.close()

    monkeypatch.setattr(resume.time, "sleep", passes)
    assert go_back(run, job_of()).step == 15
    assert steps_in(run)[-1] == 15


def test_a_ledger_that_another_process_writes_is_left_alone(run, monkeypatch):
    monkeypatch.setattr(resume, "TIMEOUT_S", 0.0)
    last = Ledger(run / "ledger.bin")
    with pytest.raises(RunError, match="another process still writes"):
        go_on(run)
    last.close()
    assert steps_in(run)[-1] == 12


def copies_of_the_descriptors(path):
    """The file as a fork has it: the same open file, under another number."""
    wanted, found = os.stat(path), []
    for number in os.listdir("/proc/self/fd"):
        try:
            same = os.path.samestat(os.fstat(int(number)), wanted)
        except OSError:
            continue  # that of the listing
        if same:
            found.append(os.dup(int(number)))
    return found


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="tells what is open")
def test_forks_of_a_holder_that_live_on_hold_nothing(run):
    copies = []
    try:
        with held(run):
            copies += copies_of_the_descriptors(run / "run.id")
        with held(run):
            pass
        ledger = Ledger(run / "ledger.bin")
        copies += copies_of_the_descriptors(run / "ledger.bin")
        ledger.close()
        with resume._no_other_writer(run / "ledger.bin"):
            copies += copies_of_the_descriptors(run / "ledger.bin")
        Ledger(run / "ledger.bin").close()
        assert len(copies) >= 3
    finally:
        for copy in copies:
            os.close(copy)


def test_a_folder_is_held_by_one_and_its_lock_is_on_a_file_open_for_writing(run, monkeypatch):
    flags, take = [], fcntl.flock

    def watch(file, operation):
        flags.append(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE)
        take(file, operation)

    monkeypatch.setattr(fcntl, "flock", watch)
    before, id_before = sorted(os.listdir(run)), run_id(run)
    with held(run), pytest.raises(RunError, match="running in another process"), held(run):
        pass
    assert set(flags) == {os.O_WRONLY}
    assert (sorted(os.listdir(run)), run_id(run)) == (before, id_before)


@pytest.mark.parametrize(("number", "refused"), [("ENOLCK", False), ("EBADF", True)])
def test_only_a_file_system_without_locks_is_excused(run, monkeypatch, number, refused):
    def fail(file, operation):
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr(fcntl, "flock", fail)
    if refused:
        with pytest.raises(RunError, match=r"run\.id cannot be locked: no"), held(run):
            pass
    else:
        with held(run):
            pass


# ---- where no step would follow


def finish(run, step, model_step=None):
    ledger = Ledger(run / "ledger.bin")
    for number in range(13, step + 1):
        ledger.append([(number, 0, 0, 1, 0, 0, 0, 64 * number - 64, 64 * number)])
    ledger.close()
    save(run, facts_of(run, job_of(), step), step)
    if model_step is not None:
        log = EventLog(run / "events.jsonl")
        log.emit("model_saved", step=model_step, parameters_sha256="3f" * 32)
        log.close()
        (run / "model.safetensors").write_bytes(b"model")


@pytest.mark.parametrize(
    ("train", "advice"),
    [
        ({}, "40 of 40 steps.*train.steps=80"),
        ({"steps": 4}, r"net has 40 steps already, and is to have train.steps = 4\. .*steps=80"),
        ({"steps": None, "epochs": 4}, "40 of 40 steps.*train.epochs=8"),
        (
            {"steps": None, "epochs": 1},
            "40 steps already, .*train.epochs = 1, which are 10 steps.*epochs=8",
        ),
    ],
)
def test_the_error_for_a_complete_run_names_a_longer_length(run, train, advice):
    finish(run, 40, model_step=40)
    with pytest.raises(SpecError, match=advice):
        go_on(run, job_of(**train))


@pytest.mark.parametrize("model_step", [None, 12])
def test_a_run_that_was_killed_before_it_saved_its_model_resumes_to_save_it(run, model_step):
    finish(run, 40, model_step=model_step)
    assert go_on(run).step == 40


@pytest.mark.parametrize("stop", [3, 10])
def test_a_stop_that_lies_behind_is_refused(run, stop):
    with pytest.raises(SpecError, match=rf"stop_after_steps = {stop}: .* from step 10"):
        go_on(run, job_of(stop_after_steps=stop))
    assert steps_in(run)[-1] == 12
    assert go_on(run, job_of(stop_after_steps=11)).step == 10


def test_every_run_has_an_id_of_its_own(tmp_path):
    folders = [make_run_folder(tmp_path, job_of(), named=False) for _ in range(2)]
    ids = {run_id(folder) for folder in folders}
    assert len(ids) == 2
    assert all(len(each) == 32 for each in ids)
    assert run_id(tmp_path) == ""
