"""However a run ends, it says so, saves what it can, and leaves no process behind.

Every worker has a loader process too, so that grandchildren are left over if anything is.
"""

import json
import signal

import numpy as np
import pytest
from started import Start, Started

from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = [pytest.mark.process, pytest.mark.cold]

ENDLESS = ("train.steps=100000000", "train.global_batch=16", "train.threads=1", "data.loaders=1")


def training(run: Start, *settings: str) -> Started:
    """A run that would go on for ever, and that has begun to."""
    program = run("tiny.py:recipe", *ENDLESS, *settings)
    program.until(program.is_training, "training")
    return program


def pid_of_worker(program: Started, number: int) -> int:
    joined = program.events("worker_joined")
    return int(next(event["pid"] for event in joined if event["worker"] == number))


def last_step(program: Started) -> int:
    """The step at which every worker stopped; fails unless it is the same one."""
    ledger = program.ledger
    steps = {int(ledger["step"][ledger["worker"] == worker].max()) for worker in (0, 1)}
    (step,) = steps
    assert np.array_equal(np.unique(ledger["step"]), np.arange(1, step + 1))
    return step


def check_stopped_and_saved(program: Started, by: str) -> None:
    step = last_step(program)
    assert program.summary["steps"] == step
    assert program.summary["outcome"] == "interrupted"
    assert program.summary["repeated_samples"] == 0
    assert (program.run / "checkpoints" / f"step-{step:08d}" / "manifest.json").is_file()
    assert (program.run / "model.safetensors").is_file()
    assert [event["by"] for event in program.events("stop_requested")] == [by]
    assert f"next    instep resume {program.run}" in program.stdout
    assert "Traceback" not in program.stderr
    program.check_nothing_is_left()


def test_ctrl_c_once_stops_all_at_one_step_and_saves(run: Start) -> None:
    program = training(run)
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert program.listened == {"127.0.0.1"}
    check_stopped_and_saved(program, "SIGINT")


INTERRUPTED_IMPORT = """
import os, signal, sys
from instep.cli import run_main

class Finder:
    def find_spec(name, *_):
        if name == "instep.client.submit":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder)
run_main()
"""


@pytest.mark.parametrize("command", ["run", "resume"])
def test_ctrl_c_while_a_command_is_still_being_imported_is_one_line(
    start: Start, command: str
) -> None:
    """The signal comes at the moment at which the client's module is looked for."""
    program = start("-c", INTERRUPTED_IMPORT, command, "job.toml")
    assert program.end() == 130
    assert (program.stdout, program.stderr) == ("", "instep: interrupted.\n")
    program.check_no_process_is_left()


@pytest.mark.tail
@pytest.mark.parametrize("sent", [signal.SIGTERM, slow(signal.SIGUSR1), slow(signal.SIGUSR2)])
def test_what_a_cluster_sends_does_what_ctrl_c_does(run: Start, sent: signal.Signals) -> None:
    program = training(run, "train.merge=never")
    program.process.send_signal(sent)
    assert program.end() == 130
    check_stopped_and_saved(program, sent.name)


@pytest.mark.tail
def test_ctrl_c_twice_ends_at_once_even_if_a_worker_never_comes_back(run: Start) -> None:
    program = run("breaks.py:recipe", "arguments.at=hang", "train.global_batch=8")
    logs = program.work / "runs" / "tested" / "logs"
    program.until(
        lambda: any("for ever" in log.read_text() for log in logs.glob("worker-*.log")), "stuck"
    )
    program.process.send_signal(signal.SIGINT)
    program.until(lambda: len(program.events("stop_requested")) == 1, "asked")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert program.events("worker_hung") == [], "it was waited for"
    assert program.summary["outcome"] == "interrupted"
    assert program.summary["repeated_samples"] == 0
    assert "Traceback" not in program.stderr
    program.check_nothing_is_left()


def test_a_client_that_is_killed_leaves_no_process_and_a_folder_that_can_be_read(
    run: Start,
) -> None:
    program = training(run)
    program.process.kill()
    program.process.wait()
    program.check_nothing_is_left()
    folder = RunFolder(program.run)
    assert folder.outcome == "unfinished"
    assert folder.last_step > 0
    assert (folder.audit.repeated, folder.audit.stray) == (0, 0)
    assert not (program.run / "summary.json").exists()


@pytest.mark.slow
def test_a_job_stops_itself_after_a_step_although_its_recipe_left_a_thread_behind(
    run: Start,
) -> None:
    program = run(
        "leaves_a_thread.py:recipe",
        "train.stop_after_steps=3",
        "train.steps=50",
        options=("--json",),
    )
    assert program.end() == 0, program.stderr
    assert last_step(program) == 3
    summary = json.loads(program.stdout)
    assert (summary["outcome"], summary["rule"], summary["steps"]) == (
        "stopped",
        "stop_after_steps",
        3,
    )
    assert (program.run / "checkpoints" / "step-00000003").is_dir()
    program.check_nothing_is_left()
