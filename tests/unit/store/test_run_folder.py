import json
import math

import numpy as np
import pytest

from disks import KINDS, put
from instep.data.batches import Batches
from instep.errors import RunError
from instep.events import LEDGER, STEPS, read_events, read_records
from instep.report.figures.summary import gap_words, summarise
from instep.report.page.page import render
from instep.report.terminal.closing import closing_lines
from instep.store.run_files import PARTS
from instep.store.run_folder import RunFolder
from instep.store.run_traffic import Traffic
from made_up_runs import (
    BEGIN_S,
    START_UP_S,
    make_run,
    with_servers,
    write_events,
    write_ledger,
)


def test_a_folder_gives_back_what_the_run_wrote(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits"))
    assert folder.job["train"]["global_batch"] == folder.spec.train.global_batch == 64
    assert (folder.members.numbers, folder.members.team, folder.last_step) == ([0, 1], 2, 48)
    assert (folder.plan.epoch_samples, folder.plan.batches) == (1000, Batches(1000, 64, 0, 64))
    assert [event["epoch"] for event in folder.validations] == [0, 1, 2]
    assert len(folder.named("checkpoint_saved")) == len(folder.members.generations) == 1
    assert folder.traffic.by_worker == {0: Traffic(500_000, 9), 1: Traffic(500_001, 9)}
    assert (folder.outcome, folder.members.failures) == ("completed", [])
    assert len(folder.ledger) == len(folder.steps) == 96


def test_a_missing_run_is_answered_with_the_near_miss_and_the_list(tmp_path):
    make_run(tmp_path / "digits")
    make_run(tmp_path / "gpt")
    with pytest.raises(RunError, match=r"digit'.* Did you mean 'digits'\? Known: digits, gpt\."):
        RunFolder(tmp_path / "digit")


def test_a_folder_without_a_job_is_no_run(tmp_path):
    (tmp_path / "photos").mkdir()
    with pytest.raises(RunError, match=r"not the folder of a run: it holds no job\.toml"):
        RunFolder(tmp_path / "photos")


def test_a_job_that_is_no_job_is_named(tmp_path):
    path = make_run(tmp_path / "digits")
    (path / "job.toml").write_text("workers = 2\n")
    with pytest.raises(RunError, match=r"cannot be read as a run: .*job\.toml.*'recipe'"):
        RunFolder(path)


def test_damaged_events_are_named(tmp_path):
    path = make_run(tmp_path / "digits")
    (path / "events.jsonl").write_text('{"time": 1, "event": "war{"time": 2}\n')
    with pytest.raises(RunError, match=r"events\.jsonl is damaged"):
        RunFolder(path)


def test_a_run_that_a_crash_cut_short_reads_as_far_as_it_got(tmp_path):
    path = make_run(tmp_path / "digits", steps=21, outcome=None)
    for name in ("events.jsonl", "ledger.bin", "steps.bin"):
        with (path / name).open("ab") as file:
            file.write(b'{"time": 1')
    folder = RunFolder(path)
    assert (folder.outcome, folder.last_step) == ("unfinished", 21)
    assert len(folder.ledger) == len(folder.steps) == 42


def test_a_step_that_only_some_workers_recorded_is_in_flight(tmp_path):
    path = make_run(tmp_path / "digits", steps=21, outcome=None)
    write_ledger(path, read_records(path / "ledger.bin", LEDGER).copy()[:-1])
    folder = RunFolder(path)
    assert folder.last_step == 20
    assert len(folder.committed) == 40


def test_the_short_last_step_of_an_epoch_is_whole(tmp_path):
    path = make_run(tmp_path / "digits", steps=16, outcome=None)
    assert RunFolder(path).last_step == 16


def test_a_folder_with_nothing_but_a_job_is_a_run_of_no_steps(tmp_path):
    path = make_run(tmp_path / "digits")
    for name in ("events.jsonl", "ledger.bin", "steps.bin"):
        (path / name).unlink()
    folder = RunFolder(path)
    assert (folder.last_step, folder.times.seconds, folder.times.training_seconds()) == (
        0,
        0.0,
        0.0,
    )
    assert (folder.members.numbers, folder.members.team) == ([], 2)


def test_time_between_two_sessions_does_not_count(tmp_path):
    path = make_run(tmp_path / "digits", steps=20, outcome="stopped")
    events = list(read_events(path / "events.jsonl"))
    first_s = events[-1]["time"] - BEGIN_S
    again = [{**event, "time": event["time"] + 86_400} for event in events]
    write_events(path, events + again)
    folder = RunFolder(path)
    assert folder.times.seconds == pytest.approx(2 * first_s)
    assert folder.times.elapsed(BEGIN_S + 86_400 + 1.0) == pytest.approx(first_s + 1.0)
    assert folder.outcome == "stopped"


def test_a_resumed_run_that_has_not_ended_again_is_unfinished(tmp_path):
    path = make_run(tmp_path / "digits", steps=20, outcome="stopped")
    events = list(read_events(path / "events.jsonl"))
    write_events(path, [*events, {**events[0], "time": BEGIN_S + 100}])
    assert RunFolder(path).outcome == "unfinished"


def test_the_traffic_of_a_replaced_worker_is_added(tmp_path):
    path = make_run(tmp_path / "digits")
    counts = [100, 250, 30, 70]  # the third is a new process
    events = [
        {"time": BEGIN_S + i, "event": "traffic", "worker": 0, "sent_bytes": n, "received_bytes": n}
        for i, n in enumerate(counts)
    ]
    write_events(path, events)
    assert RunFolder(path).traffic.by_worker == {0: Traffic(320, 320)}


def test_a_process_that_has_joined_counts_from_0_however_much_it_has_moved_when_it_first_tells(
    tmp_path,
):
    """It may be resumed on a busy machine; one that greets another master is none that is new."""
    path = make_run(tmp_path / "digits")
    told = [(11, 100), (11, 250), (12, 300), (12, 310), (12, None), (12, 320)]
    events, known = [], 0
    for number, (pid, moved) in enumerate(told):
        time = BEGIN_S + number
        if pid != known or moved is None:
            events.append({"time": time, "event": "worker_joined", "worker": 0, "pid": pid})
            known = pid
        if moved is not None:
            fields = {"sent_bytes": moved, "received_bytes": moved}
            events.append({"time": time, "event": "traffic", "worker": 0, **fields})
    write_events(path, events)
    assert RunFolder(path).traffic.by_worker == {0: Traffic(570, 570)}


def test_training_time_leaves_start_up_out(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits", step_s=0.1))
    assert folder.times.training_seconds() == pytest.approx(4.8, abs=0.1)
    assert folder.times.seconds > START_UP_S + 4.8


def test_a_damaged_record_cannot_make_a_run_seem_longer_than_it_can_be(tmp_path):
    path = make_run(tmp_path / "digits", steps=21, outcome=None)
    ledger = read_records(path / "ledger.bin", LEDGER).copy()
    ledger["step"][-1], ledger["stop"][-1] = 2**50, 2**60
    write_ledger(path, ledger)
    folder = RunFolder(path)
    assert folder.last_step == 20
    assert folder.audit.exact


def test_what_was_taken_back_is_told_by_the_order_of_the_log_whatever_the_clocks_say(tmp_path):
    path = make_run(tmp_path / "digits", steps=20, outcome="stopped")
    events = list(read_events(path / "events.jsonl"))
    saved = [
        {"time": BEGIN_S + 900, "event": "checkpoint_saved", "step": n, "path": f"first {n}"}
        for n in (18, 20)
    ]
    again = {**events[0], "time": BEGIN_S - 900, "resumed_step": 18}  # by another host's clock
    later = [{**each, "time": BEGIN_S - 800, "path": "second"} for each in saved[1:]]
    write_events(path, [*events, *saved, again, *later])
    kept = [
        e["path"]
        for e in RunFolder(path).named("checkpoint_saved")
        if "path" in e and e["step"] >= 18
    ]
    assert kept == ["first 18", "second"]


WRONG = {"workers": [1], "suspects": [], "what": "state", "where": "w", "how": "by its sum"}


def corrupted(path, *after):
    """A run of 20 steps, saved at 9 and 18; in the middle, corruption was found in step 20."""
    path = make_run(path, steps=20, outcome=None)
    events = [e for e in read_events(path / "events.jsonl") if e["event"] != "checkpoint_saved"]
    at = max(RunFolder(path).steps["begin"]) + 1.0
    saved = [{"time": at, "event": "checkpoint_saved", "step": n, "path": f"{n}"} for n in (9, 18)]
    found = {"time": at, "event": "corruption_found", "step": 20, "clean_step": 9, **WRONG}
    again = np.fromfile(path / "steps.bin", STEPS)
    again = again[(again["step"] > 9) & (again["step"] <= 12)]
    again["begin"] += at
    with (path / "steps.bin").open("ab") as file:
        again.tofile(file)
    write_events(path, [*events, *saved, found, *({"time": at, **event} for event in after)])
    return RunFolder(path)


FORMED = {"event": "generation_started", "generation": 2, "members": [0, 1]}


def test_what_was_taken_back_because_of_corruption_is_left_out(tmp_path):
    folder = corrupted(tmp_path / "digits", FORMED)
    assert [event["step"] for event in folder.named("checkpoint_saved")] == [9]
    for worker in (0, 1):
        steps = folder.steps_of(worker)
        assert steps["step"].tolist() == list(range(1, 13))
        assert (np.diff(steps["begin"]) > 0).all()


@pytest.mark.parametrize(
    ("after", "last"),
    [
        ([], 20),  # the run ended with it
        ([{"event": "run_started", "resumed_step": 18}, FORMED], 18),
        ([{"event": "went_back", "resumed_step": 18}, FORMED], 18),
    ],
)
def test_where_the_workers_did_not_go_back_by_themselves_corruption_takes_nothing_back(
    tmp_path, after, last
):
    folder = corrupted(tmp_path / "digits", *after)
    assert [event["step"] for event in folder.named("checkpoint_saved")] == [9, 18]
    assert folder.steps["step"].max() == last


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            {"time": 1.0, "event": "worker_ready", "worker": 0, "samples": "x"},
            "line 1 samples is 'x', which is",
        ),
        ({"time": "x", "event": "worker_ready"}, "line 1 the event has no time"),
        ({"time": 1.0}, "line 1 there is no event"),
        ([], "line 1 there is no event"),
        ({"time": math.nan, "event": "warning"}, "line 1 the event has no time"),
        ({"time": 1.0, "event": "checkpoint_saved", "stepp": 2}, "line 1 checkpoint_saved has no"),
        ({"time": 1.0, "event": "checkpoint_saved", "step": 1e999}, "line 1 step is inf, which"),
        ({"time": 1.0, "event": "checkpoint_saved", "step": 1 << 70}, "line 1 step is 1180"),
        ({"time": 1.0, "event": "run_started", "job": "x"}, "line 1 job is 'x', which is"),
    ],
)
def test_an_event_that_is_none_is_named(tmp_path, line, words):
    path = make_run(tmp_path / "digits")
    write_events(path, [line])
    with pytest.raises(RunError, match=rf"events\.jsonl is damaged: in {words}"):
        RunFolder(path)


