"""A process that is stopped is found by whoever watches its role, and replaced like a dead one."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from started import RECIPES, TIMEOUT_S, Start, Started, kill, newest_pids, pid_of
from test_joining import slurm_task, summary_of
from test_recovery import check_as_if_nothing_had_been, undisturbed
from test_survival import begin, reach

from instep.events import read_events
from instep.system.lease import HUNG_S
from instep.system.processes import SPARE
from marks import slow

pytestmark = [pytest.mark.process, pytest.mark.cold]

__all__ = ["undisturbed"]  # the fixture
LONG = RECIPES / "joined_for_long.py"
NOTICED_S = 8.0
"""For a stopped process to be replaced: a lease of 1.2 s, and a start on a busy machine."""


def stop(pid: int) -> psutil.Process:
    """Stop a process; it is known by more than its number."""
    process = psutil.Process(pid)
    process.send_signal(signal.SIGSTOP)
    return process


def spares(program: Started) -> list[psutil.Process]:
    return [process for process in program.processes() if process.name() == SPARE]


def check_replaced(program: Started, stopped: psutil.Process, event: str, count: int) -> None:
    """That another has come within a bounded time, and that the stopped one was ended before."""
    began = time.monotonic()
    program.until(lambda: len(program.events(event)) > count, "its replacement")
    assert time.monotonic() - began < NOTICED_S
    assert not psutil.pid_exists(stopped.pid) or stopped.status() == psutil.STATUS_ZOMBIE


@pytest.mark.slow
def test_a_master_that_is_stopped_is_replaced_and_no_worker_starts_again(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    reach(program, 60)
    stopped = stop(pid_of(program, "master_started"))
    check_replaced(program, stopped, "master_started", 1)
    assert "it was stopped for 1." in program.events("master_started")[-1]["why"]
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert len(program.events("worker_joined")) == 3
    assert len(program.events("master_started")) == 2
    assert len({event["pid"] for event in program.events("host_joined")}) == 1


@pytest.mark.slow
def test_ctrl_c_stops_and_saves_a_run_whose_master_is_stopped(start: Start, tmp_path: Path) -> None:
    program = begin(start, tmp_path, 3, "train.steps=3000")
    program.until(program.is_training, "training")
    reach(program, 60)
    stop(pid_of(program, "master_started"))
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert program.summary["outcome"] == "interrupted"
    assert program.summary["steps"] >= 60
    assert (program.run / "model.safetensors").is_file()
    program.check_no_process_is_left()


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_run_whose_master_is_stopped(start: Start, tmp_path: Path) -> None:
    program = begin(start, tmp_path, 3, "train.steps=3000")
    program.until(program.is_training, "training")
    stop(pid_of(program, "master_started"))
    program.process.send_signal(signal.SIGINT)
    time.sleep(0.1)  # two signals that come at once are one
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert program.summary["outcome"] == "interrupted"
    program.check_no_process_is_left()


@pytest.mark.slow
def test_a_master_that_waits_for_its_disk_is_replaced(start: Start, tmp_path: Path) -> None:
    # a checkpoint syncs the job file too, and its writer would take what is meant for the master
    program = begin(start, tmp_path, 3, "train.steps=1200", 'checkpoint.every="never"')
    program.until(program.is_training, "training")
    job, aside = program.run / "job.toml", program.run / "job.aside"
    job.rename(aside)
    os.mkfifo(job)  # whoever opens it to read waits for one who writes
    first = pid_of(program, "master_started")
    kill(first)
    program.until(lambda: bool(of_a_master(program) - {first}), "another master")
    (second,) = of_a_master(program) - {first}
    began = time.monotonic()
    program.until(lambda: bool(of_a_master(program) - {first, second}), "a third master")
    assert time.monotonic() - began < HUNG_S + NOTICED_S
    text = aside.read_text()
    job.write_text(text)  # as soon as the third master waits for it
    aside.replace(job)
    assert program.end() == 0, program.stderr
    assert "it gave no sign of life for 1" in program.events("master_started")[-1]["why"]
    assert len(program.events("worker_joined")) == 3


def of_a_master(program: Started) -> set[int]:
    """Pids of processes that are masters, or on the way."""
    found = set()
    for process in program.processes():
        with contextlib.suppress(psutil.Error):
            if "instep.control.master_process" in process.cmdline():
                found.add(process.pid)
    return found


@pytest.mark.slow
def test_a_run_whose_output_is_not_read_trains(tmp_path: Path) -> None:
    """As under a pager that is paused: what is printed fills the pipe, and nobody waits for it."""
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "unread"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\n'
        "[train]\nsteps = 40\nglobal_batch = 16\n"
    )
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x")
    os.set_blocking(write, True)
    command = [sys.executable, "-m", "instep", "run", str(job), "--runs", str(tmp_path / "runs")]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=write) as program:
        try:
            assert program.wait(TIMEOUT_S) == 0
        finally:
            os.close(read)
            os.close(write)
            program.kill()
    assert len(masters(tmp_path / "runs" / "unread")) == 1
    assert summary_of(tmp_path / "runs" / "unread")["steps"] == 40


@pytest.mark.slow
@pytest.mark.parametrize("role", ["both", "host"])
def test_a_worker_that_is_lost_beside_a_stopped_fork_server_is_replaced(
    start: Start, tmp_path: Path, undisturbed: Path, role: str
) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    reach(program, 40)
    host, (spare,) = pid_of(program, "host_joined"), spares(program)
    stop(host)
    if role == "both":
        stop(spare.pid)
    kill(newest_pids(program)[1])
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert len(program.events("worker_joined")) == 4
    assert len(program.events("host_joined")) == 2
    program.check_no_process_is_left()


@pytest.mark.slow
def test_a_spare_that_is_stopped_is_replaced(start: Start, tmp_path: Path) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    (spare,) = spares(program)
    stop(spare.pid)
    program.until(
        lambda: [p.pid for p in spares(program)] not in ([], [spare.pid]), "another spare"
    )
    kill(pid_of(program, "host_joined"))
    program.until(lambda: len(program.events("host_joined")) > 1, "another host")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert len(program.events("worker_joined")) == 3


@pytest.mark.slow
def test_workers_that_wait_for_a_stopped_one_end_once_no_master_can_come(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path, 3, "data.loaders=0")
    program.until(program.is_training, "training")
    reach(program, 40)
    stopped = stop(newest_pids(program)[0])
    would_end_them = [*spares(program), psutil.Process(pid_of(program, "host_joined"))]
    for process in would_end_them:
        process.suspend()  # a master that finds it dead ends the workers as well
    program.process.kill()
    program.process.wait()
    for process in would_end_them:
        process.kill()
    _, alive = psutil.wait_procs(set(program.processes()) - {stopped}, timeout=TIMEOUT_S)
    assert [process.pid for process in alive] == []
    stopped.send_signal(signal.SIGCONT)
    program.check_no_process_is_left()


def joined(start: Start, folder: Path, steps: int) -> list[Started]:
    """Two tasks of Slurm that train; the first is process 0."""
    both = [start(LONG, folder, steps, 0.006, environment=slurm_task(number)) for number in (0, 1)]
    ledger = folder / "long" / "ledger.bin"
    both[0].until(lambda: ledger.is_file() and ledger.stat().st_size > 0, "training")
    return both


def masters(run: Path) -> list[int]:
    """The pids of a run's masters, one after the other."""
    events = read_events(run / "events.jsonl")
    return [int(e["pid"]) for e in events if e["event"] == "master_started"]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGSTOP, slow(signal.SIGKILL)])
