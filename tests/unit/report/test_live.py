import io
import math
import re
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from instep import vocabulary
from instep.events import LEDGER, STEPS
from instep.job.mesh import MeshSpec
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.job.train import TrainSpec
from instep.report.figures.progress import Progress
from instep.report.terminal.live import LiveTable, PlainLines, make_view
from instep.report.terminal.screen import heading, notice, screen, waiting_for
from instep.report.terminal.status import follow


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self):
        return True


def job_of(workers=2, **train):
    train = {"global_batch": 64, "micro_batches": max(8, workers), **train}
    return JobSpec(recipe="a.py:recipe", workers=workers, train=TrainSpec(**train))


def progress_of(workers=2, clock=None, **train):
    return Progress(job_of(workers, **train), "digits", clock or Clock())


def records(first, stop, samples, *, work_s=None, step_s=0.01, loss=0.5):
    """Steps [first, stop), each dealt as `samples`, one number a worker."""
    count, workers = stop - first, len(samples)
    steps, ledger = np.zeros(count * workers, STEPS), np.zeros(count * workers, LEDGER)
    number, worker = np.repeat(np.arange(first, stop), workers), np.tile(range(workers), count)
    steps["step"] = ledger["step"] = number
    steps["worker"] = ledger["worker"] = worker
    steps["samples"] = ledger["stop"] = np.array(samples)[worker]
    steps["begin"] = 1e9 + (number - 1) * step_s
    steps["loss"] = loss
    work = np.array(work_s or [step_s] * workers)[worker]
    steps["forward_s"], steps["wait_s"] = work, step_s - work
    return ledger, steps


def event(name, **fields):
    return {"time": 1e9, "event": name, **fields}


def ready(worker, samples=640, last_step=30):
    return event(
        "worker_ready",
        worker=worker,
        device="cpu",
        threads=1,
        parameters=61_706,
        samples=samples,
        validation_samples=100,
        last_step=last_step,
        loader="inline",
        phases={"import": 2.1, "recipe": 0.3},
    )


def failed(worker, cause="ValueError: no"):
    place = {"where": "a.py:1", "line": "x"}
    fields = {"step": 7, "phase": "forward", "kind": "exception", "cause": cause, **place}
    return event("worker_failed", worker=worker, **fields)


def validated(**metrics):
    return event("validated", step=10, epoch=0, metrics=metrics, samples=100, seconds=0.5)


def saved(step=10):
    sizes = {"size_bytes": 740_000, "held_s": 0.006, "seconds": 0.1}
    return event("checkpoint_saved", step=step, path="runs/digits/checkpoints/10", **sizes)


def text(progress, width=80, height=24):
    return ["".join(piece for piece, _ in line) for line in screen(progress, width, height)]


# What is known


def test_the_length_of_a_run_is_what_its_workers_say():
    progress = progress_of(epochs=3)
    progress.event(ready(0, last_step=48))
    assert (progress.total, progress.epochs) == (48, 3)


def test_a_loop_of_the_users_own_has_no_known_length():
    progress = progress_of()
    progress.event(ready(0, last_step=None))
    progress.records(*records(1, 2, [32, 32]))
    assert (progress.total, progress.epochs, progress.eta_s) == (None, None, None)
    assert text(progress)[1] == "epoch 1  step 1"


def test_a_run_of_epochs_has_no_known_length_before_a_worker_is_ready():
    progress = progress_of(epochs=3)
    progress.records(*records(1, 2, [32, 32]))
    assert progress.total is None
    assert progress.eta_s is None
    assert text(progress)[1] == "epoch 1/3  step 1"


def test_rate_share_and_wait_are_those_of_the_records():
    progress = progress_of()
    progress.records(*records(1, 101, [16, 48], work_s=[0.004, 0.010]))
    rows, whole = progress.rows(12)
    by_name = {row.name: row for row in rows}
    assert by_name["0"].rate == pytest.approx(1600)
    assert by_name["1"].rate == pytest.approx(4800)
    assert by_name["0"].share == pytest.approx(0.25)
    assert by_name["0"].wait == pytest.approx(0.6)
    assert whole.rate == progress.samples_per_s == pytest.approx(6400)
    assert whole.share == pytest.approx(1)


