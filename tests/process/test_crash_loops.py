"""What ends a process again and again is named and ends the run, or is left out of it."""

import os
import re
import signal
from pathlib import Path

import pytest
from deadly import BATCH, FIRST, KNOWN_BY, MARKED, SAMPLES, SEED
from started import TIMEOUT_S, Start, Started

from instep.control.decisions.crash_loop import MOST_APART
from instep.store.run_folder import RunFolder
from instep.system.limits import UNKNOWN_S
from marks import long, slow

pytestmark = pytest.mark.process

FILE = f"pictures/img_{MARKED}.png"


def deadly(run: Start, how: str, workers: int, *settings: str) -> Started:
    return run(
        "deadly.py:recipe",
        *(f"seed={SEED}", f"train.global_batch={BATCH}", "train.threads=1", "train.epochs=2"),
        *('train.merge="always"', f'arguments.how="{how}"', f"workers={workers}", *settings),
    )


def failed(program: Started) -> str:
    """The first line of the error of a run that has failed, as it should."""
    code = program.end(2 * TIMEOUT_S)
    assert code in (4, 5), program.stderr
    assert program.stderr.count("instep: ") == 1
    program.check_nothing_is_left()
    return program.error.splitlines()[0]


@pytest.mark.tail
@pytest.mark.parametrize("workers", [slow(1), 2])
def test_a_sample_that_kills_its_reader_ends_the_run_and_is_named(run: Start, workers: int) -> None:
    program = deadly(run, "segfault", workers, "data.loaders=0")
    first = failed(program)
    assert program.process.returncode == 4
    assert "failed at step 12, in loading: the process was killed by SIGSEGV" in first
    assert f"while it read sample {MARKED} ({FILE})" in first
    assert "3 times" in first
    assert "data.unreadable = 'skip'" in first
    assert len(program.events("worker_lost")) in (2, 3)  # one more if nobody waited for it at first


@pytest.mark.slow
def test_a_sample_is_named_whatever_the_signal_is(run: Start) -> None:
    first = failed(deadly(run, "kill", 1, "data.loaders=0"))
    assert "killed by SIGKILL" in first
    assert f"while it read sample {MARKED} ({FILE})" in first


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, slow(2)])
def test_a_sample_whose_read_ends_the_process_by_a_code_is_named_as_one_that_kills(
    run: Start, workers: int
) -> None:
    program = deadly(run, "exit", workers, "data.loaders=0")
    first = failed(program)
    assert program.process.returncode == 4
    assert "failed at step 12, in loading: the process ended with code 3 and said nothing" in first
    assert f"while it read sample {MARKED} ({FILE})" in first
    assert "3 times" in first
    assert "data.unreadable = 'skip'" in first


@pytest.mark.slow
@pytest.mark.parametrize("loaders", [1, slow(2)])
def test_a_sample_that_kills_loader_processes_ends_the_run_and_is_named(
    run: Start, loaders: int
) -> None:
    program = deadly(run, "segfault", 2, f"data.loaders={loaders}")
    first = failed(program)
    assert program.process.returncode == 4
    assert "in loading: a loader process (pid " in first
    assert f"was killed by SIGSEGV while it read sample {MARKED} ({FILE})." in first
    assert "3 times" in first
    assert "data.unreadable = 'skip'" in first
    assert program.events("worker_lost") == []


@pytest.mark.slow
def test_a_group_that_never_forms_for_lack_of_memory_ends_the_run_with_the_systems_error(
    run: Start,
) -> None:
    program = run("no_threads.py:recipe", "train.threads=1", "data.loaders=0")
    first = failed(program)
    assert program.process.returncode == 5
    assert "the group of 2 workers did not form: Resource temporarily unavailable." in first
    assert f"The group came apart {MOST_APART} times and no step was committed." in first
    assert "raise its limits" in first
    log = "".join(file.read_text() for file in (program.run / "logs").glob("worker-*.log"))
    assert log.count("instep: the group came apart: ") >= MOST_APART


@pytest.mark.tail
@pytest.mark.parametrize(
    ("workers", "how", "named"),
    [slow(1, "segfault", "SIGSEGV"), (2, "segfault", "SIGSEGV"), slow(2, "exit", "code 3")],
)
def test_a_sample_that_kills_its_reader_is_skipped_if_the_job_says_so(
    run: Start, workers: int, how: str, named: str
) -> None:
    program = deadly(run, how, workers, "data.loaders=0", 'data.unreadable="skip"')
    assert program.end() == 0, program.stderr
    assert len(program.events("worker_lost")) in (3, 4)
    folder = RunFolder(program.run)
    told = [(e["epoch"], e["index"]) for e in folder.skipped]
    assert told == [(0, MARKED), (1, MARKED)]
    assert named in folder.skipped[0]["cause"]
    assert program.summary["skipped_samples"] == 2
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    assert [e["samples"] for e in program.events("epoch_finished")] == [SAMPLES - 1] * 2
    program.check_nothing_is_left()


