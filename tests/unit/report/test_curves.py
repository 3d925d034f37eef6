import numpy as np
import pytest

from instep.report.figures.curves import POINTS, charts, thin, throughput
from instep.store.run_folder import RunFolder
from made_up_runs import make_run


def thinned(values):
    count = len(values)
    step = np.arange(1, count + 1)
    axes = {"step": step, "samples": step * 64.0, "seconds": step * 0.5}
    return thin(axes, np.asarray(values, dtype=np.float64))


def test_a_short_curve_is_kept_point_by_point():
    curve = thinned([3.0, 2.0, 1.0])
    assert curve == {
        "step": [1, 2, 3],
        "samples": [64, 128, 192],
        "seconds": [0.5, 1.0, 1.5],
        "mean": [3.0, 2.0, 1.0],
    }


def test_a_long_curve_keeps_mean_lowest_and_highest_of_each_bucket():
    values = np.random.default_rng(1).random(100_003)
    curve = thinned(values)
    assert {len(axis) for axis in curve.values()} == {POINTS}
    assert min(curve["low"]) == pytest.approx(values.min(), rel=1e-5)
    assert max(curve["high"]) == pytest.approx(values.max(), rel=1e-5)
    assert curve["step"][-1] == 100_003
    sizes = np.diff([0, *curve["step"]])
    assert np.average(curve["mean"], weights=sizes) == pytest.approx(values.mean(), rel=1e-5)


def test_what_is_not_finite_leaves_a_gap():
    assert thinned([1.0, np.nan, np.inf, 2.0])["mean"] == [1.0, None, None, 2.0]
    values = np.ones(10 * POINTS)
    values[5:20] = np.nan
    curve = thinned(values)
    assert curve["mean"][:3] == [1.0, None, 1.0]
    assert curve["low"][1] is curve["high"][1] is None


def test_training_and_validation_loss_share_a_chart_and_each_metric_has_one(tmp_path):
    found = charts([RunFolder(make_run(tmp_path / "digits"))])
    assert [chart["title"] for chart in found] == ["loss", "accuracy"]
    training, validation = found[0]["lines"]
    assert (training["kind"], len(training["mean"])) == ("training", 48)
    assert (validation["step"], validation["mean"]) == ([16, 32, 48], [1.5, 0.75, 0.5])
    assert training["samples"][15:17] == [1000, 1064]


def test_throughput_adds_up_to_the_samples_of_the_worker(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits"))
    for worker in folder.workers:
        speed = throughput(folder, worker)
        taken = speed.sum() * folder.seconds / len(speed)
        assert taken == pytest.approx(folder.steps_of(worker)["samples"].sum())