def test_rates_are_the_same_however_the_records_are_cut_and_mixed():
    whole, cut = progress_of(), progress_of()
    ledger, steps = records(1, 41, [20, 44])
    whole.records(ledger, steps)
    mixed = np.random.default_rng(0).permutation(80).reshape(8, 10)
    for part in np.sort(mixed.ravel()).reshape(8, 10):
        cut.records(ledger[part][::-1], steps[part][::-1])
    assert cut.samples_per_s == pytest.approx(whole.samples_per_s, rel=1e-3)
    assert (cut.committed, cut.step) == (whole.committed, whole.step) == (40 * 64, 40)


def test_rates_follow_a_change_within_some_ten_seconds():
    progress = progress_of()
    progress.records(*records(1, 1001, [32, 32], step_s=0.01))
    for first in range(1001, 1601, 50):
        progress.records(*records(first, first + 50, [32, 32], step_s=0.05))
    assert progress.samples_per_s == pytest.approx(64 / 0.05, rel=0.15)


def test_the_loss_shown_is_the_mean_of_the_epoch_so_far():
    progress = progress_of()
    progress.event(ready(0, samples=1000))  # 16 steps an epoch, the last of 40 samples
    progress.records(*records(1, 15, [32, 32], loss=2.0))
    progress.records(*records(15, 17, [32, 32], loss=1.0))
    assert progress.loss == pytest.approx((14 * 64 * 2 + 64 + 40) / 1000)
    progress.records(*records(17, 18, [32, 32], loss=0.5))
    progress.records(*records(18, 19, [32, 32], loss=0.25))
    assert progress.loss == pytest.approx(0.375)
    progress.records(*records(17, 19, [32, 32], loss=0.25))  # told again, or computed again
    assert progress.loss == pytest.approx(0.375)


@pytest.mark.parametrize("length", [{"epochs": 4}, {"steps": 64}])
def test_the_loss_shown_counts_what_earlier_sessions_saw(length):
    earlier = np.arange(1, 11), np.full(10, 3.0)
    whole, resumed = progress_of(**length), Progress(job_of(**length), "digits", Clock(), earlier)
    whole.event(ready(0, samples=512))  # 8 steps an epoch
    resumed.event(ready(0, samples=512))
    whole.records(*records(1, 11, [32, 32], loss=3.0))
    for progress in (whole, resumed):
        progress.records(*records(11, 13, [32, 32], loss=1.0))
    assert resumed.loss == whole.loss == (2.0 if "epochs" in length else pytest.approx(32 / 12))


def test_at_the_end_of_an_epoch_it_is_what_the_workers_say_whatever_was_seen_of_it():
    """A resumed run sees the end of an epoch alone; some samples may have been skipped."""
    progress = progress_of()
    progress.event(ready(0, samples=1000))
    progress.records(*records(10, 17, [32, 32], loss=1.0))
    progress.event(event("epoch_finished", epoch=0, step=16, loss=1.5, samples=998))
    assert progress.loss == 1.5
    progress.records(*records(16, 18, [32, 32], loss=0.5))
    assert progress.loss == 0.5


def test_of_a_job_that_counts_steps_it_is_the_mean_of_the_last_hundred():
    progress = progress_of(steps=1000)
    progress.records(*records(1, 151, [32, 32], loss=2.0))
    progress.records(*records(151, 201, [32, 32], loss=1.0))
    assert progress.loss == pytest.approx(1.5)
    progress.event(event("epoch_finished", epoch=0, step=200, loss=7.0, samples=64))
    assert progress.loss == pytest.approx(1.5)
    assert "training loss 1.5000 (mean of the last 100 steps)" in text(progress)[2]


