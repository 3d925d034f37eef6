"""Not only workers are lost: master, fork server, spare and all of them at once; nobody notices."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from started import RECIPES, Start, Started, kill, newest_pids, pid_of
from test_recovery import check_as_if_nothing_had_been, undisturbed

from instep.data.cores import cores
from instep.events import STEPS, read_records
from instep.system.limits import UNKNOWN_S
from marks import slow

pytestmark = [pytest.mark.process, pytest.mark.cold]

__all__ = ["undisturbed"]  # the fixture
STEPS_OF_A_RUN = 300


def begin(start: Start, folder: Path, workers: int = 3, *settings: str) -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\n'
        f"workers = {workers}\nseed = 5\n"
        f"[train]\nsteps = {STEPS_OF_A_RUN}\nglobal_batch = 16\n"
        'determinism = "bits"\nvalidate_every = 40\n[checkpoint]\nevery = 25\n'
        f"[arguments]\npause_s = {0.0012 * workers}\n"
    )
    sets = [part for setting in settings for part in ("--set", setting)]
    return start("-m", "instep", "run", job, *sets)


def step_of(program: Started) -> int:
    steps = program.work / "runs" / "disturbed" / "steps.bin"
    return int(read_records(steps, STEPS)["step"].max(initial=0))


def reach(program: Started, step: int) -> None:
    program.until(lambda: step_of(program) >= step, f"at step {step}")


@pytest.mark.slow
def test_a_master_that_is_killed_is_replaced_and_no_worker_starts_again(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    for count in range(1, 5):
        reach(program, 20 * count)
        kill(pid_of(program, "master_started"))
        program.until(lambda: len(program.events("master_started")) > count, "another master")  # noqa: B023
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert len(program.events("worker_joined")) == 3
    assert [e["again"] for e in program.events("master_started")] == [False, True, True, True, True]


@pytest.mark.slow
def test_a_fork_server_that_is_killed_leaves_its_workers_and_another_replaces_the_lost(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    for count in range(1, 3):
        reach(program, 60 * count)
        kill(pid_of(program, "host_joined"))
        program.until(lambda: len(program.events("host_joined")) > count, "another host")  # noqa: B023
        kill(newest_pids(program)[count])
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert len(program.events("worker_joined")) == 5


@pytest.mark.slow
def test_master_and_every_fork_server_that_are_killed_at_once_are_brought_up_again(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    reach(program, 60)
    workers = set(newest_pids(program).values())
    for process in program.processes():
        if process.pid not in workers and process.pid != program.process.pid:
            kill(process.pid)  # the master, the fork server and its spare
    program.until(lambda: len(program.events("host_joined")) > 1, "another host")
    kill(newest_pids(program)[1])
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.parametrize("kills", [4, slow(100)])
def test_any_process_but_the_client_may_be_killed_at_any_moment(
    start: Start, tmp_path: Path, undisturbed: Path, kills: int
) -> None:
    draw = random.Random(kills)
    program = begin(start, tmp_path, 3, "data.loaders=1")
    program.until(program.is_training, "training")
    killed = 0
    while killed < kills and program.process.poll() is None:
        time.sleep(draw.uniform(0.1, 0.6))  # the moment is what is drawn
        others = [p.pid for p in program.processes() if p.pid != program.process.pid]
        killed += bool(others) and kill(draw.choice(others))
    assert program.end() == 0, program.stderr
    check_as_if_nothing_had_been(program, undisturbed)
    assert killed >= min(kills, 10)


@pytest.mark.slow
def test_a_client_that_is_killed_after_its_fork_server_was_leaves_no_process(
    start: Start, tmp_path: Path
) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    kill(pid_of(program, "host_joined"))
    program.until(lambda: len(program.events("host_joined")) > 1, "another host")
    program.process.kill()
    program.process.wait()
    program.check_no_process_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [slow(1), 2])
def test_a_worker_that_is_stopped_is_named_and_replaced(
    start: Start, tmp_path: Path, undisturbed: Path, workers: int
) -> None:
    program = begin(start, tmp_path, workers)
    program.until(lambda: step_of(program) > 60, "training")
    os.kill(newest_pids(program)[workers - 1], signal.SIGSTOP)
    assert program.end() == 0, program.stderr
    (hung,) = program.events("worker_hung")
    assert hung["worker"] == workers - 1
    assert hung["how"].startswith("gave no sign of life for")
    (lost,) = program.events("worker_lost")
    assert "gave no sign of life" in lost["cause"]
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_that_all_stand_still_for_a_while_are_waited_for(
    start: Start, tmp_path: Path, undisturbed: Path, workers: int
) -> None:
    program = begin(start, tmp_path, workers)
    program.until(lambda: step_of(program) > 60, "training")
    pids = newest_pids(program).values()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    since = time.monotonic()
    program.until(lambda: time.monotonic() - since > 4.0, "four seconds later")
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
    assert program.end() == 0, program.stderr
    for name in ("worker_hung", "worker_lost", "went_back"):
        assert program.events(name) == []
    check_as_if_nothing_had_been(program, undisturbed)


def scale(program: Started, workers: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "instep", "scale", str(program.run), "--workers", str(workers)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


@pytest.mark.tail
def test_a_run_grows_and_shrinks_while_it_trains(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    held = tmp_path / "held"
    held.touch()
    program = begin(start, tmp_path, 2, f'arguments.held="{held}"')
    program.until(program.is_training, "training")
    for generation, workers in enumerate((4, 1, 3), start=2):
        done = scale(program, workers)
        assert done.returncode == 0, done.stderr
        program.until(
            lambda: len(program.events("generation_started")) >= generation,  # noqa: B023
            f"of {workers} workers",
        )
    held.unlink()
    assert program.end() == 0, program.stderr
    sizes = [len(e["members"]) for e in program.events("generation_started")]
    assert sizes == [2, 4, 1, 3]
    assert program.events("worker_lost") == []
    assert (tmp_path / "work" / "runs" / "disturbed" / "endpoint.json").exists() is False
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.slow
def test_workers_share_the_cores_by_the_number_that_the_run_was_scaled_to(
    start: Start, tmp_path: Path
) -> None:
    job, told = tmp_path / "job.toml", tmp_path / "told"
    told.mkdir()
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / "tells_threads.py"}:recipe"\nworkers = 1\n'
        "[train]\nsteps = 1000000\nglobal_batch = 16\n"
        f'[arguments]\nfolder = "{told}"\n'
    )
    program = start("-m", "instep", "run", job)
    program.until(lambda: any(told.iterdir()) and step_of(program) > 2, "training")
    done = scale(program, 2)
    assert done.returncode == 0, done.stderr
    program.until(lambda: len(newest_pids(program)) == 2, "of two workers")
    alone, newcomer = (told / str(pid) for _, pid in sorted(newest_pids(program).items()))
    half = f"{max(1, cores() // 2)}\n"
    program.until(lambda: newcomer.exists() and newcomer.read_text().endswith(half), "half each")
    program.until(lambda: alone.read_text().endswith(half), "half each")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert alone.read_text().startswith(f"{cores()}\n")


@pytest.mark.slow
def test_a_run_that_cannot_be_scaled_says_why(start: Start, tmp_path: Path) -> None:
    program = begin(start, tmp_path, 2, "train.steps=3000")
    program.until(program.is_training, "training")
    for workers, words in ((0, "needs 1 worker or more"), (9, "work for 8 at most")):
        done = scale(program, workers)
        assert done.returncode == 2
        assert words in done.stderr
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    done = scale(program, 3)
    assert done.returncode == 6
    assert "is not running" in done.stderr


@pytest.mark.slow
def test_a_worker_that_gets_notice_hands_over_and_no_step_is_lost(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 2)
    for step, worker in ((60, 0), (120, 1)):
        program.until(lambda: step_of(program) > step, "training")  # noqa: B023
        os.kill(newest_pids(program)[worker], signal.SIGTERM)
        program.until(
            lambda: len(program.events("generation_started")) > worker + 1,  # noqa: B023
            "handed over",
        )
    assert program.end() == 0, program.stderr
    assert [e["members"] for e in program.events("generation_started")] == [[0, 1], [1, 2], [0, 2]]
    assert program.events("worker_lost") == []
    assert [e["code"] for e in program.events("process_ended")][:2] == [0, 0]
    check_as_if_nothing_had_been(program, undisturbed)


@pytest.mark.slow
def test_the_only_worker_gets_notice_and_the_run_continues_with_another(
    start: Start, tmp_path: Path, undisturbed: Path
) -> None:
    program = begin(start, tmp_path, 1)
    program.until(lambda: step_of(program) > 60, "training")
    os.kill(newest_pids(program)[0], signal.SIGTERM)
    assert program.end() == 0, program.stderr
    members = [e["members"] for e in program.events("generation_started")]
    assert members == [[0], [0, 1], [1]]
    assert program.events("went_back") == []
    check_as_if_nothing_had_been(program, undisturbed)


def hanging(start: Start, folder: Path, how: str, once: Path) -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPES / "hangs_once.py"}:recipe"\nworkers = 2\n'
        '[train]\nsteps = 200\nglobal_batch = 16\nmerge = "never"\n'
        f'[arguments]\nhow = "{how}"\nonce = "{once}"\n'
    )
    return start("-m", "instep", "run", job)


@pytest.mark.parametrize("how", [slow(how) for how in ("loops", "holds", "reads")])
def test_a_worker_that_hangs_in_its_own_code_is_named_with_the_line_and_replaced(
    start: Start, tmp_path: Path, how: str
) -> None:
    program = hanging(start, tmp_path, how, tmp_path / "once")
    assert program.end() == 0, program.stderr
    (hung,) = program.events("worker_hung")
    if how != "holds":  # of one that can say nothing any more, the phase is that of its last sign
        assert hung["phase"] == ("loading" if how == "reads" else "forward")
    assert hung["how"].startswith("got nothing done" if how != "holds" else "gave no sign of life")
    assert float(hung["how"].split()[-2]) < UNKNOWN_S
    assert "hangs_once.py:" in hung["where"]
    assert f"in {'loops' if how == 'reads' else how}" in hung["where"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["is_stopped", "holds_early"])
def test_a_replacement_that_hangs_while_it_gets_ready_is_replaced_too(
    start: Start, tmp_path: Path, how: str
) -> None:
    once = tmp_path / "once"
    once.touch()
    program = hanging(start, tmp_path, how, once)
    program.until(program.is_training, "training")
    once.unlink()
    kill(newest_pids(program)[1])
    assert program.end() == 0, program.stderr
    (hung,) = program.events("worker_hung")
    assert (hung["worker"], hung["phase"]) == (1, "recipe")
    assert hung["how"].startswith("gave no sign of life for")
    assert "hangs_once.py:" in hung["where"]
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.slow
def test_the_table_of_a_second_master_knows_what_was_before(start: Start, tmp_path: Path) -> None:
    program = begin(start, tmp_path)
    program.until(program.is_training, "training")
    reach(program, 50)
    kill(pid_of(program, "master_started"))
    assert program.end() == 0, program.stderr
    assert "another one has replaced it" in program.stderr
    assert json.loads((program.run / "summary.json").read_text())["generations"] == 1
    assert psutil.pid_exists(pid_of(program, "master_started")) is False
