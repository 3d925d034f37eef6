"""Loops of one's own: what counts, and that every number of processes does what PyTorch does."""

import json
from pathlib import Path
from typing import Any

import pytest
from started import RECIPES, Start, Started
from test_joining import slurm_task

from marks import slow

pytestmark = pytest.mark.process

TRUTH, COUNTING = RECIPES / "own_truth.py", RECIPES / "own_counting.py"
EVALUATES = RECIPES / "own_evaluates.py"

REFUSED = {
    "without_backward": ("a batch of the loader had no backward pass", 0),
    "without_anything": ("step 2: a batch of the loader had no backward pass", 1),
    "backward_that_reaches_nothing": ("a batch of the loader had no backward pass", 0),
    "step_on_every_third_batch": ("optimizer.step() was not called for its last batch", 0),
    "two_steps_for_one_batch": ("optimizer.step() was called twice for one batch", 0),
    "step_before_backward": ("optimizer.step() was not called for its last batch", 0),
    "step_with_a_closure": ("optimizer.step(closure): the workers agree", 0),
    "backward_twice": ("call all but the last inside session.no_sync()", 0),
    "no_sync_and_no_step": ("optimizer.step() was not called for its last batch", 0),
    "backward_of_many_numbers": ("was given a tensor of shape [2, 3]: a loss is one number", 0),
    "written_between_micro_batches": ("step 1: the parameter 'bias' was written to between", 0),
    "unfrozen_after_prepare": ("'bias' needs a gradient now, and did not at prepare()", 1),
    "backward_outside": ("backward() was called outside an iteration", 3),
    "step_outside": ("optimizer.step() was called outside an iteration", 0),
    "record_after_backward": ("record() was called after backward()", 0),
    "sum_within_a_step": ("in an iteration that is not the last of its step", 0),
    "scheduler_that_both_advance": ("has the session advance the scheduler after every step", 0),
    "scheduler_before_the_step": ("was called before optimizer.step(). Call it after", 0),
    "two_weights_for_one_batch": ("a loss of weight 3 after one of weight 2 for the same batch", 0),
    "scheduler_made_after": ("a scheduler was made for the optimizer after prepare()", 0),
}
"""Each with a part of the sentence, and the steps that were committed before."""

AGAIN = """
import instep, torch
from torch import nn
data = torch.utils.data.TensorDataset(torch.arange(96.0).reshape(24, 4) / 50, torch.zeros(24))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def train(local_steps, *more):
    sync = {"name": "averaging", "participants": 1, "options": {"local_steps": local_steps}}
    train = {"epochs": 1, "global_batch": 8}
    with instep.join(name="again", quiet=True, train=train, sync=sync) as session:
        loader = session.prepare(data, model, optimizer, *more)[0]
        for inputs, target in loader:
            session.backward((model(inputs).flatten() - target).square().mean())
            optimizer.step()

for wrong in ((9,), (3, torch.amp.GradScaler("cpu"))):
    try:
        train(*wrong)
    except instep.InstepError as error:
        print(error)
train(3)
"""

ACCEPTED = [
    "as_it_should",
    "step_on_every_second_batch",
    "step_where_gradients_are_agreed",
    "backward_twice_the_first_without_sync",
    "backward_only_without_sync",
    "only_the_last_with_sync_as_in_accelerate",
    "accumulate_as_in_accelerate",
    "scheduler_that_the_session_advances",
    "losses_of_one_batch_add_up",
    "batch_size_of_a_step",
    "batch_size_of_an_iteration",
]
TELLS = [
    "accumulate_as_in_accelerate",
    "losses_of_one_batch_add_up",
    "only_the_last_with_sync_as_in_accelerate",
]
"""Those that call session.backward."""

FEW = [
    "without_anything",
    "two_steps_for_one_batch",
    "step_on_every_second_batch",
    "only_the_last_with_sync_as_in_accelerate",
    "scheduler_before_the_step",
    "losses_of_one_batch_add_up",
    "unfrozen_after_prepare",
]