def test_a_loss_that_is_not_a_number_is_shown_as_such():
    progress = progress_of()
    progress.records(*records(1, 21, [32, 32], loss=math.nan))
    assert "training loss nan (mean of the epoch)" in text(progress)[2]


def test_eta_counts_the_steps_left_their_time_and_the_validations():
    progress = progress_of(epochs=10)
    progress.event(ready(0, last_step=100))
    progress.records(*records(1, 11, [32, 32], step_s=0.1))
    assert progress.eta_s == pytest.approx(90 * 0.1)
    progress.event(validated(loss=0.1))  # half a second for these ten steps
    assert progress.eta_s == pytest.approx(90 * (0.1 + 0.05))


def test_eta_ends_where_the_job_is_told_to_stop():
    progress = progress_of(steps=100, stop_after_steps=20)
    progress.records(*records(1, 11, [32, 32], step_s=0.1))
    assert progress.eta_s == pytest.approx(10 * 0.1)


# The screen


def full_progress(workers=4):
    clock = Clock()
    progress = progress_of(workers, clock, epochs=10)
    for worker in range(workers):
        progress.event(event("worker_joined", worker=worker, pid=1, seconds=1.0))
        progress.event(ready(worker, samples=64_000, last_step=10_000))
        traffic = {"sent_bytes": 30_900_000, "received_bytes": 123_456_789}
        progress.event(event("traffic", worker=worker, **traffic))
    work_s = [0.004] * (workers - 1) + [0.010]
    progress.records(*records(1, 2115, [32] * (workers - 1) + [8], work_s=work_s))
    progress.event(validated(accuracy=0.951, loss=0.187))
    progress.event(saved(2100))
    clock.now += 3
    return progress


def test_the_heading_names_the_mesh():
    job = JobSpec(recipe="net.py:f", workers=4, mesh=MeshSpec(shard=2, tensor=2))
    progress = Progress(job, "digits", Clock())
    assert "4 workers   all_reduce   mesh shard = 2, tensor = 2   batch" in heading(progress, 100)


def test_the_screen_at_80_columns():
    lines = text(full_progress(2))
    assert [re.sub(r"[━─]+", "(bar)", line.rstrip()) for line in lines] == [
        "digits   2 workers   all_reduce   batch 64   64,000 samples   61,706 parameters",
        "epoch 1/10  step 2,114/10,000  (bar)   21 %  eta 1m21s",
        "training loss 0.5000 (mean of the epoch)",
        "validation  accuracy 0.9510  loss 0.1870   at step 10",
        "",
        "worker    state         samples/s   share    wait      sent   received",
        "1         slow 10.0x          800    20 %     0 %   30.9 MB     123 MB",
        "0         training          3,200    80 %    60 %   30.9 MB     123 MB",
        "all       2 training        4,000   100 %    30 %   61.8 MB     247 MB",
        "",
        "committed 84,560 samples   checkpoint at step 2,100, 3 s ago   running 3 s",
    ]


@pytest.mark.grid
@pytest.mark.parametrize("workers", [1, 4, 16, 64])
@pytest.mark.parametrize("width", [1, 20, 60, 80, 200])
@pytest.mark.parametrize("height", [2, 10, 24, 50])
def test_the_screen_fits_any_terminal(workers, width, height):
    for progress in (full_progress(workers), progress_of(workers)):
        lines = text(progress, width, height)
        assert max(map(len, lines)) <= width
        assert len(lines) < height


def test_at_60_columns_no_column_is_lost():
    header = next(line for line in text(full_progress(), 60) if line.startswith("worker"))
    assert header.split() == ["worker", "state", "samples/s", "share", "wait", "sent", "received"]


