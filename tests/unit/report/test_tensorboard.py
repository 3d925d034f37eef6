import sys

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from instep.errors import SpecError
from instep.events import LEDGER, STEPS
from instep.report.tensorboard import TensorBoardWriter

NO_LEDGER = np.empty(0, LEDGER)


def steps_of(workers, first, stop, step_s=0.1):
    count = stop - first
    steps = np.zeros(count * len(workers), STEPS)
    steps["step"] = np.repeat(np.arange(first, stop), len(workers))
    steps["worker"] = np.tile(workers, count)
    steps["samples"], steps["loss"] = 32, 1 / steps["step"]
    steps["begin"], steps["forward_s"] = 1e9 + (steps["step"] - 1) * step_s, step_s
    return steps


def validated(step, **metrics):
    fields = {"step": step, "epoch": 0, "metrics": metrics, "samples": 10, "seconds": 0.1}
    return {"time": 1e9 + step, "event": "validated", **fields}


def read(folder):
    curves = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    curves.Reload()
    return curves


def test_every_step_has_its_loss_once_whoever_reports_it_and_in_whatever_pieces(tmp_path):
    writer = TensorBoardWriter(tmp_path / "board")
    writer.records(NO_LEDGER, steps_of([0], 1, 61))
    writer.records(NO_LEDGER, steps_of([1], 1, 41))
    writer.records(NO_LEDGER, steps_of([2], 70, 101))  # joined later, heard earlier
    writer.records(NO_LEDGER, steps_of([0, 1], 41, 101))
    writer.close()
    points = read(tmp_path / "board").Scalars("train/loss")
    assert sorted(point.step for point in points) == list(range(1, 101))
    for point in points:
        assert point.value == pytest.approx(1 / point.step)
        assert point.wall_time == pytest.approx(1e9 + point.step * 0.1, abs=1e-3)


def test_the_speed_is_that_of_all_workers_about_once_a_second(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    for first in range(1, 101, 5):
        writer.records(NO_LEDGER, steps_of([0, 1], first, first + 5))
    writer.close()
    points = read(tmp_path).Scalars("train/samples_per_second")
    assert 5 <= len(points) <= 11
    assert [point.value for point in points] == pytest.approx([640] * len(points), rel=1e-3)


def test_validations_become_curves_and_a_missing_value_leaves_a_gap(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.event(validated(10, accuracy=0.5, loss=1.0))
    writer.event(validated(20, accuracy=0.75, loss=None))
    writer.event({"time": 1e9, "event": "warning", "text": "no curve"})
    writer.close()
    curves = read(tmp_path)
    assert curves.Tags()["scalars"] == ["validation/accuracy", "validation/loss"]
    assert [(p.step, p.value) for p in curves.Scalars("validation/accuracy")] == [
        (10, 0.5),
        (20, 0.75),
    ]
    assert [p.step for p in curves.Scalars("validation/loss")] == [10]


def test_what_was_written_can_be_watched_before_the_run_ends(tmp_path):
    writer = TensorBoardWriter(tmp_path)
    writer.records(NO_LEDGER, steps_of([0], 1, 4))
    writer.tick(0.0)
    assert len(read(tmp_path).Scalars("train/loss")) == 3
    writer.close()


def test_a_run_without_steps_leaves_no_file_and_closes_twice(tmp_path):
    writer = TensorBoardWriter(tmp_path / "board")
    writer.records(NO_LEDGER, np.empty(0, STEPS))
    writer.tick(0.0)
    writer.close()
    writer.close()
    assert not (tmp_path / "board").exists()


def test_a_missing_package_is_named_with_the_command_that_brings_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(SpecError, match=r"pip install 'instep\[tensorboard\]'"):
        TensorBoardWriter(tmp_path)
