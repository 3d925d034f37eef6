"""A plan beside runs: what earlier ones correct, and what a run's report says of its plan."""

import json
import platform

import pytest

from instep.job import file as spec_file
from instep.lab.plan.earlier import learned
from instep.plan.machine import Machines
from instep.plan.measured import BucketShare, CrewFigures, JobFigures, PassTime, ProbedMachine
from instep.plan.pricing import Measurements, price
from instep.plan.ways import TrainingWay
from instep.report.figures.summary import step_seconds, summarise
from instep.report.page.sections import verdict_line
from instep.report.terminal.closing import closing_lines
from instep.store.run_folder import RunFolder
from made_up_runs import make_run


def known(step_s):
    """A machine on which a step of two workers takes so long."""
    job = JobFigures(64, 8, 48, True, [PassTime(64, step_s)], 1000)
    buckets = [BucketShare(1.0, 1.0)]
    both = CrewFigures(
        2, passes_s=step_s / 2, slowest_s=step_s / 2, whole_s=step_s, buckets=buckets
    )
    return Measurements(job, [both], ProbedMachine(2))


def begun(path, **fields):
    """Change the event with which a run begins."""
    file = path / "events.jsonl"
    first, *rest = file.read_text().splitlines()
    file.write_text("\n".join([json.dumps({**json.loads(first), **fields}), *rest]) + "\n")


def here(path):
    begun(path, recipe_sha256="", host={"name": platform.node(), "cores": 2})


def test_runs_of_the_same_recipe_here_correct_a_plan_by_the_median_of_their_ratios(tmp_path):
    runs = tmp_path / "runs"
    for name, step_s in (("a", 0.11), ("b", 0.12), ("c", 0.13)):
        here(make_run(runs / name, step_s=step_s))
    make_run(runs / "other", step_s=0.5)
    job = spec_file.load(runs / "a" / "job.toml", [])
    job_here = type(job)(**{f: getattr(job, f) for f in job.__struct_fields__})
    found = learned(job_here, runs, known(0.1), 2)
    assert found.runs == 3
    assert found.ratio == pytest.approx(1.2, rel=0.03)
    plain, corrected = (
        price(TrainingWay(2), known(0.1)._replace(learned=by), Machines(1, 2))
        for by in (1.0, found.ratio)
    )
    assert corrected.seconds == pytest.approx(found.ratio * plain.seconds)


@pytest.mark.parametrize("key", ['precision = "bfloat16"', 'determinism = "bits"'])
def test_a_run_whose_steps_were_other_work_corrects_nothing(tmp_path, key):
    path = make_run(tmp_path / "runs" / "a", step_s=0.2)
    here(path)
    job = spec_file.load(path / "job.toml", [])
    text = (path / "job.toml").read_text()
    (path / "job.toml").write_text(text.replace("[train]", f"[train]\n{key}"))
    assert learned(job, tmp_path / "runs", known(0.1), 2).runs == 0


def test_a_run_that_is_wholly_unlike_a_plan_corrects_it_within_bounds_and_no_run_not_at_all(
    tmp_path,
):
    here(make_run(tmp_path / "runs" / "a", step_s=0.2))
    job = spec_file.load(tmp_path / "runs" / "a" / "job.toml", [])
    assert learned(job, tmp_path / "runs", known(0.01), 2).ratio == 1.5
    assert learned(job, tmp_path / "none", known(0.01), 2).ratio == 1.0


@pytest.mark.parametrize(("low", "where"), [(0.038, "outside of"), (0.015, "inside")])
def test_a_report_says_what_was_planned_and_what_it_was(tmp_path, low, where):
    path = make_run(tmp_path / "digits", step_s=0.02)
    assert not any(line.startswith("plan ") for line in lines_of(path))
    begun(path, planned={"step_s": 0.041, "low_s": low, "high_s": 0.045, "workers": 2})
    folder = RunFolder(path)
    assert step_seconds(folder) == pytest.approx(0.02, rel=0.02)
    assert summarise(folder)["planned"]["step_s"] == 0.041
    (line,) = [each for each in lines_of(path) if each.startswith("plan ")]
    assert line.startswith(f"plan    planned 41 ms a step, was 20 ms, {where} ")
    assert "Planned 41 ms a step, was 20 ms" in str(verdict_line(summarise(folder), folder))


def lines_of(path):
    folder = RunFolder(path)
    return closing_lines(summarise(folder), folder)
