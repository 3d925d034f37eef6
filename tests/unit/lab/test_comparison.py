"""What a replay answers follows from two recordings alone."""

import json
import math

import numpy as np
import pytest

from instep.events import STEPS
from instep.lab.comparison import TOLERANCE, judge
from instep.store.run_folder import RunFolder
from made_up_runs import make_run

BITS = {"determinism": "bits", "steps": 20}


def changed(run, step, worker, **values):
    """The run's records with the values of one of them replaced."""
    records = np.fromfile(run / "steps.bin", STEPS)
    row = np.flatnonzero((records["step"] == step) & (records["worker"] == worker))
    for name, value in values.items():
        records[name][row] = value
    records.tofile(run / "steps.bin")


def judged(tmp_path, step=20, after=0, **train):
    """Of the recording in `run`, and a computation by one worker that agrees with it."""
    make_run(tmp_path / "again", workers=1, steps=step, train=BITS | train)
    again = RunFolder(tmp_path / "again")
    return judge(RunFolder(tmp_path / "run"), [again], step, checkpoint=None, after=after)


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run", steps=20, train=BITS)


def test_what_agrees_is_the_same(tmp_path, run):
    found = judged(tmp_path)
    assert found.same
    assert found.figures[0].steps == 20
    assert [each.name for each in found.figures] == ["loss"]  # nobody asked for the norm
    assert found.recorded_sha256 == found.parameters_sha256
    assert "verdict the same bits" in list(found.lines())
    json.dumps(found.as_table(), allow_nan=False)


@pytest.mark.parametrize("worker", [0, 1])
def test_one_bit_of_one_worker_s_record_is_a_fault(tmp_path, run, worker):
    changed(run, 7, worker, loss=np.nextafter(2 / 7, 1))
    found = judged(tmp_path)
    assert not found.same
    assert found.figures[0].differs[0] == 7
    assert found.fault.startswith("not the same: the loss of step 7 was recorded as 0.2857142857")
    assert f"next    instep run {run / 'job.toml'} --check-determinism" in list(found.lines())


def test_steps_that_were_not_computed_again_are_not_compared(tmp_path, run):
    changed(run, 7, 0, loss=9.0)
    assert judged(tmp_path, after=7).same


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_the_same_as_itself(tmp_path, run, value):
    for worker in (0, 1):
        changed(run, 20, worker, loss=value)
    make_run(tmp_path / "again", workers=1, steps=20, train=BITS)
    changed(tmp_path / "again", 20, 0, loss=value)
    again = RunFolder(tmp_path / "again")
    found = judge(RunFolder(run), [again], 20, checkpoint=None, after=0)
    assert found.same
    json.dumps(found.as_table(), allow_nan=False)


def test_a_norm_that_was_recorded_is_compared_too(tmp_path, run):
    changed(run, 3, 1, gradient_norm=1.5)
    found = judged(tmp_path)
    assert "the gradient norm of step 3 was recorded as 1.5" in found.fault


def test_other_parameters_are_a_fault_and_so_are_other_metrics(tmp_path, run):
    text = (run / "events.jsonl").read_text()
    (run / "events.jsonl").write_text(text.replace("3f" * 32, "4e" * 32))
    assert "recorded with the SHA-256 4e4e4e4e4e4e... " in judged(tmp_path).fault
    text = text.replace('"accuracy": 0.6', '"accuracy": 0.7').replace('"step": 16', '"step": 20')
    (run / "events.jsonl").write_text(text)
    again = tmp_path / "again" / "events.jsonl"
    again.write_text(again.read_text().replace('"step": 16', '"step": 20'))
    found = judge(RunFolder(run), [RunFolder(again.parent)], 20, checkpoint=None, after=0)
    assert found.fault == "not the same: the validation after step 20 gives other metrics."


def test_where_nothing_was_recorded_nothing_is_the_same(tmp_path, run):
    (run / "steps.bin").write_bytes(b"")
    told = (run / "events.jsonl").read_text().splitlines()
    kept = [line for line in told if '"model_saved"' not in line]
    (run / "events.jsonl").write_text("\n".join(kept) + "\n")
    found = judged(tmp_path)
    assert not found.same
    assert "recorded nothing of the steps up to 20 that could be compared" in found.fault
    assert "loss    step 20: not recorded, 0.1 computed" in list(found.lines())


@pytest.mark.parametrize(
    ("factor", "same"), [(1 + TOLERANCE / 2, True), (1 + TOLERANCE * 2, False)]
)
def test_in_order_mode_figures_agree_to_the_tolerance(tmp_path, factor, same):
    order = {"determinism": "order", "steps": 20}
    run = make_run(tmp_path / "run", steps=20, train=order)
    changed(run, 9, 0, loss=2 / 9 * factor)
    found = judged(tmp_path)
    assert found.same is same
    assert found.recorded_sha256 is None