def test_the_slowest_come_first_and_those_beyond_twelve_rows_are_one_row():
    progress = full_progress(16)
    rows, whole = progress.rows(12)
    assert len(rows) == 12
    assert rows[0].name == "15"
    assert rows[0].state.startswith("slow")
    assert rows[-1].name == "5 more"
    assert sum(row.rate for row in rows) == pytest.approx(whole.rate)
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_a_failed_worker_stands_first_and_no_longer_counts():
    progress = full_progress(3)
    progress.event(failed(0))
    progress.event(event("process_ended", worker=0, pid=1, code=1))
    rows, whole = progress.rows(12)
    assert (rows[0].name, rows[0].state, rows[0].rate) == ("0", "failed", 0)
    assert whole.state == "2 training"
    assert sum(row.share for row in rows[1:]) == pytest.approx(1)


def test_a_worker_that_is_not_heard_of_is_called_quiet():
    progress = full_progress(2)
    progress.clock.now += 9
    assert {row.state for row in progress.rows(12)[0]} == {"quiet 12 s"}


def test_a_worker_without_a_share_of_the_work_is_not_called_slow():
    progress = progress_of(3)
    progress.records(*records(1, 11, [32, 32, 0], work_s=[0.01, 0.01, 0.001]))
    assert {row.state for row in progress.rows(12)[0]} == {"training"}


def test_the_start_up_says_what_it_waits_for():
    progress = progress_of(3)
    assert "waiting for workers 0, 1, 2 to join" in text(progress)
    for worker in range(3):
        progress.event(event("worker_joined", worker=worker, pid=1, seconds=1.0))
    progress.event(ready(1))
    lines = text(progress)
    assert "starting   3 of 3 joined, 1 ready   0 s" in lines
    assert "waiting for workers 0, 2 to load the model and the data" in lines
    assert [line.split()[:2] for line in lines[5:8]] == [
        ["0", "joined"],
        ["2", "joined"],
        ["1", "ready"],
    ]
    assert "import 2.1 s  recipe 300 ms" in lines[7]
    progress.event(ready(0))
    progress.event(ready(2))
    assert "waiting for the first step" in text(progress)


# Plain lines


def plain(workers=2, **train):
    stream, clock = io.StringIO(), Clock()
    return PlainLines(progress_of(workers, clock, **train), stream), stream, clock


def test_a_log_tells_a_run_in_lines_that_can_be_searched():
    view, stream, clock = plain(epochs=3)
    started = {"job": {}, "command": "", "host": "", "recipe_sha256": "", "versions": {}}
    view.event(event("run_started", **started))
    view.event(event("worker_joined", worker=0, pid=1, seconds=1.0))
    view.tick(clock.now)
    clock.now += 6
    view.tick(clock.now)
    view.event(event("generation_started", generation=0, members=[0, 1], reason="start", seconds=1))
    view.event(ready(0))
    view.event(ready(1))
    view.records(*records(1, 11, [32, 32]))
    view.tick(clock.now)
    view.event(event("epoch_finished", epoch=0, step=10, loss=0.5, samples=640))
    view.event(validated(accuracy=0.951))
    view.event(saved())
    view.event(event("warning", text="slow disk"))
    view.event(failed(1, cause="the whole story"))
    view.event(event("stop_requested", by="Ctrl-C", rule=None))
    why = "accuracy 0.98 reached the target 0.97"
    view.event(event("stop_requested", by="master", rule="target", step=1200, why=why))
    view.close()
    assert stream.getvalue().splitlines() == [
        "digits   2 workers   all_reduce   batch 64",
        "starting  waiting for worker 1 to join  6 s",
        "ready in 6.0 s  2 workers on cpu  61,706 parameters  640 samples",
        "epoch 1/3  step 10/30  training loss 0.5000  6,400 samples/s  eta 0 s",
        "epoch 1/3 finished  step 10  training loss 0.5000 (mean of the epoch)  640 samples",
        "validated  step 10  accuracy 0.9510  in 500 ms",
        "checkpoint  step 10  runs/digits/checkpoints/10  740 kB  training paused 6.0 ms",
        "warning: slow disk",
        "worker 1 failed at step 7 (forward)",
        "stopping after the current step, as Ctrl-C asked",
        "stopping: accuracy 0.98 reached the target 0.97, at step 1,200",
    ]


