"""The loggers, each read back with the library that it writes for."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from instep.errors import SpecError
from instep.events import STEPS
from instep.job import file as spec_file
from instep.report.loggers import LOGGERS
from instep.report.loggers.base import check_loggers
from instep.report.loggers.follow import STATE, Follower, follow
from instep.report.loggers.points import Points
from lazily import Lazy

event_accumulator = Lazy("tensorboard.backend.event_processing.event_accumulator")

FIRST = 1e9


def steps_of(workers, first, stop, step_s=0.1):
    count = stop - first
    steps = np.zeros(count * len(workers), STEPS)
    steps["step"] = np.repeat(np.arange(first, stop), len(workers))
    steps["worker"] = np.tile(workers, count)
    steps["samples"], steps["loss"] = 32, 1 / steps["step"]
    steps["gradient_norm"] = np.nan
    steps["begin"], steps["forward_s"] = FIRST + (steps["step"] - 1) * step_s, step_s
    return steps


def points_of(*pieces):
    points = Points()
    return [point for piece in pieces for point in points.of_steps(piece)]


def validated(step, **metrics):
    fields = {"step": step, "epoch": 0, "metrics": metrics, "samples": 10, "seconds": 0.1}
    return {"time": FIRST + step, "event": "validated", **fields}


def logged(step, **values):
    return {"time": FIRST + step, "event": "logged", "step": step, "values": values}


@pytest.fixture
def run(tmp_path):
    table = {"recipe": "r.py:recipe", "name": "made"}
    (tmp_path / "job.toml").write_text(spec_file.dump(spec_file.build(table, source="here")))
    (tmp_path / "run.id").write_text("0123456789abcdef0123456789abcdef\n")
    add(
        tmp_path,
        steps_of([0, 1], 1, 31),
        validated(10, accuracy=0.5, loss=1.0),
        logged(12, mine=3.0),
    )
    return tmp_path


@pytest.fixture
def over(monkeypatch):
    """The run is over, once all that is there has been read."""
    with open(os.devnull) as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield


def add(run, steps, *events):
    with open(run / "steps.bin", "ab") as file:
        file.write(steps.tobytes())
    with open(run / "events.jsonl", "a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)


def ended(outcome="completed"):
    return {"time": FIRST + 99, "event": "run_finished", "outcome": outcome}


def follower(run, name, at=(0, 0)):
    return Follower(run, spec_file.load(run / "job.toml"), name, at)


def curves(run):
    read = event_accumulator.EventAccumulator(
        str(run / "tensorboard"), size_guidance={"scalars": 0}
    )
    read.Reload()
    tags = read.Tags()["scalars"]
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in tags}


def lines_of(run):
    with open(run / "metrics.csv", newline="") as file:
        return [(int(r["step"]), r["name"], float(r["value"])) for r in csv.DictReader(file)]


# ---- points


def test_every_step_has_its_loss_once_whoever_records_it_and_in_whatever_pieces():
    points = points_of(
        steps_of([0], 1, 61),
        steps_of([1], 1, 41),
        steps_of([2], 70, 101),  # joined later, heard earlier
        steps_of([0, 1], 41, 101),
    )
    losses = [point for point in points if point.name == "train/loss"]
    assert sorted(point.step for point in losses) == list(range(1, 101))
    for point in losses:
        assert point.value == pytest.approx(1 / point.step)
        assert point.time == pytest.approx(FIRST + point.step * 0.1, abs=1e-3)


def test_the_speed_is_that_of_all_workers_about_once_a_second():
    pieces = [steps_of([0, 1], first, first + 5) for first in range(1, 101, 5)]
    speeds = [p.value for p in points_of(*pieces) if p.name == "train/samples_per_second"]
    assert 5 <= len(speeds) <= 11
    assert speeds == pytest.approx([640] * len(speeds), rel=1e-3)


def test_a_norm_that_was_not_measured_and_a_value_that_is_no_number_leave_a_gap():
    steps = steps_of([0], 1, 3)
    steps["gradient_norm"][0] = 2.0
    norms = [(p.step, p.value) for p in points_of(steps) if p.name == "train/gradient_norm"]
    assert norms == [(1, 2.0)]
    assert [p.name for p in Points().of_event(validated(3, loss=None, other=1.0))] == [
        "validation/other"
    ]
    assert list(Points().of_event({"event": "warning", "time": 0.0, "text": ""})) == []


def test_steps_that_are_computed_again_are_written_again():
    points = Points()
    assert len([*points.of_steps(steps_of([0], 1, 9))]) == 8
    points.go_back(5)
    assert [p.step for p in points.of_steps(steps_of([0], 4, 9))] == [6, 7, 8]


# ---- following a run


def test_what_is_there_is_written_and_then_what_is_new(run):
    one = follower(run, "csv")
    one.follow()
    one.flush()
    before = lines_of(run)
    assert {(10, "validation/accuracy", 0.5), (12, "mine", 3.0)} <= {*before}
    assert [s for s, name, _ in before if name == "train/loss"] == [*range(1, 31)]
    add(run, steps_of([0, 1], 31, 41), logged(35, mine=4.0))
    one.follow()
    one.close()
    assert [s for s, name, _ in lines_of(run) if name == "train/loss"] == [*range(1, 41)]
    assert lines_of(run)[len(before) :].count((35, "mine", 4.0)) == 1


def test_half_a_line_and_half_a_record_wait_for_the_rest(run):
    whole = steps_of([0], 31, 32).tobytes()
    with open(run / "steps.bin", "ab") as file:
        file.write(whole[:17])
    with open(run / "events.jsonl", "a") as file:
        file.write('{"time": 1, "event": "logg')
    one = follower(run, "csv")
    one.follow()
    with open(run / "steps.bin", "ab") as file:
        file.write(whole[17:])
    with open(run / "events.jsonl", "a") as file:
        file.write('ed", "step": 31, "values": {"late": 5}}\n')
    one.follow()
    one.close()
    assert lines_of(run)[-2:] == [(31, "late", 5.0), (31, "train/loss", pytest.approx(1 / 31))]


def test_a_process_that_takes_over_continues_where_the_one_before_was(run, over):
    assert follow(run, ["csv", "tensorboard"]) == 0
    add(run, steps_of([0, 1], 31, 36), ended())
    assert follow(run, ["csv", "tensorboard"]) == 0
    steps = [step for step, name, _ in lines_of(run) if name == "train/loss"]
    assert steps == [*range(1, 36)]
    assert [step for step, _ in curves(run)["train/loss"]] == steps
    assert json.loads((run / STATE).read_text())["csv"][1] == (run / "steps.bin").stat().st_size


def test_a_logger_that_fails_does_not_keep_another_from_its_points(run, over, capfd):
    (run / "tensorboard").write_text("in the way")
    assert follow(run, ["tensorboard", "csv"]) == 1
    assert "the logger 'tensorboard' failed" in capfd.readouterr().err
    assert len(lines_of(run)) > 30


def test_a_damaged_note_of_how_far_loggers_are_has_them_write_all_again_and_is_mended(
    run, over, capfd
):
    assert follow(run, ["csv"]) == 0
    before = lines_of(run)
    beyond, inside = '{"csv": [0, 99999999]}', '{"csv": [7, 0]}'
    for damaged in (
        "{",
        '{"csv": 3}',
        '["csv"]',
        '{"csv": [0, 13]}',
        '{"csv": [-5, -9]}',
        beyond,
        inside,
    ):
        (run / STATE).write_text(damaged)
        assert follow(run, ["csv"]) == 0
        assert "loggers.json cannot be read" in capfd.readouterr().err
        assert lines_of(run)[-len(before) :] == before
        assert follow(run, ["csv"]) == 0
        assert capfd.readouterr().err == ""
    assert len(lines_of(run)) == 8 * len(before)


def test_a_note_that_cannot_be_written_keeps_no_point_back(run, over):
    (run / STATE).mkdir()
    assert follow(run, ["csv"]) == 0
    assert len(lines_of(run)) > 30


@pytest.mark.parametrize("length", [2, 4096 - 17, 4096 - 16, 100_000])
def test_a_line_that_a_kill_has_torn_is_cut_off(run, over, length):
    assert follow(run, ["csv"]) == 0
    before = lines_of(run)
    with open(run / "metrics.csv", "a") as file:
        file.write("31,1000.000,train/" + length * "l")
    add(run, steps_of([0], 31, 32))
    assert follow(run, ["csv"]) == 0
    assert lines_of(run) == [*before, (31, "train/loss", pytest.approx(1 / 31))]


def test_a_run_without_points_makes_no_file(run, over):
    for name in ("steps.bin", "events.jsonl"):
        (run / name).unlink()
    assert follow(run, ["csv", "tensorboard"]) == 0
    assert not (run / "metrics.csv").exists()
    assert not (run / "tensorboard").exists()


# ---- each against its library


def test_tensorboard_reads_what_was_written(run):
    one = follower(run, "tensorboard")
    one.follow()
    one.flush()
    found = curves(run)  # before the run ends, as somebody who watches
    assert found["validation/accuracy"] == [(10, 0.5)]
    assert found["mine"] == [(12, 3.0)]
    assert [step for step, _ in found["train/loss"]] == [*range(1, 31)]
    assert found["train/loss"][3] == (4, 0.25)
    one.close()


def followed(run, name, code="", **environment):
    """A process that follows a run that is over."""
    command = [sys.executable, "-P", "-m", "instep.report.loggers.follow", str(run), name]
    given = {**os.environ, **environment}
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, env=given)
    assert done.returncode == 0, done.stderr.decode()


@pytest.mark.slow
def test_wandb_in_offline_mode_has_every_point_and_the_jobs_settings(run):
    pytest.importorskip("wandb", reason="pip install 'instep[wandb]'")
    add(run, steps_of([0], 31, 32), ended())
    followed(run, "wandb", WANDB_MODE="offline")
    (file,) = run.glob("wandb/offline-run-*/run-*.wandb")
    read = subprocess.run(
        [sys.executable, "-c", READ_WANDB, file], capture_output=True, text=True, check=True
    )
    rows, settings, identity = json.loads(read.stdout)
    assert identity == "0123456789abcdef0123456789abcdef"
    assert settings["train.global_batch"] == "64"
    losses = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
    assert losses == {step: pytest.approx(1 / step) for step in range(1, 32)}
    assert [row["mine"] for row in rows if "mine" in row] == [3.0]
    assert [row["step"] for row in rows if "validation/accuracy" in row] == [10]


READ_WANDB = """
import json, struct, sys
from wandb.proto import wandb_internal_pb2 as messages
def records(data, at=7, whole=b""):  # a log of LevelDB, after a header of 7 bytes
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield messages.Record.FromString(whole)
            whole = b""