def every_change(event):
    """An event without each of its fields, with another key for it, and with other values."""
    for field in event:
        rest = {name: value for name, value in event.items() if name != field}
        yield from (rest, {**rest, f"{field}z": event[field]})
        for other in ("x", [], {}, None, 1.5, -3, math.nan, 1e999, 1 << 70, ["x"], {"x": "y"}):
            yield {**event, field: other}


@pytest.mark.slow
def test_no_change_of_a_field_is_a_traceback(tmp_path):
    path = make_run(tmp_path / "digits", samples=1280, epochs=1, outcome="failed")
    log, refused = list(read_events(path / "events.jsonl")), 0
    firsts = {event["event"]: number for number, event in enumerate(log)}  # one of each name
    for number in firsts.values():
        for event in every_change(log[number]):
            write_events(path, [*log[:number], event, *log[number + 1 :]])
            try:
                folder = RunFolder(path)
            except RunError as error:
                refused += f"events.jsonl is damaged: in line {number + 1} " in str(error)
                continue
            assert closing_lines(summarise(folder), folder)
            assert render(folder)
    assert refused > 100


def test_unknown_events_and_further_fields_are_left_alone(tmp_path):
    path = make_run(tmp_path / "digits")
    log = list(read_events(path / "events.jsonl"))
    more = {"time": BEGIN_S + 1, "event": "of_tomorrow", "metrics": "x", "job": 3}
    write_events(path, [more, *({**event, "further": [1]} for event in log)])
    folder = RunFolder(path)
    assert (folder.outcome, folder.last_step) == ("completed", 48)
    assert render(folder)


