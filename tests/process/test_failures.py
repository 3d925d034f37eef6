"""A run that fails begins its message with the cause, and points at the user's own line."""

import re
from pathlib import Path

import pytest
import torch
from started import RECIPES, Start, Started

from marks import slow

pytestmark = pytest.mark.process


def line_of(file: str, text: str) -> int:
    """The number of the one line of a recipe that has this text."""
    lines = (RECIPES / file).read_text().splitlines()
    (number,) = (n for n, line in enumerate(lines, 1) if text in line)
    return number


def failing(run: Start, recipe: str, *settings: str) -> Started:
    """A run that has failed, as every failing run should."""
    program = run(recipe, "train.epochs=1", "train.global_batch=8", *settings)
    assert program.end() != 0
    assert program.stderr.count("instep: ") == 1
    assert "Traceback" not in program.stderr + program.stdout
    assert "went away" not in program.error
    assert program.summary["outcome"] == "failed"
    assert len(program.events("worker_failed")) == 1
    program.check_nothing_is_left()
    return program


def refused(run: Start, recipe: str, *settings: str) -> Started:
    """A run whose recipe was refused: there is a sentence, and nothing else."""
    program = run(recipe, "train.epochs=1", "train.global_batch=8", *settings)
    assert program.end() != 0
    assert program.stderr.count("instep: ") == 1
    assert "Traceback" not in program.stderr + program.stdout
    assert "full log" not in program.error
    program.check_no_process_is_left()
    program.check_no_file_is_left()
    assert list(program.work.iterdir()) == []
    return program


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("at", "code", "kind", "who"),
    [
        slow("forward", 5, "ValueError", r"worker [01] failed at step 2, in forward: "),
        ("loss", 5, "KeyError", r"worker [01] failed at step 2, in loss: "),
        ("dataset", 4, "OSError", r"worker [01] failed at step 2, in loading: "),
        slow("metric", 5, "ZeroDivisionError", "failed at step 80, in validation (metric error): "),
    ],
)
def test_what_one_worker_raises_is_the_cause_with_the_line_that_raised_it(
    run: Start, at: str, code: int, kind: str, who: str
) -> None:
    program = failing(run, "breaks.py:recipe", f"arguments.at={at}")
    assert program.process.returncode == code
    text = "the forward pass" if at == "forward" else f"the {at}"
    first, second, *_ = program.error.splitlines()
    assert re.search(who, first)  # whoever is quicker may be dealt more
    assert kind in first
    assert f"{text} met the marked sample" in first
    assert f"breaks.py:{line_of('breaks.py', f'{text} met')}" in first + second
    assert "raise " in second or at == "dataset"
    worker = program.events("worker_failed")[0]["worker"]
    log = program.run / "logs" / f"worker-{worker}.log"
    assert str(log) in program.error
    assert "Traceback" in log.read_text()
    assert f"{text} met the marked sample" in log.read_text()


@pytest.mark.tail
def test_a_crash_of_native_code_is_named_with_its_signal(run: Start) -> None:
    program = failing(run, "breaks.py:recipe", "arguments.at=segfault")
    assert program.process.returncode == 5
    assert re.search("worker [01] failed", program.error)
    assert "killed by SIGSEGV (signal 11). Native code of a library crashed." in program.error
    assert "It happened 3 times at this step." in program.error


@pytest.mark.slow
def test_a_process_that_exits_without_a_message_is_named_with_its_code(run: Start) -> None:
    program = failing(run, "breaks.py:recipe", "arguments.at=exit")
    assert program.process.returncode == 5
    assert re.search("worker [01] failed", program.error)
    assert "the process ended with code 3 and said nothing." in program.error


