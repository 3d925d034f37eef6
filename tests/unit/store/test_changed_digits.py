"""A changed digit in the events or the step records of a run is noticed, and where it is."""

import json
from contextlib import suppress

import numpy as np
import pytest

from instep.control.recorder import Recorder
from instep.errors import RunError
from instep.events import STEPS, EventLog, read_events
from instep.store.run_folder import RunFolder
from instep.store.step_log import StepLog
from made_up_runs import make_run

WHOLE = STEPS.itemsize


@pytest.fixture
def run(tmp_path):
    """A run whose events and step records were written as the master writes them."""
    path = make_run(tmp_path / "digits", steps=5, outcome="completed")
    events, steps = list(read_events(path / "events.jsonl")), (path / "steps.bin").read_bytes()
    (path / "events.jsonl").unlink()
    (path / "steps.bin").unlink()
    recorder = Recorder(path, [])
    for event in events:
        recorder.emit(event.pop("event"), event)  # with the time of then
    recorder.record(0, b"", steps, again=False)
    recorder.close()
    return path


def test_what_was_not_changed_reads_as_it_was_written(run):
    folder = RunFolder(run)
    assert (folder.outcome, folder.last_step, len(folder.steps)) == ("completed", 5, 10)
    assert not any("crc32" in event for event in folder.events)


def test_no_byte_of_a_line_can_change_unseen(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    event = log.emit("epoch_finished", epoch=1, step=20, loss=0.125, samples=640)
    log.close()
    line = (tmp_path / "events.jsonl").read_bytes()
    for at in range(len(line) - 1):
        changed = bytearray(line)
        changed[at] ^= 1
        (tmp_path / "events.jsonl").write_bytes(changed)
        with suppress(ValueError):
            (found,) = read_events(tmp_path / "events.jsonl")
            assert {**found, **event} == found, f"byte {at}"  # the name of the checksum was changed
        (tmp_path / "events.jsonl").write_bytes(line + changed)  # a later line needs one
        with pytest.raises(ValueError):
            list(read_events(tmp_path / "events.jsonl"))


def test_lines_of_earlier_versions_come_before_those_with_checksums(tmp_path):
    log = EventLog(tmp_path / "events.jsonl")
    event = log.emit("epoch_finished", epoch=1, step=20, loss=0.125, samples=640)
    log.close()
    new, old = (tmp_path / "events.jsonl").read_bytes(), json.dumps(event).encode() + b"\n"
    (tmp_path / "events.jsonl").write_bytes(old + new)
    assert list(read_events(tmp_path / "events.jsonl")) == [event, event]
    (tmp_path / "events.jsonl").write_bytes(new + old)
    with pytest.raises(ValueError, match="it has no checksum, and a line before it has one"):
        list(read_events(tmp_path / "events.jsonl"))


def test_a_changed_digit_of_an_event_is_named_by_its_line(run):
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if b'"samples": 1000' in line)
    lines[at] = lines[at].replace(b'"samples": 1000', b'"samples": 1001')
    (run / "events.jsonl").write_bytes(b"".join(lines))
    said = rf"jsonl is damaged: line {at + 1}: it does not match its checksum"
    with pytest.raises(RunError, match=said):
        RunFolder(run)


def test_no_byte_of_a_step_record_or_its_checksum_can_change_unseen(run):
    for name, size in (("steps.bin", WHOLE), ("steps.crc", 4)):
        whole = (run / name).read_bytes()
        for at in range(3 * size, 4 * size):
            changed = bytearray(whole)
            changed[at] ^= 1
            (run / name).write_bytes(changed)
            with pytest.raises(RunError, match=r"record 4 of 10 does not match its checksum"):
                RunFolder(run)
        (run / name).write_bytes(whole)


def test_a_run_without_checksums_is_read_as_it_is(run):
    events = list(read_events(run / "events.jsonl"))
    (run / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    (run / "steps.crc").unlink()
    assert RunFolder(run).events == events
    assert len(RunFolder(run).steps) == 10


@pytest.mark.parametrize("records", [0, 4, 9, 10])
@pytest.mark.parametrize("checksums", [0, 4, 9, 10])
def test_a_log_that_goes_on_has_a_checksum_for_every_record(run, records, checksums):
    """A killed master, or a loss of power, leaves less of one file than of the other."""
    steps = (run / "steps.bin").read_bytes()
    (run / "steps.bin").write_bytes(steps[: records * WHOLE] + b"torn"[:records])
    (run / "steps.crc").write_bytes((run / "steps.crc").read_bytes()[: checksums * 4] + b"to")
    log = StepLog(run)
    log.write(steps)
    log.close()
    assert len(RunFolder(run).steps) == records + 10
    assert len(np.fromfile(run / "steps.crc", "<u4")) == records + 10  # so all were checked