@pytest.mark.parametrize("name", ["events.jsonl", "ledger.bin", "steps.bin"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_in_the_place_of_a_file_is_named_and_never_waited_for(tmp_path, name, kind):
    path = make_run(tmp_path / "digits")
    (path / name).unlink()
    put(kind, path / name)
    with pytest.raises(RunError, match=f"{name} cannot be read: it is a {kind} and not a file"):
        RunFolder(path)


@pytest.mark.parametrize("seed", range(20))
def test_garbage_for_step_records_is_one_sentence(tmp_path, seed):
    run = make_run(tmp_path / "run")
    dice = np.random.default_rng(seed)
    steps = bytearray((run / "steps.bin").read_bytes())
    at, size = int(dice.integers(0, len(steps) - 500)), int(dice.integers(100, 500))
    steps[at : at + size] = dice.bytes(size)
    (run / "steps.bin").write_bytes(steps)
    with pytest.raises(RunError, match=r"steps\.bin is damaged: record \d+ of 96 is impossible"):
        RunFolder(run)


def test_times_that_cannot_be_make_no_run_unreadable(tmp_path):
    run = make_run(tmp_path / "run")
    steps = read_records(run / "steps.bin", STEPS).copy()
    losses = RunFolder(run).steps["loss"].tolist()
    for part, wrong in (("backward_s", -3.0), ("wait_s", np.nan), ("load_s", np.inf)):
        steps[part][5] = wrong
    steps.tofile(run / "steps.bin")
    folder = RunFolder(run)
    assert folder.steps["loss"].tolist() == losses
    assert folder.steps["backward_s"].min() == 0.0
    assert np.isfinite(summarise(folder)["seconds"])
    assert all(np.isfinite(folder.steps[f"{part}_s"]).all() for part in PARTS)


def test_steps_whose_records_are_gone_are_told_and_do_not_count_in_the_rate(tmp_path):
    path = make_run(tmp_path / "digits")
    assert summarise(RunFolder(path))["unrecorded_steps"] == 0
    assert gap_words(RunFolder(path)) == ""
    steps, rate = read_records(path / "steps.bin", STEPS), 3000 / (48 * 0.02)
    for kept, words in (
        (steps["step"] > 12, "of steps 1 to 12 are missing"),
        (steps["step"] < 48, "of step 48 are missing"),
        ((steps["step"] > 2) & (steps["step"] != 9), "of steps 1 to 2, 9 are missing"),
        (steps["step"] < 0, "the losses and times of all steps are missing"),
        ((steps["step"] > 2) & (steps["worker"] == 0), "of steps 1 to 2 are missing"),
    ):
        steps[kept].tofile(path / "steps.bin")
        folder = RunFolder(path)
        summary = summarise(folder)
        assert summary["unrecorded_steps"] == 48 - len(np.unique(steps["step"][kept]))
        (line,) = [line for line in closing_lines(summary, folder) if line.startswith("gap")]
        assert words in line
        assert words in render(folder)
        if kept.any():
            assert summary["samples_per_second"] == pytest.approx(rate, rel=0.25)
        else:
            assert summary["samples_per_second"] is None


def test_the_steps_of_a_lost_session_do_not_make_the_next_one_faster(tmp_path):
    path = make_run(tmp_path / "digits")
    steps, rate = read_records(path / "steps.bin", STEPS), 3000 / (48 * 0.02)
    steps[steps["step"] > 44].tofile(path / "steps.bin")
    assert summarise(RunFolder(path))["samples_per_second"] == pytest.approx(rate, rel=0.25)


def test_time_that_was_spent_twice_counts_in_the_rate(tmp_path):
    """Ten steps are trained, the last five of them again in a second session."""
    run = make_run(tmp_path / "run", steps=10, outcome=None)
    once = RunFolder(run).times.training_seconds()
    steps = read_records(run / "steps.bin", STEPS)
    again = steps[steps["step"] > 5].copy()
    again["begin"] += 100
    np.concatenate([steps, again]).tofile(run / "steps.bin")
    with (run / "events.jsonl").open("a") as log:
        begun = {"time": float(again["begin"].min()) - 1, "event": "run_started", "resumed_step": 5}
        log.write(json.dumps(begun) + "\n")
    folder = RunFolder(run)
    assert len(np.unique(folder.steps["step"])) == len(folder.steps) / 2 == 10
    assert folder.times.training_seconds() == pytest.approx(1.5 * once, rel=0.1)
    assert summarise(folder)["samples_per_second"] == pytest.approx(640 / (1.5 * once), rel=0.1)


def test_servers_are_told_from_workers_and_count_in_no_figure_of_workers(tmp_path):
    path = with_servers(make_run(tmp_path / "net", workers=4, outcome="failed"), 2, 3)
    events = list(read_events(path / "events.jsonl"))
    for event in events:
        if event["event"] == "worker_failed":
            event["worker"] = 3
    write_events(path, events)
    folder = RunFolder(path)
    assert (folder.members.servers, folder.members.team, folder.members.servers_at_the_end) == (
        {2, 3},
        2,
        2,
    )
    summary = summarise(folder)
    assert (summary["workers"], summary["servers"], summary["missing_samples"]) == (2, 2, 0)
    alone = summarise(RunFolder(with_servers(make_run(tmp_path / "other", workers=4))))
    assert summary["time"]["forward"] > 0 == alone["servers"]
    assert summary["time"]["wait"] < alone["time"]["wait"]  # worker 0 waits for nobody
    lines = closing_lines(summary, folder)
    assert any("2 workers and 2 servers" in line for line in lines)
    assert any("(server 3, step 49, forward)" in line for line in lines)
    page = render(folder)
    for said in (
        "0, 1; servers 2, 3",
        "parameter servers",
        "Not listed: servers 2, 3.",
        "server 3",
    ):
        assert said in page
    assert "worker 2" not in page