def test_the_master_of_joined_processes_is_replaced(
    start: Start, tmp_path: Path, number: signal.Signals
) -> None:
    alone = start(LONG, tmp_path / "alone", 120, 0.001)
    both, run = joined(start, tmp_path / "runs", 120), tmp_path / "runs" / "long"
    os.kill(masters(run)[0], number)
    both[0].until(lambda: len(masters(run)) > 1, "another master")
    for program in (alone, *both):
        assert program.end() == 0, program.stderr
        program.check_no_process_is_left()
        program.check_no_file_is_left()
    one, two = summary_of(tmp_path / "alone" / "long"), summary_of(run)
    assert (one["workers"], two["workers"]) == (1, 2)
    assert two["parameters_sha256"] == one["parameters_sha256"]
    assert two["repeated_samples"] == two["missing_samples"] == 0
    assert (two["outcome"], two["steps"], two["generations"]) == ("completed", 120, 1)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["long"]


@pytest.mark.slow
def test_joined_processes_whose_master_is_killed_while_they_meet_train(
    start: Start, tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    both = [start(LONG, runs, 5, 0.001, environment=slurm_task(number)) for number in (0, 1)]
    log = runs / "long" / "events.jsonl"
    both[0].until(lambda: log.is_file() and "worker_joined" in log.read_text(), "joining")
    while '"generation_started"' not in log.read_text():
        pass
    kill(masters(runs / "long")[0])
    for program in both:
        assert program.end() == 0, program.stderr
    assert summary_of(runs / "long")["outcome"] == "completed"
    assert len(masters(runs / "long")) == 2


@pytest.mark.slow
def test_no_joined_process_is_left_if_process_0_is_killed(start: Start, tmp_path: Path) -> None:
    zero, one = joined(start, tmp_path / "runs", 100_000)
    zero.process.kill()
    zero.process.wait()
    zero.check_no_process_is_left()
    assert one.end() != 0
    one.check_no_process_is_left()


@pytest.mark.slow
def test_a_joined_process_that_raises_beside_a_stopped_master_ends_all_with_the_cause(
    start: Start, tmp_path: Path
) -> None:
    both, run = joined(start, tmp_path / "runs", -30), tmp_path / "runs" / "long"
    stop(masters(run)[0])
    for program in both:
        assert program.end() != 0
        program.check_no_process_is_left()
    assert "worker 1 failed at step " in both[0].stderr
    assert summary_of(run)["outcome"] == "failed"