rows, settings, identity = [], {}, ""
for record in records(open(sys.argv[1], "rb").read()):
    if record.HasField("history"):
        key = lambda item: item.key or item.nested_key[0]
        rows.append({key(i): json.loads(i.value_json) for i in record.history.item})
    if record.HasField("run"):
        identity = record.run.run_id
        settings |= {i.key: json.loads(i.value_json) for i in record.run.config.update}
print(json.dumps([rows, settings, identity]))
"""


@pytest.mark.slow
def test_mlflow_has_every_point_and_a_resumed_run_continues_the_same_one(run):
    pytest.importorskip("mlflow", reason="pip install 'instep[mlflow]'")
    followed(run, "mlflow")
    add(run, steps_of([0], 31, 41), logged(35, mine=4.0), ended())
    followed(run, "mlflow")
    read = subprocess.run(
        [sys.executable, "-c", READ_MLFLOW, f"sqlite:///{run}/mlflow.db"],
        capture_output=True,
        text=True,
        check=True,
    )
    (found,) = json.loads(read.stdout)
    assert found["status"] == "FINISHED"
    assert found["parameters"]["train.global_batch"] == "64"
    losses = dict(found["metrics"]["train/loss"])
    assert losses == {step: pytest.approx(1 / step) for step in range(1, 41)}
    assert found["metrics"]["mine"] == [[12, 3.0], [35, 4.0]]


READ_MLFLOW = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(sys.argv[1])
every = []
for run in client.search_runs([e.experiment_id for e in client.search_experiments()]):
    metrics = {
        name: [[m.step, m.value] for m in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    found = {"status": run.info.status, "parameters": run.data.params, "metrics": metrics}
    every.append(found)
print(json.dumps(every))
"""


