"""What Ray's dashboard is told of a run."""

import numpy as np
import pytest

from instep.events import STEPS
from instep.launch.ray.metrics import LATELY_S, NEWEST, _newest, figures


def steps(*rows):
    """Records of (step, worker, samples, loss, begin); each takes half a second."""
    records = np.zeros(len(rows), STEPS)
    for record, (step, worker, samples, loss, begin) in zip(records, rows, strict=True):
        for name, value in zip(
            ("step", "worker", "samples", "loss", "begin"),
            (step, worker, samples, loss, begin),
            strict=True,
        ):
            record[name] = value
        record["forward_s"] = 0.5
    return records


def test_gauges_tell_the_newest_step_and_the_samples_of_the_last_seconds():
    before = 100.0 - LATELY_S
    told = figures(
        steps(
            (1, 0, 9, 3.0, before),  # a worker that is gone
            (7, 1, 8, 0.5, 100.0),
            (7, 2, 8, 0.5, 100.0),
            (8, 1, 8, 0.25, 100.5),
        )
    )
    assert told["step"] == 8
    assert told["loss"] == 0.25
    assert told["workers"] == 2
    assert told["samples_per_second"] == pytest.approx(24.0)


def test_there_is_nothing_to_tell_of_a_run_without_steps(tmp_path):
    assert figures(_newest(tmp_path / "steps.bin")) == {}


def test_only_the_newest_records_are_read_and_none_that_is_torn(tmp_path):
    file = tmp_path / "steps.bin"
    rows = steps(*((number, 0, 1, 0.0, 1.0) for number in range(1, NEWEST + 4)))
    file.write_bytes(rows.tobytes() + b"torn")
    assert _newest(file)["step"].tolist() == list(range(4, NEWEST + 4))