def check_counted(name: str, found: dict[str, Any]) -> None:
    if name in ACCEPTED:
        assert found["error"] == "", name
        assert (found["steps"], found["records"], found["exact"]) == (3, 3, True), name
        tells = name in TELLS
        assert found["unknown"] == (not tells), name
        if name == "losses_of_one_batch_add_up":
            assert abs(found["loss"]) < 1e-6
        if name != "scheduler_that_the_session_advances":
            assert found.get("apart", 0.0) < 1e-6, name
        return
    sentence, steps = REFUSED[name]
    assert sentence in found["error"], name
    assert found.get("steps", 0) == found.get("records", 0) == steps, name


@pytest.mark.parametrize("names", [FEW, slow([])])
def test_every_batch_counts_once_or_the_loop_is_refused(
    start: Start, tmp_path: Path, names: list[str]
) -> None:
    program = start(COUNTING, tmp_path / "runs", *names)
    assert program.end() == 0, program.stderr
    found = json.loads(program.stdout.splitlines()[-1])
    assert found.keys() == ({*names, "as_it_should"} if names else {*REFUSED, *ACCEPTED})
    for name, of_one in found.items():
        check_counted(name, of_one)
    program.check_no_process_is_left()


def together(start: Start, processes: int, *command: object) -> Started:
    """The first of several processes that have come to their end."""
    of_all = {"SLURM_NTASKS": str(processes), "SLURM_NTASKS_PER_NODE": str(processes)}
    programs = [
        start(*command, environment={**slurm_task(number), **of_all})
        for number in reversed(range(processes))
    ]
    for program in programs:
        assert program.end() == 0, program.stderr
        program.check_no_process_is_left()
    return programs[-1]


def truth_on(start: Start, runs: Path, processes: int, *names: str) -> dict[str, Any]:
    """What process 0 found, by case."""
    printed = together(start, processes, TRUTH, runs, *names).stdout
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found


def check_true(found: dict[str, Any], processes: int) -> None:
    for name, of_one in found.items():
        summary = of_one["summary"]
        assert of_one["apart"] < 1e-9, name
        assert of_one["warned"] == [], name
        assert (summary["outcome"], summary["steps"]) == ("completed", 8), name
        assert (summary["workers"], summary["samples"]) == (processes, 100), name
        assert summary["repeated_samples"] == summary["missing_samples"] == 0, name
        assert summary["same_as_one_machine"].startswith("no: BatchNorm1d '1' sees the 4 samples")


def test_two_processes_do_what_a_plain_loop_does(start: Start, tmp_path: Path) -> None:
    names = "adam, clipped, edited", "weighted", "scaled", "overflowing", "bits"
    found = truth_on(start, tmp_path / "runs", 2, *names)
    assert found.keys() == {*names}
    check_true(found, 2)


@pytest.mark.tail
@pytest.mark.parametrize("processes", [2, slow(3), slow(1)])
def test_what_is_evaluated_comes_once_in_the_order_of_the_dataset(
    start: Start, tmp_path: Path, processes: int
) -> None:
    program = together(start, processes, EVALUATES, tmp_path / "runs")
    assert program.stdout == "all of it\n"


@pytest.mark.slow
def test_one_and_three_processes_do_so_too_and_bits_are_the_same_on_any_number(
    start: Start, tmp_path: Path
) -> None:
    every = {n: truth_on(start, tmp_path / str(n), n) for n in (1, 2, 3)}
    for processes, found in every.items():
        check_true(found, processes)
    assert len({found["bits"]["bits"] for found in every.values()}) == 1
    assert len({found["bits"]["loss"] for found in every.values()}) == 1


@pytest.mark.slow
def test_an_optimizer_whose_job_was_refused_is_still_the_users_own(
    start: Start, tmp_path: Path
) -> None:
    file = tmp_path / "again.py"
    file.write_text(AGAIN)
    program = start(file)
    assert program.end() == 0, program.stderr
    assert "sync.options.local_steps = 9: the 24 samples" in program.stdout
    assert "does not go with a GradScaler" in program.stdout
    assert program.summary["outcome"] == "completed"
