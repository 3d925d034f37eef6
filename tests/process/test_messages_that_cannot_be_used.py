"""A master outlives what it is sent, and the one who sends nonsense again and again is named."""

import json
from pathlib import Path

import pytest
from started import Start

pytestmark = pytest.mark.process


@pytest.mark.tail
def test_a_message_that_the_master_cannot_use_ends_its_sender_and_not_the_master(
    run: Start, tmp_path: Path
) -> None:
    program = run(
        "talks_nonsense.py:recipe",
        *("train.steps=300", "train.global_batch=16", "train.threads=1"),
        f"arguments.once={json.dumps(str(tmp_path / 'once'))}",
    )
    assert program.end() == 0, program.stderr
    assert len(program.events("master_started")) == 1
    (lost,) = program.events("worker_lost")
    assert (
        "sent a message that the master cannot use, 3 times (Records: ValueError" in lost["cause"]
    )
    (warning,) = (e for e in program.events("warning") if "cannot use" in e["text"])
    assert warning["text"].startswith(f"worker {lost['worker']} sent a message")
    assert program.summary["missing_samples"] == program.summary["repeated_samples"] == 0
    program.check_nothing_is_left()


@pytest.mark.slow
def test_a_master_that_dies_at_once_each_time_ends_the_run_after_a_few(
    start: Start, tmp_path: Path
) -> None:
    (tmp_path / "early").mkdir()
    (tmp_path / "early" / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'instep.control.master_process' in sys.orig_argv:\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = tmp_path / "job.toml"
    recipe = Path(__file__).parent / "recipes" / "tiny.py"
    job.write_text(f'name = "tested"\nrecipe = "{recipe}:recipe"\n')
    path = f"{tmp_path / 'early'}:{Path(__file__).parent.parent.parent / 'src'}"
    program = start("-m", "instep", "run", job, environment={"PYTHONPATH": path})
    assert program.end() == 6
    assert "the run's master ended within 2 s of its start 10 times in a row" in program.error
    assert "killed by SIGKILL" in program.error
    program.check_no_process_is_left()