@pytest.mark.slow
def test_mlflow_goes_where_its_environment_says(run, tmp_path):
    pytest.importorskip("mlflow", reason="pip install 'instep[mlflow]'")
    add(run, steps_of([0], 31, 32), ended("failed"))
    where = {"MLFLOW_TRACKING_URI": f"file://{tmp_path}/store", "MLFLOW_ALLOW_FILE_STORE": "true"}
    followed(run, "mlflow", **where)
    read = subprocess.run(
        [sys.executable, "-c", READ_MLFLOW, where["MLFLOW_TRACKING_URI"]],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **where},
    )
    (found,) = json.loads(read.stdout)
    assert found["status"] == "FAILED"
    assert len(found["metrics"]["train/loss"]) == 31


# ---- refusals


def test_a_missing_package_is_named_with_the_command_that_brings_it(monkeypatch):
    check_loggers(["csv", "tensorboard"])
    for name in ("tensorboard", "wandb", "mlflow"):
        monkeypatch.setattr(LOGGERS[name], "package", "no_such_package")
        with pytest.raises(SpecError, match=rf"pip install 'instep\[{name}\]'"):
            check_loggers(["csv", name])


def test_a_logger_that_does_not_exist_is_answered_with_the_near_one():
    with pytest.raises(SpecError, match="Did you mean 'tensorboard'"):
        check_loggers(["tensorbord"])


def test_a_logger_that_is_named_twice_would_write_each_point_twice():
    with pytest.raises(SpecError, match=r"names .csv. twice.*Name it once"):
        check_loggers(["csv", "tensorboard", "csv"])
