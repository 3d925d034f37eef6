"""A worker that is stopped where nobody can take its place: the run ends, and says why."""

import signal
import time
from pathlib import Path

import psutil
import pytest
from started import RECIPES, Start
from test_joining import slurm_task, summary_of
from test_leases import LONG, joined, stop

from instep.control.watch import SILENT_S
from instep.events import read_events

pytestmark = pytest.mark.process

LOOP = RECIPES / "loops_for_long.py"
LATER_S = 20.0
"""How long after its time the end may come: a report is written, on a busy machine."""


@pytest.mark.slow
def test_a_joined_worker_that_is_stopped_ends_the_run_for_all(start: Start, tmp_path: Path) -> None:
    """One run trains a recipe, and loses task 1; the other is an own loop, and loses process 0."""
    recipe = joined(start, tmp_path / "recipe", 100_000)
    runs = tmp_path / "loop"
    loop = [start(LOOP, runs, environment=slurm_task(number)) for number in (0, 1)]
    loop[0].until(lambda: any((runs / "long" / "checkpoints").glob("step-*")), "training")
    began = time.monotonic()
    pids = [stop(recipe[1].process.pid).pid, stop(loop[0].process.pid).pid]
    for program, worker, pid in ((recipe[0], 1, pids[0]), (loop[1], 0, pids[1])):
        assert program.end(SILENT_S + LATER_S) != 0
        assert time.monotonic() - began > SILENT_S
        assert f"worker {worker} failed" in program.stderr
        assert f"its process (pid {pid} on " in program.stderr
        assert "gave no sign of life for 1m0" in program.stderr
        assert "while others did: it was stopped (SIGSTOP, Ctrl-Z)" in program.stderr
    assert "to resume: start its script again with instep.join(" in loop[1].stderr
    for program in (recipe[1], loop[0]):  # it cannot end by itself
        assert program.end(LATER_S) == -signal.SIGKILL
    for program in (*recipe, *loop):
        program.check_no_process_is_left()
    assert summary_of(tmp_path / "recipe" / "long")["outcome"] == "failed"


@pytest.mark.slow
def test_a_loader_process_of_a_joined_worker_that_is_stopped_is_replaced(
    start: Start, tmp_path: Path
) -> None:
    program = start(LONG, tmp_path / "runs", 200, 0.002, 2)
    run = tmp_path / "runs" / "long"
    program.until(lambda: (run / "ledger.bin").is_file(), "training")
    (told,) = (e for e in read_events(run / "events.jsonl") if e["event"] == "loaders_started")
    stop(told["pids"][0])
    assert program.end() == 0, program.stderr
    assert summary_of(run)["missing_samples"] == summary_of(run)["repeated_samples"] == 0
    program.check_no_process_is_left()


@pytest.mark.slow
def test_joined_workers_that_are_all_stopped_for_a_moment_go_on(
    start: Start, tmp_path: Path
) -> None:
    """As after Ctrl-Z of the whole job, and fg."""
    both = joined(start, tmp_path / "runs", 60)
    stopped = [stop(program.process.pid) for program in both]
    for process in stopped:
        while process.status() != psutil.STATUS_STOPPED:
            pass  # a moment after the signal
        process.send_signal(signal.SIGCONT)
    for program in both:
        assert program.end() == 0, program.stderr
    assert summary_of(tmp_path / "runs" / "long")["outcome"] == "completed"
