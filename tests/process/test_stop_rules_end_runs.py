"""Rules stop all workers at one step, the same at any number of workers, and the run says why."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES, Start, Started
from test_joining import slurm_task, summary_of

import instep
from instep.errors import DIVERGED, SpecError
from instep.events import STEPS, read_events, read_records

pytestmark = pytest.mark.process

SHORT = ("train.epochs=50", "train.global_batch=16", "train.threads=1", "seed=5")
ENDLESS = (*SHORT, "train.epochs=1000000")


def last_step(program: Started, workers: int) -> int:
    """The step at which every worker stopped; fails unless it is the same one."""
    ledger = program.ledger
    (step,) = {int(ledger["step"][ledger["worker"] == n].max()) for n in range(workers)}
    assert np.array_equal(np.unique(ledger["step"]), np.arange(1, step + 1))
    return step


def norms(run: Path) -> np.ndarray:
    """The norm of each step's gradient, as worker 0 recorded it."""
    records = read_records(run / "steps.bin", STEPS)
    mine = records[records["worker"] == 0]
    return mine["gradient_norm"][np.argsort(mine["step"])]


def accuracy_of(run: Path) -> float:
    """What the saved model reaches on the validation set."""
    import tiny

    recipe = tiny.recipe()
    recipe.model.load_state_dict(load_file(run / "model.safetensors"))
    inputs, target = recipe.validate.tensors
    with torch.no_grad():
        return float(tiny.accuracy(recipe.model(inputs), target))


@pytest.mark.slow
def test_a_target_is_reached_at_the_same_step_by_one_worker_and_by_three(run: Start) -> None:
    ended = {}
    for workers in (1, 3):
        settings = (*SHORT, f"workers={workers}", "stop.metric=accuracy", "stop.target=0.8")
        program = run("tiny.py:recipe", *settings, options=("--json",))
        assert program.end() == 0, program.stderr
        summary = json.loads(program.stdout)
        assert (summary["outcome"], summary["rule"]) == ("stopped", "target")
        ended[workers] = step = last_step(program, workers)
        (asked,) = program.events("stop_requested")
        assert (asked["rule"], asked["step"], summary["steps"]) == ("target", step, step)
        assert summary["rule_text"] == f"{asked['why']}, at step {step}"
        assert program.events("validated")[-1]["step"] == step
        reached = summary["metrics"]["accuracy"]
        assert reached >= 0.8
        assert all(e["metrics"]["accuracy"] < 0.8 for e in program.events("validated")[:-1])
        assert accuracy_of(program.run) == pytest.approx(reached, rel=1e-6)
        assert (program.run / "checkpoints" / f"step-{step:08d}").is_dir()
        assert f"stopping: {summary['rule_text']}" in program.stderr
        program.check_nothing_is_left()
    assert ended[1] == ended[3] > 7


@pytest.mark.tail
def test_a_loss_that_is_not_finite_ends_the_run_and_the_checkpoint_before_it_stays(
    run: Start,
) -> None:
    program = run(
        "spoils.py:recipe",
        "train.epochs=3",
        "train.global_batch=8",
        "checkpoint.every=1",
        "checkpoint.keep_last=1",
    )
    assert program.end() == DIVERGED, program.stderr
    assert program.stdout.startswith("stopped (diverged) after ")
    assert "\nrule    the loss was inf from step 3 on\n" in program.stdout
    assert "stopping: the loss was inf from step 3 on\n" in program.stderr
    assert last_step(program, 2) == program.summary["steps"] == 3
    assert program.summary["diverged"]
    assert np.isnan(norms(program.run)).all()  # nobody asked for them
    (kept,) = (program.run / "checkpoints").iterdir()
    assert kept.name == "step-00000002"
    assert all(bool(t.isfinite().all()) for t in load_file(kept / "model.safetensors").values())
    assert program.events("warning") == []
    program.check_nothing_is_left()


@pytest.mark.tail
def test_a_run_that_continues_without_a_finite_loss_does_not_end_as_completed(
    run: Start,
) -> None:
    length = ("train.epochs=1", "train.global_batch=8", "stop.non_finite=false")
    program = run("spoils.py:recipe", *length)
    assert program.end() == DIVERGED, program.stderr
    summary = program.summary
    assert (summary["outcome"], summary["rule"], summary["steps"]) == ("completed", "epochs", 5)
    assert summary["diverged"]
    assert program.stdout.startswith("diverged (epochs) after ")
    assert "\nrule    the loss was inf from step 3 on\n" in program.stdout
    assert len(program.events("warning")) == 1
    page = (program.run / "report.html").read_text()
    assert 'class="dot calm"' in page
    assert 'class="dot good"' not in page
    assert "the loss was inf from step 3 on" in page