def test_progress_is_said_at_the_first_step_and_then_every_five_seconds():
    view, stream, clock = plain(steps=10_000)
    for first in range(1, 4001, 25):
        view.records(*records(first, first + 25, [32, 32]))
        view.tick(clock.now)
        clock.now += 0.25
    view.close()
    steps = re.findall(r"step ([\d,]+)/10,000", stream.getvalue())
    assert steps[0] == "25"
    assert steps[-1] == "4,000"
    assert len(steps) == 1 + 160 // 20 + 1 - 1


def test_nothing_is_said_twice_while_no_step_is_done():
    view, stream, clock = plain(steps=100)
    view.records(*records(1, 11, [32, 32]))
    for _ in range(100):
        view.tick(clock.now)
        clock.now += 1
    view.close()
    assert len(stream.getvalue().splitlines()) == 1


def test_a_change_of_members_is_said_but_not_the_first_generation():
    view, stream, _ = plain()
    for generation, members, reason in ((0, [0, 1], "start"), (1, [0], "worker 1 failed")):
        fields = {"generation": generation, "members": members, "reason": reason, "seconds": 0.1}
        view.event(event("generation_started", **fields))
    assert stream.getvalue() == "continuing with worker 0 (worker 1 failed)\n"


@given(st.text())
def test_no_text_of_a_user_brings_a_control_character_or_a_second_line(words):
    view, stream, _ = plain()
    view.event(event("warning", text=words))
    view.event(validated(**{words: None}))
    lines = stream.getvalue().split("\n")
    assert len(lines) == 3
    assert all(line.isprintable() for line in lines)


# The table on a terminal


@pytest.fixture
def terminal(monkeypatch):
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "80", "LINES": "24"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_terminal_gets_the_table_and_everything_else_gets_lines(terminal, tmp_path, monkeypatch):
    assert isinstance(make_view(job_of(), tmp_path, stream=terminal), LiveTable)
    assert isinstance(make_view(job_of(), tmp_path, stream=terminal, json=True), PlainLines)
    assert isinstance(make_view(job_of(), tmp_path, stream=io.StringIO()), PlainLines)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(make_view(job_of(), tmp_path, stream=terminal), PlainLines)


def test_the_table_is_redrawn_at_most_twice_a_second(terminal):
    clock = Clock()
    view = LiveTable(full_progress(), terminal)
    for _ in range(40):
        view.tick(clock.now)
        clock.now += 0.25
    assert terminal.getvalue().count("digits") == 20


def test_the_cursor_is_hidden_while_the_table_lives_and_shown_after_it(terminal):
    view = LiveTable(full_progress(), terminal)
    view.tick(0.0)
    assert terminal.getvalue().rfind("\x1b[?25l") > terminal.getvalue().rfind("\x1b[?25h")
    view.close()
    view.close()
    assert terminal.getvalue().endswith("\n\x1b[?25h")


def test_the_cursor_comes_back_even_when_drawing_fails(terminal):
    progress = full_progress()
    view = LiveTable(progress, terminal)
    view.tick(0.0)
    progress.job = None
    with pytest.raises(AttributeError):
        view.close()
    assert terminal.getvalue().endswith("\x1b[?25h")


def test_a_notice_stays_above_the_table_and_keeps_its_whole_text(terminal):
    view = LiveTable(full_progress(), terminal)
    view.tick(0.0)
    view.event(event("warning", text="word " * 40 + "\x1b[2J end"))
    view.event(failed(1, cause="the whole story"))
    view.close()
    written = terminal.getvalue()
    assert written.count("word") == 40
    assert "worker 1 failed at step 7 (forward)" in written
    assert "the whole story" not in written
    assert "\x1b[2J" not in written


def test_a_worker_that_failed_at_nobody_knows_what_is_named_without_that():
    gone = {**failed(1), "phase": ""}
    assert notice(gone) == "worker 1 failed at step 7"
    assert notice(failed(1)) == "worker 1 failed at step 7 (forward)"


