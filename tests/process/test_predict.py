"""`instep predict`: the numbers of one plain loop, whatever happens to the processes."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from started import RECIPES, Start, Started

from instep.data.shards.verify import damaged
from instep.data.sources import shards

pytestmark = pytest.mark.process

BATCH = 8
BEFORE = 5
"""Batches before the gate of the recipe, of 13."""


def command(
    folder: Path, *more: object, recipe: str = "recipe", data: str = "data"
) -> list[object]:
    """Predict with a file of the model, whose numbers differ from those of a fresh one."""
    import predicts

    file = folder / "model.safetensors"
    if not file.exists():
        torch.manual_seed(4)
        save_file(trained(predicts.model()).state_dict(), file)
    source = f"{RECIPES / 'predicts.py'}"
    asked = ["--recipe", f"{source}:{recipe}", "--data", f"{source}:{data}", "--batch", BATCH]
    return ["-m", "instep", "predict", file, *asked, "--json", *more]


def trained(model: torch.nn.Module) -> torch.nn.Module:
    for _ in range(3):
        model(torch.randn(16, 6))  # moves the running statistics
    return model


def by_hand(folder: Path) -> torch.Tensor:
    """The logits, by a plain loop over the same batches in this process."""
    import predicts

    model = predicts.model()
    model.load_state_dict(load_file(folder / "model.safetensors"))
    model.eval()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.no_grad():
            return torch.cat([model(batch) for batch in predicts.inputs().split(BATCH)])
    finally:
        torch.set_num_threads(threads)


def told(program: Started) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(program.stdout.splitlines()[-1])
    return answer


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """While this file is there, only the first batches are predicted."""
    file = tmp_path / "gate"
    file.touch()
    return file


def behind(gate: Path) -> dict[str, str]:
    """The environment of a command that meets the gate."""
    return {"PREDICT_GATE": str(gate)}


def at(gate: Path, program: Started, workers: int) -> list[int]:
    """The process ids of the workers, once all have a batch in hand and wait."""

    def waiting() -> list[int]:
        return sorted(int(file.suffix[1:]) for file in gate.parent.glob(f"{gate.name}.*"))

    program.until(lambda: len(waiting()) == workers, "each worker waits at the gate")
    return waiting()


def read_lines(program: Started, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (program.work / name).read_text().splitlines()]


def parts(program: Started) -> list[Path]:
    return list(program.work.glob("*.parts/batch-*"))


def named(program: Started, name: str) -> list[int]:
    found = []
    for process in program.processes():
        try:
            if process.name() == name:
                found.append(process.pid)
        except psutil.Error:
            pass
    return found


def predictions(program: Started) -> dict[str, torch.Tensor]:
    return load_file(program.work / "predictions.safetensors")


def check(program: Started, folder: Path) -> None:
    """Every number is that of the plain loop, and nothing is left."""
    found = predictions(program)
    assert torch.equal(found["logits"], by_hand(folder))
    assert torch.equal(found["more.0"], by_hand(folder).argmax(1))
    assert found["more.1"].shape == (101, 2)
    assert found["more.1"].dtype == torch.bfloat16
    program.check_no_process_is_left()
    program.check_no_file_is_left()
    assert [path.name for path in program.work.iterdir()] == ["predictions.safetensors"]


def test_a_killed_worker_loses_no_prediction_and_changes_none(
    start: Start, tmp_path: Path, gate: Path
) -> None:
    program = start(*command(tmp_path, "--workers", 3), environment=behind(gate))
    program.until(lambda: len(parts(program)) == BEFORE, "the first parts are there")
    os.kill(at(gate, program, 3)[1], signal.SIGKILL)
    gate.unlink()
    assert program.end() == 0, program.stderr
    check(program, tmp_path)
    answer = told(program)
    assert answer["samples"] == 101
    assert answer["workers_lost"] == 1
    assert answer["batches_predicted"] == 13
    assert answer["outputs"]["logits"] == {"dtype": "float32", "shape": [101, 3]}
    assert "killed by SIGKILL" in program.stderr


@pytest.mark.slow
def test_any_number_of_workers_gives_the_same_file(start: Start, tmp_path: Path) -> None:
    made = set()
    for workers in (1, 2, 3):
        program = start(*command(tmp_path, "--workers", workers))
        assert program.end() == 0, program.stderr
        check(program, tmp_path)
        made.add((program.work / "predictions.safetensors").read_bytes())
    assert len(made) == 1


@pytest.mark.slow
@pytest.mark.parametrize("data", ["data", "labelled"])
def test_without_predict_the_model_gets_the_inputs_with_labels_or_without(
    start: Start, tmp_path: Path, data: str
) -> None:
    program = start(*command(tmp_path, "--workers", 2, recipe="plain", data=data))
    assert program.end() == 0, program.stderr
    assert torch.equal(predictions(program)["outputs"], by_hand(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("role", ["instep-worker", "fork server"])
def test_a_stopped_process_is_replaced(start: Start, tmp_path: Path, gate: Path, role: str) -> None:
    program = start(*command(tmp_path, "--workers", 2), environment=behind(gate))
    program.until(lambda: len(parts(program)) == BEFORE, "the first parts are there")
    workers = at(gate, program, 2)
    pid = workers[0] if role == "instep-worker" else psutil.Process(workers[0]).ppid()
    os.kill(pid, signal.SIGSTOP)
    program.until(lambda: pid not in [p.pid for p in program.processes()], "it is gone")
    gate.unlink()
    assert program.end() == 0, program.stderr
    check(program, tmp_path)
    assert "stopped" in program.stderr or role != "instep-worker"


@pytest.mark.slow
def test_all_processes_but_the_client_may_be_killed(
    start: Start, tmp_path: Path, gate: Path
) -> None:
    program = start(*command(tmp_path, "--workers", 2), environment=behind(gate))
    program.until(lambda: len(parts(program)) == BEFORE, "the first parts are there")
    for process in program.processes():
        if process.pid != program.process.pid:
            process.kill()
    gate.unlink()
    assert program.end() == 0, program.stderr
    check(program, tmp_path)


@pytest.mark.slow
def test_a_worker_that_gets_nothing_done_is_replaced(start: Start, tmp_path: Path) -> None:
    hangs = ("--set", f"arguments.hangs={tmp_path / 'hung'}")
    program = start(*command(tmp_path, "--workers", 2, *hangs))
    assert program.end() == 0, program.stderr
    check(program, tmp_path)
    assert "got nothing done" in program.stderr
    assert told(program)["workers_lost"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_what_was_predicted_is_taken_up_by_the_same_command(
    start: Start, tmp_path: Path, gate: Path, number: int
) -> None:
    words = command(tmp_path, "--out", tmp_path / "all.safetensors")
    begun = start(*words, "--workers", 3, environment=behind(gate))
    folder = tmp_path / "all.safetensors.parts"
    begun.until(lambda: len(list(folder.glob("batch-*"))) == BEFORE, "the first parts are there")
    begun.process.send_signal(number)
    assert begun.end() == (-number if number == signal.SIGKILL else 130)
    begun.check_no_process_is_left()
    assert not (tmp_path / "all.safetensors").exists()
    again = start(*words, "--workers", 2)
    assert again.end() == 0, again.stderr
    answer = told(again)
    assert answer["batches_taken_up"] == BEFORE
    assert answer["batches_predicted"] == 13 - BEFORE
    found = load_file(tmp_path / "all.safetensors")
    assert torch.equal(found["logits"], by_hand(tmp_path))
    assert not folder.exists()


@pytest.mark.slow
def test_parts_of_another_command_are_not_mixed_in(
    start: Start, tmp_path: Path, gate: Path
) -> None:
    words = command(tmp_path, "--out", tmp_path / "all.safetensors")
    begun = start(*words, "--workers", 1, environment=behind(gate))
    folder = tmp_path / "all.safetensors.parts"
    begun.until(lambda: bool(list(folder.glob("batch-*"))), "a part is there")
    second = start(*words, "--workers", 1)
    assert second.end() == 6
    assert "another command writes" in second.error
    begun.process.send_signal(signal.SIGINT)
    begun.end()
    other = start(*words, "--set", "seed=8", "--workers", 1)
    assert other.end() == 2
    assert "of another command: a value of the job is another one" in other.error
    damaged = min(folder.glob("batch-*"))
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    again = start(*words, "--workers", 1)
    assert again.end() == 0, again.stderr
    assert "the part of batch 0 is damaged" in again.stderr
    assert torch.equal(load_file(tmp_path / "all.safetensors")["logits"], by_hand(tmp_path))


@pytest.mark.slow
def test_other_files_hold_the_same_numbers(start: Start, tmp_path: Path) -> None:
    program = start(*command(tmp_path, "--out", "all.npz", recipe="plain"))
    assert program.end() == 0, program.stderr
    found = np.load(program.work / "all.npz")["outputs"]
    assert np.array_equal(found, by_hand(tmp_path).numpy())
    program = start(*command(tmp_path, "--out", "all.jsonl"))
    assert program.end() == 0, program.stderr
    lines = read_lines(program, "all.jsonl")
    assert [line["sample"] for line in lines] == list(range(101))
    rows = torch.tensor([line["logits"] for line in lines])
    assert torch.equal(rows, by_hand(tmp_path))
    longer = ("--set", "arguments.shapes=lengths", "--out", "tokens.jsonl")
    program = start(*command(tmp_path, *longer))
    assert program.end() == 0, program.stderr
    lines = read_lines(program, "tokens.jsonl")
    assert {len(line["tokens"]) for line in lines} == {3, 4}


@pytest.mark.tail
def test_shards_hold_the_same_numbers_as_prepared_ones(start: Start, tmp_path: Path) -> None:
    skip = ("--set", "data.unreadable=skip", "--out", "all", "--workers", 2)
    program = start(*command(tmp_path, *skip, recipe="plain", data="unreadable"))
    assert program.end() == 0, program.stderr
    dataset, wanted = shards(program.work / "all"), by_hand(tmp_path)
    left = [n for n in range(101) if n not in (16, 50)]
    assert dataset.column("sample").tolist() == left
    rows = torch.stack([sample["outputs"] for sample in dataset])
    assert torch.allclose(rows, wanted[left], rtol=1e-5, atol=1e-6)
    manifest = dataset.manifest
    assert (manifest.samples, manifest.bad) == (99, 2)
    assert damaged(program.work / "all", manifest) == []
    bad = read_lines(program, f"all/{manifest.bad_file}")
    assert [line["where"] for line in bad] == ["sample 16", "sample 50"]
    assert told(program)["outputs"] == {"outputs": {"dtype": "float32", "shape": [101, 3]}}


@pytest.mark.slow
@pytest.mark.parametrize("data", ["unreadable", "deadly"])
def test_a_sample_that_is_skipped_keeps_its_place(start: Start, tmp_path: Path, data: str) -> None:
    skip = ("--set", "data.unreadable=skip", "--set", "data.loaders=0")
    program = start(*command(tmp_path, "--workers", 2, *skip, recipe="plain", data=data))
    assert program.end() == 0, program.stderr
    found, wanted = predictions(program), by_hand(tmp_path)
    left = [n for n in range(101) if n not in (16, 50)]
    assert found["skipped_samples"].tolist() == [16, 50]
    assert found["outputs"][[16, 50]].isnan().all()
    assert torch.allclose(found["outputs"][left], wanted[left], rtol=1e-5, atol=1e-6)
    assert [sample for sample, _ in told(program)["skipped"]] == [16, 50]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "of", "code", "says"),
    [
        ((), {"data": "dats"}, 3, "no function 'dats'. Did you mean 'data'?"),
        ((), {"data": "iterable"}, 4, "has no __getitem__"),
        ((), {"data": "empty"}, 4, "has no samples"),
        (
            (),
            {"data": "unreadable", "recipe": "plain"},
            4,
            "sample 16 cannot be read: ValueError: no picture 16",
        ),
        ((), {"recipe": "inputs"}, 3, "but an instep.Recipe is wanted"),
        (("--set", "arguments.shapes=scalar"), {}, 3, "has the shape [] for a batch of 8"),
        (("--set", "arguments.shapes=lengths"), {}, 3, "rows that do not fit into one tensor"),
        (("--out", "a.npz"), {}, 3, "torch.bfloat16, which a .npz file cannot hold"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_a_sentence(
    start: Start, tmp_path: Path, more: tuple[str, ...], of: dict[str, str], code: int, says: str
) -> None:
    program = start(*command(tmp_path, "--workers", 2, *more, **of))
    assert program.end() == code, program.stderr
    assert says in program.error
    assert "Traceback" not in program.stderr
    program.check_no_process_is_left()


@pytest.mark.slow
def test_a_model_of_another_recipe_is_refused(start: Start, tmp_path: Path) -> None:
    words = command(tmp_path)
    save_file({"0.weight": torch.zeros(16, 7)}, tmp_path / "model.safetensors")
    program = start(*words)
    assert program.end() == 7
    assert "does not fit the model" in program.error
    assert list(program.work.iterdir()) == []


@pytest.mark.slow
def test_a_run_predicts_with_its_model_or_its_newest_checkpoint(
    start: Start, finished: Started, tmp_path: Path
) -> None:
    import tiny

    data = ("--data", f"{RECIPES / 'predicts.py'}:data", "--json")
    whole = start("-m", "instep", "predict", finished.run, *data)
    assert whole.end() == 0, whole.stderr
    assert told(whole)["model"] == str(finished.run / "model.safetensors")
    model = tiny.recipe().model
    model.load_state_dict(load_file(finished.run / "model.safetensors"))
    import predicts

    with torch.no_grad():
        wanted = torch.cat([model(batch) for batch in predicts.inputs().split(16)])
    assert torch.equal(predictions(whole)["outputs"], wanted)


@pytest.mark.slow
def test_a_run_that_is_not_complete_has_its_checkpoint(start: Start, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text(f'recipe = "{RECIPES / "slow_tiny.py"}:recipe"\n[checkpoint]\nevery = 5\n')
    run = start("-m", "instep", "run", job, "--set", "train.global_batch=16")
    checkpoints = run.work / "runs"
    run.until(lambda: any(checkpoints.glob("*/checkpoints/step-*")), "a checkpoint is there")
    run.process.kill()
    run.end()
    run.check_no_process_is_left()
    program = start(
        "-m", "instep", "predict", run.run, "--data", f"{RECIPES / 'predicts.py'}:data", "--json"
    )
    assert program.end() == 0, program.stderr
    assert told(program)["step"] % 5 == 0
    assert f"(step {told(program)['step']})" in program.stderr


@pytest.mark.slow
def test_the_digits_of_the_first_example_are_recognised(start: Start, tmp_path: Path) -> None:
    from sklearn.datasets import load_digits

    example = RECIPES.parents[2] / "examples" / "01_digits"
    run = start("-m", "instep", "run", example / "job.toml", "--set", "train.epochs=3")
    assert run.end() == 0, run.stderr
    program = start("-m", "instep", "predict", run.run, "--data", f"{example / 'digits.py'}:images")
    assert program.end() == 0, program.stderr
    found = predictions(program)["outputs"].argmax(1)
    assert (found == torch.tensor(load_digits().target)).float().mean() > 0.9


@pytest.mark.slow
def test_a_command_that_predicted_nothing_leaves_nothing(start: Start, tmp_path: Path) -> None:
    program = start(*command(tmp_path))
    program.until(lambda: "predicting with" in program.stderr, "it began")
    program.process.send_signal(signal.SIGINT)
    assert program.end() == 130
    assert told(program)["interrupted"]
    program.check_no_process_is_left()
    assert list(program.work.iterdir()) == []