@pytest.mark.tail
def test_a_loss_of_the_very_last_step_that_is_not_finite_shows_too(run: Start) -> None:
    program = run("spoils.py:recipe", "train.steps=3", "train.global_batch=8")
    assert program.end() == DIVERGED, program.stderr
    assert program.summary["steps"] == 3
    assert program.summary["rule_text"] == "the loss was inf from step 3 on"
    assert not (program.run / "checkpoints" / "step-00000003").exists()


@pytest.mark.tail
def test_a_norm_that_is_not_finite_ends_the_run_where_it_is_computed_anyway(run: Start) -> None:
    program = run("explodes.py:recipe", "train.max_grad_norm=1.0", "train.epochs=3")
    assert program.end() == DIVERGED, program.stderr
    assert last_step(program, 2) == 1
    assert "\nrule    the norm of the gradient was inf, at step 1\n" in program.stdout


@pytest.mark.tail
def test_a_small_gradient_ends_the_run_at_the_step_after_it(run: Start) -> None:
    program = run("tiny.py:recipe", *SHORT, "stop.gradient_norm=0.2", "train.max_grad_norm=0.5")
    assert program.end() == 0, program.stderr
    found = norms(program.run)
    (asked,) = program.events("stop_requested")
    assert (asked["rule"], asked["step"]) == ("gradient_norm", int((found < 0.2).argmax()) + 1)
    assert last_step(program, 2) == asked["step"] + 1
    assert found.max() > 0.5  # the norm is that before clipping
    program.check_nothing_is_left()


@pytest.mark.slow
def test_a_time_limit_ends_the_run_at_one_step_and_saves(run: Start) -> None:
    program = run("tiny.py:recipe", *ENDLESS, "stop.time_limit=4s", options=("--json",))
    assert program.end() == 0, program.stderr
    summary = json.loads(program.stdout)
    step = last_step(program, 2)
    assert (summary["outcome"], summary["rule"], summary["steps"]) == (
        "stopped",
        "time_limit",
        step,
    )
    assert summary["seconds"] >= 4
    assert summary["rule_text"].startswith("the run had taken ")
    assert summary["rule_text"].endswith(f"and its limit is 4.0 s, at step {step:,}")
    assert (program.run / "checkpoints" / f"step-{step:08d}").is_dir()
    assert np.isnan(norms(program.run)).all()  # nobody asked
    program.check_nothing_is_left()


@pytest.mark.slow
def test_rules_end_sessions_that_two_processes_joined_and_loops_of_their_own(
    start: Start, tmp_path: Path
) -> None:
    script, runs = RECIPES / "stops_itself.py", tmp_path / "runs"
    programs = [start(script, runs, environment=slurm_task(number)) for number in (1, 0)]
    for program in programs:
        assert program.end() == 0, program.stderr
    for name, rule in (("recipe", "target"), ("validated", "target"), ("steps", "gradient_norm")):
        summary = summary_of(runs / name)
        assert (summary["outcome"], summary["rule"]) == ("stopped", rule)
        events = list(read_events(runs / name / "events.jsonl"))
        (asked,) = (e for e in events if e["event"] == "stop_requested")
        assert asked["rule"] == rule
        assert summary["rule_text"] == f"{asked['why']}, at step {asked['step']}"
        assert summary["repeated_samples"] == summary["missing_samples"] == 0
        late = summary["steps"] - asked["step"]
        assert late == (0 if rule == "target" else 1)


@pytest.mark.slow
def test_a_resumed_run_is_stopped_by_the_figures_of_all_its_sessions(tmp_path: Path) -> None:
    train = {"epochs": 50, "global_batch": 16, "determinism": "bits"}
    stop = {"metric": "accuracy", "patience": 3}
    job = {"runs": tmp_path, "seed": 0, "quiet": True, "stop": stop}
    recipe = f"{RECIPES / 'tiny.py'}:recipe"
    steady = instep.train(recipe, name="steady", workers=1, train=train, **job)
    step = steady.summary["steps"]
    assert steady.summary["rule"] == "plateau"
    early = {**train, "stop_after_steps": step - 3}  # with a validation out of turn
    halted = instep.train(recipe, name="halted", workers=2, train=early, **job)
    assert halted.summary["rule"] == "stop_after_steps"

    with pytest.raises(SpecError, match=r"and stop\.time_limit is 500 ms\. To train longer: "):
        instep.resume(halted.path, stop={"time_limit": 0.5}, quiet=True)
    went_on = instep.resume(halted.path, quiet=True)
    for key in ("outcome", "rule", "rule_text", "steps", "parameters_sha256"):
        assert went_on.summary[key] == steady.summary[key], key