@pytest.mark.tail
def test_a_recipe_file_that_cannot_be_imported_is_a_wrong_recipe(run: Start) -> None:
    program = refused(run, "typing_mistake.py:recipe")
    first, second, *_ = program.error.splitlines()
    assert "failed, in recipe: " in first
    assert "NameError: name 'tinny' is not defined" in first
    assert f"typing_mistake.py:{line_of('typing_mistake.py', 'tinny.')}" in second
    assert "recipe = tinny.recipe" in second
    assert program.process.returncode == 3


@pytest.mark.tail
def test_a_recipe_file_that_ends_the_program_when_imported_is_named(run: Start) -> None:
    program = failing(run, "exits_at_import.py:recipe")
    first, second, *_ = program.error.splitlines()
    assert "in recipe: SystemExit: 2" in first
    assert "exits_at_import.py:5 in <module>: argparse.ArgumentParser().parse_args(" in second


@pytest.mark.tail
def test_a_recipe_file_that_starts_a_run_when_imported_is_refused(run: Start) -> None:
    program = refused(run, "trains_at_import.py:recipe")
    first, second, *_ = program.error.splitlines()
    assert "a run was started while the recipe's file was being imported." in first
    assert "`if __name__ == '__main__':`" in first
    assert "instep.train(" in second
    assert program.process.returncode == 2


@pytest.mark.tail
@pytest.mark.grid(1)
@pytest.mark.parametrize("mesh", [(), slow(("mesh.shard=2",)), ("mesh.tensor=2",)], ids=str)
def test_a_recipe_that_builds_another_model_in_each_process_is_refused(run: Start, mesh) -> None:
    program = refused(run, "differs.py:recipe", *mesh)
    first = program.error.splitlines()[0]
    assert "worker 1 failed, in " in first
    assert ": '2.bias' has other values on rank 1 than on" in first
    assert program.process.returncode == 3


@pytest.mark.tail
def test_a_recipe_with_other_samples_in_each_process_is_refused(run: Start) -> None:
    program = refused(run, "uneven_data.py:recipe")
    first = program.error.splitlines()[0]
    assert "worker 1 failed, in joining: Recipe.train has" in first
    assert program.process.returncode == 3


@pytest.mark.tail
def test_a_metric_of_the_wrong_shape_is_found_before_the_first_step(run: Start) -> None:
    program = refused(run, "wrong_metric.py:recipe", "train.epochs=1000000")
    first = program.error.splitlines()[0]
    assert (
        "failed, in the trial of a batch (metric right): Recipe.metrics['right'] returned" in first
    )
    assert program.process.returncode == 3


@pytest.mark.tail
def test_a_gpu_that_is_not_there_is_refused(run: Start) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    program = refused(run, "tiny.py:recipe", "train.device=cuda")
    assert "train.device = 'cuda', but torch" in program.error
    assert "Use train.device = 'cpu'" in program.error
    assert program.process.returncode == 2


@pytest.mark.tail
def test_a_refused_recipe_leaves_what_was_there_before(run: Start, tmp_path: Path) -> None:
    runs = tmp_path / "program-0" / "work" / "runs"
    (runs / "tested").mkdir(parents=True)
    program = run("typing_mistake.py:recipe")
    assert program.end() == 3
    assert [path.name for path in runs.iterdir()] == ["tested"]
    assert list((runs / "tested").iterdir()) == []


@pytest.mark.slow
def test_a_recipe_that_compiles_its_model_trains(run: Start) -> None:
    program = run("compiles.py:recipe", "train.epochs=1")
    assert program.end() == 0, program.stderr
    assert program.summary["samples"] == 101
    program.check_no_process_is_left()  # the compiler keeps files of its own


@pytest.mark.slow
def test_a_worker_that_compiles_anew_is_not_taken_to_hang(run: Start) -> None:
    slowly = ("arguments.after=100", "arguments.seconds=6.0", "train.steps=200")
    program = run("compiles.py:again", *slowly, "train.global_batch=16")
    assert program.end() == 0, program.stderr
    assert program.events("worker_hung") == program.events("worker_lost") == []
    assert program.summary["seconds"] > 6.0