def test_no_colour_is_used_where_none_is_wanted(terminal, monkeypatch):
    coloured = re.compile(r"\x1b\[[\d;]*3[0-7]")
    LiveTable(full_progress(), terminal).close()
    assert coloured.search(terminal.getvalue())
    monkeypatch.setenv("NO_COLOR", "1")
    plain_terminal = Terminal()
    LiveTable(full_progress(), plain_terminal).close()
    assert not coloured.search(plain_terminal.getvalue())


def test_a_terminal_without_unicode_gets_a_bar_that_it_can_draw(terminal):
    terminal.encoding = "ascii"
    LiveTable(full_progress(), terminal).close()
    assert terminal.getvalue().isascii()
    assert "##" in terminal.getvalue()


def test_reading_a_view_imports_neither_torch_nor_rich():
    code = (
        "import sys, instep.report.terminal.live\n"
        "sys.exit('torch' in sys.modules or 'rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_run_that_shares_its_work_by_another_rule_says_so():
    job = JobSpec(recipe="a.py:recipe", sync=SyncSpec(name="averaging"))
    assert "averaging" in text(Progress(job, "digits", Clock()))[0]


def test_a_server_is_shown_as_one_behind_the_workers_and_never_as_slow():
    sync = SyncSpec(name="server_sync")
    progress = Progress(msgspec.structs.replace(job_of(2), sync=sync), "net", clock := Clock())
    assert waiting_for(progress) == "waiting for workers 0, 1, server 2 to join"
    for worker, role in enumerate(("worker", "worker", "server")):
        progress.event(event("worker_joined", worker=worker, role=role))
    assert waiting_for(progress).startswith("waiting for workers 0, 1, server 2 to load")
    progress.records(*records(1, 9, [32, 32, 0], work_s=[0.01, 0.002, 0.0]))
    rows, whole = progress.rows(9)
    assert [(row.name, row.state) for row in rows] == [
        ("0", "slow 5.0x"),
        ("1", "training"),
        ("2", "serving"),
    ]
    assert (rows[2].rate, rows[2].share, whole.state) == (0.0, 0.0, "2 training")
    assert math.isfinite(progress.samples_per_s)
    clock.now += 100
    assert progress.rows(9)[0][2].state.startswith("quiet")
    text = "\n".join("".join(piece for piece, _ in line) for line in screen(progress, 100, 40))
    assert "2 workers and 1 server   server_sync" in text


def test_a_notice_about_a_server_names_it_as_one():
    gone = event("worker_failed", worker=2, step=7, phase="")
    assert notice(gone, servers={2}) == "server 2 failed at step 7"
    formed = event("generation_started", members=[0, 1, 3, 2], reason="why", generation=4)
    said = notice(formed, generations=2, servers={2})
    assert said == "continuing with workers 0, 1, 3, server 2 (why)"


def test_processes_that_wait_for_the_rest_of_their_replica_say_so():
    waits = {"event": "replica_waits", "replica": 1, "workers": [4, 7], "missing": [5]}
    assert notice(waits) == "replica 1 waits for worker 5 (it has workers 4, 7)"


def test_fields_that_no_reader_needs_may_be_missing():
    """As a copy of a run by an older version, or one that somebody has shortened, has it."""
    values = {"metrics": {}, "values": {}, "members": [0, 1], "path": "a", "phase": "pass"}
    progress = progress_of()
    for name, needed in vocabulary._NEEDED.items():
        event = {"event": name, "time": 1.0} | {field: values.get(field, 1) for field in needed}
        if not vocabulary.wrong_in(event):
            progress.event(event)
            notice(event, generations=2)
    assert notice({"event": "worker_failed", "worker": 1}) == "worker failed"
    assert progress.validated["step"] == 1
    assert len(screen(progress, 100, 30)) > 1


# Who is there


def generation(*members):
    return event("generation_started", members=list(members), generation=1, reason="start")


def ended(worker, code=0):
    return event("process_ended", worker=worker, pid=1, code=code)


def test_workers_that_left_keep_no_rate_and_no_share():
    progress = progress_of(workers=3)
    progress.event(generation(0, 1, 2))
    progress.records(*records(1, 101, [16, 16, 32]))
    for one in (1, 2):
        progress.event(ended(one))
    progress.event(generation(0))
    progress.records(*records(101, 201, [64], step_s=0.04))
    rows, whole = progress.rows(12)
    assert whole.rate == progress.samples_per_s == pytest.approx(1600)
    assert {row.name: (row.state, row.rate, row.share) for row in rows} == {
        "0": ("training", pytest.approx(1600), pytest.approx(1)),
        "1": ("left", 0, 0),
        "2": ("left", 0, 0),
    }


def test_one_that_ends_after_the_others_have_gone_on_has_left_too():
    progress = progress_of()
    progress.event(generation(0, 1))
    progress.event(generation(0))
    progress.event(ended(1))
    progress.records(*records(1, 2, [32, 32]))  # written by then, and read late
    progress.event(ended(0))
    assert progress.states == {0: "done", 1: "left"}
    assert [row.rate for row in progress.rows(12)[0]] == [pytest.approx(3200), 0]


def test_a_replacement_has_the_share_that_it_has_now():
    progress = progress_of()
    progress.event(generation(0, 1))
    progress.records(*records(1, 1001, [32, 32]))
    progress.event(failed(1))
    progress.event(generation(0, 1))
    progress.records(*records(1001, 1011, [32, 32]))
    assert [row.share for row in progress.rows(12)[0]] == pytest.approx([0.5, 0.5])


def test_a_session_knows_nothing_of_the_workers_before():
    clock = Clock()
    progress = progress_of(clock=clock)
    progress.event(generation(0, 1, 2))
    for worker in range(3):
        progress.event(ready(worker))
    progress.records(*records(1, 21, [16, 16, 32]))
    progress.event(ended(2, -9))
    clock.now += 600
    progress.event(event("run_started", resumed_step=20))
    assert (progress.steps_seen, progress.eta_s, progress.samples_per_s) == (False, None, 0)
    assert waiting_for(progress) == "waiting for workers 0, 1 to join"
    progress.event(generation(0, 1))
    progress.records(*records(21, 31, [32, 32]))
    rows, whole = progress.rows(12)
    assert [(row.name, row.share) for row in rows] == [("0", 0.5), ("1", 0.5)]
    assert whole.rate == pytest.approx(6400)


def test_an_epoch_that_is_told_late_does_not_take_the_place_of_the_next():
    progress = progress_of(epochs=2)
    progress.event(ready(0))
    progress.records(*records(1, 11, [32, 32], loss=1.0))
    progress.records(*records(11, 13, [32, 32], loss=0.5))
    progress.event(event("epoch_finished", epoch=0, step=10, loss=1.0, samples=640))
    assert progress.loss == pytest.approx(0.5)


@pytest.mark.parametrize("gap_s", [1.0, 300.0])
def test_what_was_is_told_in_the_order_in_which_it_was(gap_s):
    steps = records(1, 21, [16, 16, 32])[1]
    later = records(21, 31, [32, 32])[1]
    later["begin"] += gap_s
    end = float(steps["begin"].max()) + 0.01
    events = [
        {**generation(0, 1, 2), "time": 1e9 - 1},
        {**failed(2), "time": end + 0.1},
        {**generation(0, 1), "time": end + 0.2},
        {**saved(), "time": end + 0.3},
    ]
    progress = progress_of(workers=3)
    follow(progress, events, np.concatenate([later, steps]))
    rows, _ = progress.rows(12)
    assert {row.name: row.share for row in rows} == {"0": 0.5, "1": 0.5, "2": 0}
    assert (progress.clock(), progress.saved) == (100.0, (end + 0.3, events[-1]))
