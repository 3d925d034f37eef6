"""`instep run --check-determinism`: says yes where it is so, and otherwise what differs and why."""

import json
import os
import signal
import tempfile
from pathlib import Path

import pytest
from started import RECIPES, Start

from instep.cli import main
from instep.job import file as spec_file
from instep.lab.determinism import check_determinism
from marks import slow

pytestmark = pytest.mark.process

Out = pytest.CaptureFixture[str]


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files of this process and its children go."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def job_file(folder: Path, recipe: str, batch: int = 16) -> Path:
    job = folder / "job.toml"
    job.write_text(f'recipe = "{RECIPES / recipe}"\n[train]\nglobal_batch = {batch}\n')
    return job


def check(folder: Path, recipe: str, *options: str) -> int:
    return main(["run", str(job_file(folder, recipe)), "--check-determinism", *options])


@pytest.mark.slow
def test_a_recipe_with_the_same_bits_passes(tmp_path: Path, temporary: Path, capsys: Out) -> None:
    options = ("--workers", "3", "--json", "--set", "train.merge=always")
    assert check(tmp_path, "tiny.py:recipe", *options) == 0
    said = capsys.readouterr()
    assert "the same bits on 1 and 3 workers: losses and 9 tensors, after each of 3" in said.err
    answer = json.loads(said.out)
    assert answer["deterministic"] is True
    assert answer["difference"] is None
    assert list(temporary.iterdir()) == []
    assert sorted(tmp_path.iterdir()) == [tmp_path / "job.toml", temporary]


@pytest.mark.slow
def test_a_job_shorter_than_the_check_is_judged_on_its_whole_length(
    tmp_path: Path, capsys: Out
) -> None:
    assert check(tmp_path, "tiny.py:recipe", "--set", "train.steps=2") == 0
    assert "after each of 2 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "what", "why"),
    [
        slow("seeded", "the loss of step 1 is", "carried from batch to batch"),
        slow("unseeded", "the loss of step 1 is", "a generator without a seed"),
        slow("counting", "after step 1, 'body.bias' of the model differs", "carried from batch"),
    ],
)
def test_what_differs_is_named_with_where_to_look(
    tmp_path: Path, capsys: Out, model: str, what: str, why: str
) -> None:
    assert check(tmp_path, "carries_state.py:recipe", "--set", f"arguments.model={model}") == 3
    said = capsys.readouterr().out
    assert what in said
    assert why in said


def test_one_micro_batch_cannot_be_compared(tmp_path: Path, capsys: Out) -> None:
    options = ("--workers", "1", "--set", "train.micro_batches=1")
    assert check(tmp_path, "tiny.py:recipe", *options) == 2
    assert "there must be work for two" in capsys.readouterr().err


@pytest.mark.tail
def test_a_recipe_that_fails_is_reported_with_its_output_as_the_log_is_gone(
    tmp_path: Path, temporary: Path, capsys: Out
) -> None:
    options = ("--set", "arguments.at=forward", "--set", "train.global_batch=8")
    assert check(tmp_path, "breaks.py:recipe", *options) == 5
    said = capsys.readouterr().err
    assert "ValueError: the forward pass met the marked sample" in said
    assert "the end of worker-0.log:\n" in said
    assert "    Traceback (most recent call last):" in said
    assert "instep-check-" not in said
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_in_a_run_ends_the_check_without_a_verdict(start: Start, tmp_path: Path) -> None:
    job = job_file(tmp_path, "slow_tiny.py:recipe", batch=101)
    slow = ("--set", "data.loaders=0", "--set", "train.threads=1")
    program = start("-m", "instep", "run", job, "--check-determinism", *slow)
    temporary = tmp_path / "program-0" / "temporary"
    ledgers = "instep-check-*/0/*/ledger.bin"
    program.until(lambda: any(f.stat().st_size for f in temporary.glob(ledgers)), "training")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert program.stdout == ""
    assert program.stderr.splitlines()[-1] == "instep: interrupted."
    assert "Traceback" not in program.stderr
    assert "2 workers" not in program.stderr
    program.check_no_process_is_left()
    program.check_no_file_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_or_between_the_runs_leaves_nothing(
    tmp_path: Path, temporary: Path, number: signal.Signals
) -> None:
    # a shell that starts the tests in the background has them ignore Ctrl-C
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]

    def say(text: str) -> None:
        assert len(list(temporary.iterdir())) == 1
        os.kill(os.getpid(), number)

    with pytest.raises(KeyboardInterrupt):
        check_determinism(spec_file.load(job_file(tmp_path, "tiny.py:recipe")), say)
    assert list(temporary.iterdir()) == []
    assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    signal.signal(signal.SIGINT, inherited)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [["shard=2"], ["tensor=2"], ["stages=2", "pipeline_batches=2"]])
def test_one_replica_of_a_mesh_is_compared_with_two(
    tmp_path: Path, capsys: Out, keys: list[str]
) -> None:
    sets = [part for key in keys for part in ("--set", f"mesh.{key}")]
    assert check(tmp_path, "splits.py:recipe", "--workers", "2", *sets) == 0
    assert "the same bits on 2 and 4 workers: losses and" in capsys.readouterr().out
