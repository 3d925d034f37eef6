import json

import numpy as np
import pytest

from instep.events import STEPS, read_events
from instep.report.figures.curves import POINTS, charts, thin, throughput
from instep.store.run_folder import RunFolder
from made_up_runs import BEGIN_S, make_run, write_events


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
    assert [chart["title"] for chart in found] == ["loss", "accuracy", "samples per second"]
    training, validation = found[0]["lines"]
    assert (training["kind"], len(training["mean"])) == ("training", 48)
    assert (validation["step"], validation["mean"]) == ([16, 32, 48], [1.5, 0.75, 0.5])
    assert training["samples"][15:17] == [1000, 1064]


def chart_of(folder, title):
    (chart,) = [each for each in charts([RunFolder(folder)]) if each["title"] == title]
    return chart, chart["lines"][0]


def logged(folder, step, **values):
    event = {"time": BEGIN_S + step, "event": "logged", "step": step, "values": values}
    path = folder / "events.jsonl"
    lines = path.read_text().splitlines()
    lines.insert(len(lines) - 1, json.dumps(event))
    path.write_text("\n".join(lines) + "\n")


def test_what_was_logged_has_a_chart_and_a_learning_rate_holds_until_the_end(tmp_path):
    folder = make_run(tmp_path / "digits")
    for step, mine, rate in ((1, 5.0, 0.1), (20, None, 0.01), (30, 7.0, 0.001)):
        logged(folder, step, mine=mine, **{"train/learning_rate": rate})
    _, mine = chart_of(folder, "mine")
    assert (mine["step"], mine["mean"]) == ([1, 20, 30], [5.0, None, 7.0])
    _, rate = chart_of(folder, "learning rate")
    assert (rate["step"], rate["mean"]) == ([1, 20, 30, 48], [0.1, 0.01, 0.001, 0.001])


def test_the_norm_of_the_gradient_has_a_chart_where_it_was_computed(tmp_path):
    folder = make_run(tmp_path / "digits")
    steps = np.fromfile(folder / "steps.bin", STEPS)
    steps["gradient_norm"] = np.where(steps["step"] % 2, 3.0 / steps["step"], np.nan)
    steps.tofile(folder / "steps.bin")
    chart, norm = chart_of(folder, "gradient norm")
    assert norm["step"] == [*range(1, 48, 2)]
    assert norm["mean"][1] == pytest.approx(1.0, rel=1e-6)
    assert chart["log"]


def test_the_speed_of_all_workers_adds_up_to_the_samples(tmp_path):
    folder = make_run(tmp_path / "digits")
    _, speed = chart_of(folder, "samples per second")
    part_s = np.diff(speed["seconds"])[0]
    assert sum(speed["mean"]) * part_s == pytest.approx(3000, rel=0.01)


def test_the_speed_of_a_resumed_run_is_over_its_own_time_without_the_pause(tmp_path):
    folder = make_run(tmp_path / "digits")
    _, alone = chart_of(folder, "samples per second")
    steps = np.fromfile(folder / "steps.bin", STEPS)
    again = float(steps["begin"][steps["step"] == 25].min())
    steps["begin"][steps["step"] >= 25] += 2100.0
    steps.tofile(folder / "steps.bin")
    events = list(read_events(folder / "events.jsonl"))
    late = [{**each, "time": each["time"] + 2100.0} for each in events if each["time"] >= again]
    started = {**events[0], "time": again + 2100.0}
    write_events(folder, [*events[: len(events) - len(late)], started, *late])
    _, speed = chart_of(folder, "samples per second")
    assert len(speed["mean"]) == len(alone["mean"])
    assert min(speed["mean"]) > 0.5 * min(alone["mean"])
    assert speed["seconds"][-1] == pytest.approx(alone["seconds"][-1], rel=0.05)


def test_an_axis_is_logarithmic_where_most_values_lie_at_its_foot(tmp_path):
    chart, _ = chart_of(make_run(tmp_path / "falls"), "loss")  # from 2 to 2 / 48
    assert chart["log"]
    chart, _ = chart_of(make_run(tmp_path / "short", steps=8), "loss")
    assert not chart["log"]


def test_throughput_adds_up_to_the_samples_of_the_worker(tmp_path):
    folder = RunFolder(make_run(tmp_path / "digits"))
    for worker in folder.members.numbers:
        speed = throughput(folder, worker)
        taken = speed.sum() * folder.times.seconds / len(speed)
        assert taken == pytest.approx(folder.steps_of(worker)["samples"].sum())
