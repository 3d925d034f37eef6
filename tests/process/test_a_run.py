"""A run that goes well, from every way of starting it and on every number of workers."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import tiny
from started import RECIPES, Started, distance

import instep
from instep.cli import main
from instep.data.order import micro_batch
from instep.errors import WorkerError
from instep.events import Kind

pytestmark = [pytest.mark.process, pytest.mark.cold]

TRAIN = {"epochs": 3, "global_batch": 16, "threads": 1}  # as in the fixture `finished`
SUMMARY = {
    "steps",
    "samples",
    "loss",
    "metrics",
    "workers",
    "seconds",
    "samples_per_second",
    "unrecorded_steps",
    "wire_bytes",
    "parameters_sha256",
    "generations",
    "repeated_samples",
    "missing_samples",
}
FILES = {
    "job.toml",
    "events.jsonl",
    "ledger.bin",
    "steps.bin",
    "summary.json",
    "report.html",
    "trace.json",
    "model.safetensors",
}


def test_a_run_ends_with_code_0_and_leaves_a_whole_folder_and_nothing_else(
    finished: Started,
) -> None:
    assert finished.process.returncode == 0, finished.stderr
    for name in FILES:
        assert (finished.run / name).stat().st_size > 0, name
    (checkpoint,) = (finished.run / "checkpoints").iterdir()
    assert checkpoint.name == "step-00000021"
    assert {log.name for log in (finished.run / "logs").iterdir()} == {
        "host.log",
        "worker-0.log",
        "worker-1.log",
    }
    finished.check_nothing_is_left()


def test_each_record_of_the_ledger_is_of_a_range_that_begins_with_its_unit(
    finished: Started,
) -> None:
    ledger = finished.ledger
    assert set(ledger["kind"]) == {Kind.RANGE}
    assert set(ledger["course"]) == {0}
    assert set(ledger["generation"]) == {1}
    for step in range(1, 22):
        mine = ledger[ledger["step"] == step]
        assert mine["worker"].tolist() == [0, 1]
        begin, end = int(mine["first"].min()), int(mine["stop"].max())
        parts = -(-(end - begin) * 8 // 16)  # a short batch is cut into fewer micro-batches
        firsts = [micro_batch(begin, end, int(unit), parts)[0] for unit in mine["unit"]]
        assert mine["first"].tolist() == firsts
    assert ledger["unit"].max() > 0


def test_only_the_loopback_address_is_listened_on(finished: Started) -> None:
    assert finished.listened == {"127.0.0.1"}


def test_the_last_line_of_standard_output_is_the_summary_and_progress_is_elsewhere(
    finished: Started,
) -> None:
    (line,) = finished.stdout.splitlines()
    assert json.loads(line) == finished.summary
    assert "epoch 3/3" in finished.stderr
    assert "instep report" in finished.stderr.splitlines()[-2]


def test_the_summary_says_what_was_done(finished: Started) -> None:
    summary = finished.summary
    assert summary.keys() >= SUMMARY
    wanted = {"steps": 21, "samples": 303, "workers": 2, "generations": 1, "outcome": "completed"}
    assert {key: summary[key] for key in wanted} == wanted
    assert summary["repeated_samples"] == summary["missing_samples"] == 0
    assert summary["wire_bytes"] > 0
    assert summary["samples_per_second"] > 0
    assert set(summary["metrics"]) == {"loss", "accuracy"}


def test_its_status_afterwards_is_that_of_the_summary(
    finished: Started, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = finished.summary
    assert main(["status", str(finished.run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "completed"
    assert found["step"] == found["steps"] == summary["steps"]
    assert found["training_loss"] == pytest.approx(summary["loss"])
    assert found["validation"] == summary["metrics"]


def test_every_number_of_workers_gives_the_same(
    finished: Started, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "runs"
    alone = instep.train(tiny.recipe, workers=1, runs=runs, seed=5, train=TRAIN)
    assert "epoch 3/3" in capfd.readouterr().err
    of_three = _from_a_thread(workers=3, runs=runs, seed=5, train=TRAIN, quiet=True)
    assert capfd.readouterr() == ("", "")
    assert [run.path.name for run in (alone, of_three)] == ["recipe", "recipe-2"]
    for run in (alone, of_three):
        assert run.exit_code == 0
        assert run.summary == json.loads((run.path / "summary.json").read_text())
        assert run.summary["repeated_samples"] == run.summary["missing_samples"] == 0
        _check_same(run.summary, finished.summary)
        assert distance(finished.run, run.path) < 1e-6
    assert [run.summary["workers"] for run in (alone, of_three)] == [1, 3]


def _check_same(summary: dict[str, Any], other: dict[str, Any]) -> None:
    assert summary["loss"] == pytest.approx(other["loss"], rel=1e-6)
    assert summary["metrics"]["loss"] == pytest.approx(other["metrics"]["loss"], rel=1e-6)
    assert summary["metrics"]["accuracy"] == other["metrics"]["accuracy"]
    assert summary["steps"] == other["steps"]


def _from_a_thread(**arguments: Any) -> instep.Run:
    runs: list[instep.Run] = []
    thread = threading.Thread(
        target=lambda: runs.append(instep.train(tiny.recipe, **arguments)), daemon=True
    )
    thread.start()
    thread.join()
    (run,) = runs
    return run


@pytest.mark.tail
def test_a_run_that_fails_under_train_raises_what_a_program_can_catch(tmp_path: Path) -> None:
    with pytest.raises(instep.InstepError, match="the forward pass met the marked") as caught:
        instep.train(
            f"{RECIPES / 'breaks.py'}:recipe",
            arguments={"at": "forward"},
            runs=tmp_path,
            train={"global_batch": 8},
            quiet=True,
        )
    assert isinstance(caught.value, WorkerError)
    summary = json.loads((tmp_path / "recipe" / "summary.json").read_text())
    assert summary["outcome"] == "failed"