@pytest.mark.slow
def test_a_sample_that_never_ends_is_tried_twice_and_is_the_cause(run: Start) -> None:
    program = deadly(run, "loops", 1, "data.loaders=0", 'data.unreadable="skip"')
    assert program.end() == 0, program.stderr
    short, long = program.events("worker_hung")
    assert short["step"] == long["step"] == 12
    assert float(short["how"].split()[-2]) < 3.0
    # twice as long where other programs leave it less than half a processor
    assert UNKNOWN_S <= float(long["how"].split()[-2]) < 2 * UNKNOWN_S + 2.0
    (skipped, _) = RunFolder(program.run).skipped
    assert skipped["index"] == MARKED
    assert "kept its process busy without end" in skipped["cause"]
    assert "deadly.py:" in program.events("worker_lost")[-1]["cause"]
    assert f"sample {MARKED} ({FILE})" in program.events("worker_lost")[-1]["cause"]
    program.check_nothing_is_left()


@pytest.mark.parametrize(
    ("marked", "loaders"), [slow(KNOWN_BY, 0), long(KNOWN_BY, 1), long(FIRST, 0), long(FIRST, 1)]
)
def test_a_read_that_never_ends_before_the_first_step_is_the_cause_after_two_attempts(
    run: Start, marked: int, loaders: int
) -> None:
    program = deadly(run, "loops", 2, f"data.loaders={loaders}", f"arguments.marked={marked}")
    assert program.end(2 * TIMEOUT_S) == 4, program.stderr
    program.check_no_process_is_left()
    assert list(program.work.rglob("ledger.bin")) == []  # it is refused: no run has begun
    first = program.error.splitlines()[0]
    assert f"while it read sample {marked} (pictures/img_{marked}.png)" in first
    assert "times at this sample" in first
    assert "data.unreadable = 'skip'" in first


@pytest.mark.parametrize("loaders", [long(0), slow(1)])
def test_a_read_that_never_ends_before_the_first_step_is_skipped_if_the_job_says_so(
    run: Start, loaders: int
) -> None:
    settings = (f"data.loaders={loaders}", f"arguments.marked={KNOWN_BY}")
    program = deadly(run, "loops", 2, *settings, 'data.unreadable="skip"')
    assert program.end(3 * TIMEOUT_S) == 0, program.stderr
    assert {each["index"] for each in RunFolder(program.run).skipped} == {KNOWN_BY}
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.parametrize("marked", [long(KNOWN_BY), slow(FIRST)])
def test_a_read_that_loops_once_before_the_first_step_costs_one_restart(
    run: Start, tmp_path: Path, marked: int
) -> None:
    how = str(tmp_path / "once")
    program = deadly(run, how, 2, "data.loaders=0", f"arguments.marked={marked}")
    assert program.end() == 0, program.stderr
    (hung,) = program.events("worker_hung")
    (lost,) = program.events("worker_lost")
    assert (hung["step"], hung["phase"]) == (0, "loading")
    assert re.search(rf"while it read sample {marked}\b", lost["cause"])
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.slow
def test_a_loader_process_that_loops_once_costs_a_moment_and_no_worker(
    run: Start, tmp_path: Path
) -> None:
    program = deadly(run, str(tmp_path / "once"), 1, "data.loaders=2")
    assert program.end() == 0, program.stderr
    assert (tmp_path / "once").exists()
    for name in ("worker_hung", "worker_lost"):
        assert program.events(name) == []
    ready, ended = program.events("worker_ready")[0], program.events("run_finished")[0]
    assert ended["time"] - ready["time"] < UNKNOWN_S / 2
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.slow
def test_a_loader_process_that_is_stopped_is_replaced(run: Start) -> None:
    program = deadly(run, "", 1, "data.loaders=2", "train.epochs=50")
    program.until(
        lambda: (
            (program.work / "runs").is_dir()
            and any(program.work.glob("runs/*/events.jsonl"))
            and bool(program.events("generation_started"))
            and len(program.ledger) > 20
        ),
        "training",
    )
    os.kill(program.events("loaders_started")[0]["pids"][0], signal.SIGSTOP)
    assert program.end() == 0, program.stderr
    for name in ("worker_hung", "worker_lost"):
        assert program.events(name) == []
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.tail
@pytest.mark.parametrize("settings", [(), slow(("checkpoint.every=2",))])
def test_a_model_that_crashes_at_one_step_ends_the_run_though_no_worker_is_left(
    run: Start, settings: tuple[str, ...]
) -> None:
    program = deadly(run, "segfault", 1, 'arguments.at="model"', *settings)
    first = failed(program)
    assert "failed at step 8: the process was killed by SIGSEGV" in first
    assert "3 times" in first
    assert "sample" not in first
    assert len(program.events("went_back")) == 2


@pytest.mark.slow
def test_a_model_that_is_killed_at_one_step_ends_the_run_after_ten_times(run: Start) -> None:
    program = deadly(run, "kill", 1, 'arguments.at="model"')
    first = failed(program)
    assert "killed by SIGKILL" in first
    assert "It happened 10 times" in first
    assert "no step after 7 was committed" in first
