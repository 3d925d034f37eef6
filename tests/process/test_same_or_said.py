"""What a run says of itself before its first step, and the steps in which nothing counts."""

import json

import pytest
import torch
import weighs
from safetensors.torch import load_file
from started import RECIPES, Start
from test_joining import slurm_task
from torch import nn

from instep.errors import RecipeError, SpecError
from instep.events import read_events

pytestmark = pytest.mark.process

QUICK = ("train.epochs=1", "train.global_batch=16", "train.threads=1")
NO = "no: BatchNorm1d '1' looks at the other samples of its batch: it sees 2 at a time; on one "


def test_the_verdict_comes_before_the_first_step_and_is_in_header_summary_and_report(
    run: Start, tmp_path
):
    program = run("weighs.py:recipe", *QUICK, 'arguments.layer="batch norm"', options=("--json",))
    assert program.end() == 0, program.stderr
    assert program.stderr.index(f"same as one machine: {NO}") < program.stderr.index("epoch 1/1")
    summary = json.loads(program.stdout.splitlines()[-1])
    assert summary["same_as_one_machine"].startswith(NO)
    assert "workers = 1 and train.micro_batches = 1" in summary["same_as_one_machine"]
    folder = program.work / "runs" / "tested"
    names = [event["event"] for event in read_events(folder / "events.jsonl")]
    assert names.count("same_as_one_machine") == 1
    assert "looks at the other samples of its batch" in (folder / "report.html").read_text()


@pytest.mark.slow
def test_strict_refuses_anything_but_yes(run: Start):
    program = run("weighs.py:recipe", *QUICK, 'arguments.layer="batch norm"', options=("--strict",))
    assert program.end() == SpecError.exit_code
    assert "check.strict = true" in program.stderr
    assert NO in program.stderr
    fine = run("weighs.py:recipe", *QUICK, options=("--strict",))
    assert fine.end() == 0, fine.stderr


@pytest.mark.tail
def test_strict_refuses_where_a_sampler_that_is_not_used_decides_what_is_trained(run: Start):
    program = run("weighs.py:sampled", *QUICK, options=("--strict",))
    assert program.end() == SpecError.exit_code
    assert (
        "no: Recipe.train's DataLoader has a sampler (FirstTwice), which is not used: "
        "every sample comes once in an epoch. Give a dataset that has"
    ) in program.stderr


@pytest.mark.slow
def test_one_worker_that_is_not_shown_the_same_keeps_all_from_saying_yes(start: Start, tmp_path):
    script, runs = RECIPES / "joins_unlike.py", tmp_path / "runs"
    programs = [start(script, runs, environment=slurm_task(number)) for number in (0, 1)]
    for program in programs:
        assert program.end() == 0, program.stderr
    summary = json.loads((runs / "unlike" / "summary.json").read_text())
    assert summary["same_as_one_machine"].startswith("not shown: the trial of another worker")


@pytest.mark.tail
def test_what_an_optimizer_keeps_is_in_the_verdict_of_the_run(run: Start):
    program = run("keeps.py:recipe", *QUICK, "arguments.seldom=true", options=("--json",))
    assert program.end() == 0, program.stderr
    said = json.loads(program.stdout.splitlines()[-1])["same_as_one_machine"]
    assert said.startswith("not shown: Seldom.number is not in state_dict()")


@pytest.mark.tail
def test_a_shape_that_a_step_has_first_gives_the_run_another_verdict(run: Start):
    settings = (*QUICK, "arguments.collates=true", "data.order=dataset")
    program = run("keeps.py:recipe", *settings, options=("--json",))
    assert program.end() == 0, program.stderr
    said = json.loads(program.stdout.splitlines()[-1])["same_as_one_machine"]
    assert said.startswith("no: in step 3 a sample has the shape [9, 1]")
    events = read_events(program.work / "runs" / "tested" / "events.jsonl")
    verdicts = [each for each in events if each["event"] == "same_as_one_machine"]
    assert (verdicts[0]["verdict"], verdicts[-1]["step"]) == ("yes", 3)


@pytest.mark.tail
def test_a_validation_is_weighted_by_what_the_loss_is_a_mean_of(run: Start):
    """Two thirds of the targets do not count, and the last of them lie in one batch."""
    program = run("weighs.py:recipe", *QUICK, "arguments.ignored=43", options=("--json",))
    assert program.end() == 0, program.stderr
    summary = json.loads(program.stdout.splitlines()[-1])
    made = weighs.recipe(ignored=43)
    made.model.load_state_dict(load_file(program.work / "runs" / "tested" / "model.safetensors"))
    inputs, target = made.validate.tensors
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(made.model(inputs), target))
    assert summary["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 4])
def test_a_validation_is_weighted_though_each_step_is_one_micro_batch(
    run: Start, micro_batches: int
):
    one = ("workers=1", f"train.micro_batches={micro_batches}")
    program = run("weighs.py:texts", *QUICK, *one, options=("--json",))
    assert program.end() == 0, program.stderr
    summary = json.loads(program.stdout.splitlines()[-1])
    made = weighs.texts()
    made.model.load_state_dict(
        load_file(program.work / "runs" / "tested" / "model.safetensors"), strict=False
    )
    whole = {name: torch.stack([each[name] for each in made.validate]) for name in made.validate[0]}
    with torch.no_grad():
        loss = float(made.model.eval()(**whole).loss)
    assert summary["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    assert summary["same_as_one_machine"] == "yes"


@pytest.mark.tail
def test_a_global_batch_in_which_nothing_counts_ends_the_run_and_says_so(run: Start):
    program = run("weighs.py:recipe", *QUICK, "arguments.ignored=64")
    assert program.end() == RecipeError.exit_code
    assert "the weight of the whole global batch of 16 samples is 0" in program.stderr
