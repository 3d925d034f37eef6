"""Runs whose participants mask what they give: the bits of an open run on any number of workers,
after a kill too, and a folder that says nothing of one participant."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from started import RECIPES

from instep.client.submit import Run, run_job
from instep.errors import InstepError
from instep.events import STEPS, read_records
from instep.job import file as spec_file

pytestmark = pytest.mark.process


def trained(folder: Path, workers: int, watch=None, of="recipe", **options) -> Run:
    table = {
        "name": f"of-{workers}-{len(options)}",
        "recipe": f"{RECIPES / 'sealed.py'}:{of}",
        "workers": workers,
        "train": {
            "steps": 8,
            "global_batch": 20,
            "determinism": "bits",
            "threads": 1,
            "validate_every": 4,
        },
        "sync": {
            "name": "averaging",
            "participants": 4,
            "options": {
                "partition": "labels",
                "skew": 5.0,
                "local_steps": 3,
                "clip": 0.4,
                **options,
            },
        },
    }
    job = spec_file.build(table, source="a test")
    return run_job(job, folder / "runs", named=False, quiet=True, watch=watch)


def killing_one(at: int):
    """Kill worker 1, and with it its participants, once the run has come to a round."""
    done: list[int] = []

    def watch(folder: Path) -> None:
        steps = folder / "steps.bin"
        if done or not steps.is_file() or read_records(steps, STEPS)["step"].max(initial=0) < at:
            return
        events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
        done.extend(e["pid"] for e in events if e["event"] == "worker_joined" and e["worker"] == 1)
        os.kill(done[-1], signal.SIGKILL)

    return watch


def says_of_one(run: Path) -> list[str]:
    """What the run's events say of single participants."""
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    names = {"participants_apart", "participants_validated", "dataset_known"}
    found = [e["event"] for e in events if e["event"] in names]
    found += ["labels" for e in events if e["event"] == "data_divided" and e["labels"]]
    return found + [each.name for each in run.glob("contents-*")]


@pytest.mark.tail
def test_masked_rounds_give_the_bits_of_open_ones_and_say_nothing_of_a_participant(tmp_path):
    opened = trained(tmp_path, 1)
    sealed = trained(tmp_path, 2, killing_one(2), secure_sums=True, least=3)
    assert sealed.summary["generations"] > 1
    assert sealed.summary["parameters_sha256"] == opened.summary["parameters_sha256"]
    assert sealed.summary["loss"] == pytest.approx(opened.summary["loss"], rel=1e-9)
    assert sealed.summary["repeated_samples"] == sealed.summary["missing_samples"] == 0
    assert {"participants_apart", "labels", "participants_validated"} <= {*says_of_one(opened.path)}
    assert not says_of_one(sealed.path)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 3, 4])
def test_on_more_workers_too(tmp_path, workers):
    opened = trained(tmp_path, 1)
    sealed = trained(tmp_path, workers, secure_sums=True)
    assert sealed.summary["parameters_sha256"] == opened.summary["parameters_sha256"]


@pytest.mark.slow
def test_running_statistics_are_refused(tmp_path):
    with pytest.raises(InstepError, match="a buffer of the model changes"):
        trained(tmp_path, 2, of="normalises", secure_sums=True)
