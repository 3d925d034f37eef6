"""What workers tell is written once, also where they tell it to two masters."""

import numpy as np
import pytest

from instep.control.recorder import Recorder
from instep.events import STEPS, read_events, read_records
from instep.store.run_folder import RunFolder


def steps(*numbers, worker=0):
    records = np.zeros(len(numbers), STEPS)
    records["worker"], records["step"] = worker, numbers
    records["begin"] = [100.0 + number for number in numbers]
    records["forward_s"], records["update_s"] = 0.25, 0.5
    return records.tobytes()


@pytest.fixture
def recorder(tmp_path):
    made = Recorder(tmp_path, [])
    yield made
    made.close()


@pytest.fixture
def next_recorder(tmp_path):
    """Of the master after one that was lost."""
    made = []

    def take_up(*workers):
        (tmp_path / "job.toml").write_text('format = 2\nname = "net"\nrecipe = "a.py:recipe"\n')
        made.append(Recorder(tmp_path, []))
        made[-1].lately = made[-1].take_up(RunFolder(tmp_path), workers)
        return made[-1]

    yield take_up
    for each in made:
        each.close()


def test_steps_are_written_and_how_long_they_took_is_given_back(tmp_path, recorder):
    assert recorder.record(1, b"", steps(4, 5, worker=1), again=False) == (2, 0.75, 0.0)
    assert read_records(tmp_path / "steps.bin", STEPS)["step"].tolist() == [4, 5]
    assert (recorder.committed, recorder.in_flight(1), recorder.in_flight(0)) == (5, 6, 0)


def test_a_worker_that_starts_anew_on_another_host_is_said_to_have_lost_what_it_logged(
    tmp_path, recorder
):
    def warnings():
        events = read_events(tmp_path / "events.jsonl")
        return [e["text"] for e in events if e["event"] == "warning"]

    recorder.moved(0, 1, 2)
    assert warnings() == [], "nothing is logged in this run"
    recorder.record_event("logged", {"step": 7, "values": {"x": 1.0}}, again=False)
    recorder.moved(3, 1, 2)
    recorder.moved(0, 1, 2)
    (text,) = warnings()
    assert "anew on host 2" in text
    assert "after step 7, they are lost" in text


def test_what_was_logged_last_is_known_without_the_log_which_may_be_damaged(
    tmp_path, recorder, next_recorder
):
    recorder.emit("run_started", {"job": {}})
    recorder.record_event("logged", {"step": 7, "values": {"x": 1.0}}, again=False)
    after = next_recorder()
    log = tmp_path / "events.jsonl"
    log.write_bytes(log.read_bytes().replace(b'"x"', b'"y"'))
    after.moved(0, 1, 2)
    assert b"after step 7, they are lost" in log.read_bytes().splitlines()[-1]


def test_steps_that_a_lost_master_had_written_are_not_written_again(
    tmp_path, recorder, next_recorder
):
    recorder.emit("run_started", {"job": {}})
    recorder.record(0, b"", steps(1, 2), again=False)
    after = next_recorder(0)
    assert after.lately == (2, 0.75, 0.0)
    assert (after.committed, after.in_flight(0)) == (2, 3)
    assert after.record(0, b"", steps(1, 2), again=True) is None
    assert after.record(0, b"", steps(2, 3), again=True) == (1, 0.75, 0.0)
    assert read_records(tmp_path / "steps.bin", STEPS)["step"].tolist() == [1, 2, 3]


def test_an_event_that_a_lost_master_had_written_is_not_written_again(
    tmp_path, recorder, next_recorder
):
    recorder.emit("run_started", {"job": {}})
    assert recorder.record_event("validated", {"step": 3, "metrics": {"loss": 0.5}}, again=False)
    after = next_recorder(0)
    assert not after.record_event("validated", {"step": 3, "metrics": {"loss": 0.5}}, again=True)
    assert after.record_event(
        "validated", {"step": 3, "metrics": {"loss": 0.5}}, again=False
    )  # it was done again
    assert after.record_event("validated", {"step": 6, "metrics": {"loss": 0.5}}, again=True)
    steps_ = [event.get("step") for event in read_events(tmp_path / "events.jsonl")]
    assert steps_ == [None, 3, 3, 6]


def test_after_going_back_no_later_step_counts_as_committed(recorder):
    recorder.record(0, b"", steps(7, 8), again=False)
    recorder.go_back(5)
    assert (recorder.committed, recorder.in_flight(0)) == (5, 6)


def test_a_view_that_fails_is_let_go_and_the_log_says_so(tmp_path):
    class Torn:
        def event(self, event):
            raise OSError("no terminal")

    recorder = Recorder(tmp_path, [Torn()])
    recorder.emit("host_joined", {"pid": 1, "host": 0})
    recorder.emit("host_joined", {"pid": 2, "host": 1})
    recorder.close()
    events = list(read_events(tmp_path / "events.jsonl"))
    assert [event["event"] for event in events] == ["host_joined", "warning", "host_joined"]
    assert "no terminal" in events[1]["text"]


@pytest.mark.parametrize("between", [None, "went_back", "corruption_found"])
def test_the_end_of_an_epoch_is_written_once_unless_the_run_went_back(tmp_path, recorder, between):
    ended = {"epoch": 0, "step": 8, "loss": 0.5, "samples": 64}
    assert recorder.record_event("epoch_finished", ended, again=False)
    if between:
        recorder.emit(between, {"resumed_step": 4, "clean_step": 4})
    assert recorder.record_event("epoch_finished", ended, again=False) == bool(between)
    assert recorder.record_event("epoch_finished", {**ended, "epoch": 1, "step": 16}, again=False)
    written = [e["epoch"] for e in read_events(tmp_path / "events.jsonl") if "epoch" in e]
    assert written == ([0, 0, 1] if between else [0, 1])
