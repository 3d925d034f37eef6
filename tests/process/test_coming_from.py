"""The two programs of each "Coming from" page end with the parameters of a plain loop.

All take the same samples in the same order, so that what is left to differ is rounding: sums of
float32 in another order, over 120 steps. They were found to be up to 6e-7 of a tensor's norm apart;
1e-5 is allowed. One sample that is missing makes far more.
"""

import importlib.util
import json
import random
import tempfile
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file
from started import EXECUTE, Start, Started, kill, kill_members
from torch import Tensor, nn
from torch.utils.data import default_collate

from instep.events import read_events
from lazily import Lazy

sklearn_datasets = Lazy("sklearn.datasets")

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "examples" / "coming_from"
CLOSE = 1e-5
CLOSE_WITH_ADAM = 3e-5
"""Adam divides by small numbers; found were 3e-6."""

pytestmark = pytest.mark.process

State: TypeAlias = dict[str, Tensor]


def plain_loop(epochs: int) -> State:
    """What the digits programs train, in one process with nothing but torch."""
    images, digits = sklearn_datasets.load_digits(return_X_y=True)
    images, digits = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(digits)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(epochs):
        for first in range(0, 1536, 64):
            batch = slice(first, first + 64)
            nn.functional.cross_entropy(net(images[batch]), digits[batch]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return net.state_dict()


def far(found: State, expected: State) -> float:
    """How far tensors are apart at most, as a share of the norm of each.

    But for the bias of an attention's keys: the softmax does not see it, so that its gradient is
    nothing but rounding, which Adam makes as large as any other.
    """
    assert found.keys() == expected.keys()
    seen = {n: t for n, t in expected.items() if not n.endswith("key.bias")}
    return max(float((found[n] - t).norm() / t.norm()) for n, t in seen.items())


def torchrun(processes: int, file: Path, *options: object) -> list[object]:
    words = ("--standalone", "--nproc-per-node", processes)
    return ["-m", "torch.distributed.run", *words, *options, file]


def ended(program: Started) -> Path:
    assert program.end() == 0, program.stderr
    return program.work


def ways(file: Path) -> list[list[object]]:
    """One process, two and three, each started in another way."""
    return [[file], torchrun(2, file), ["-m", "instep", "run", file, "--workers", 3]]


def check_ours(start: Start, file: Path, expected: State) -> None:
    for way in ways(file):
        run = ended(start(*way)) / "runs" / "digits"
        assert far(load_file(run / "model.safetensors"), expected) < CLOSE


@pytest.mark.slow
@pytest.mark.parametrize("rival", ["ddp", "torchrun"])
def test_programs_that_torchrun_starts(start: Start, rival: str) -> None:
    expected = plain_loop(5)
    theirs = ended(start(*torchrun(2, PROGRAMS / rival / f"with_{rival}.py")))
    assert far(torch.load(theirs / "model.pt"), expected) < CLOSE
    check_ours(start, PROGRAMS / rival / "with_instep.py", expected)


@pytest.mark.slow
def test_programs_for_accelerate(start: Start) -> None:
    expected = plain_loop(5)
    theirs = ended(start(*torchrun(2, PROGRAMS / "accelerate" / "with_accelerate.py")))
    assert far(load_file(theirs / "model" / "model.safetensors"), expected) < CLOSE
    check_ours(start, PROGRAMS / "accelerate" / "with_instep.py", expected)


def check_recipe(start: Start, folder: Path, rival: str, expected: State, close: float) -> None:
    """Our program, with one worker, with two and with three."""
    text = (PROGRAMS / rival / "with_instep.py").read_text()
    for workers in (1, 2, 3):
        file = folder / f"with_{workers}.py"
        file.write_text(text.replace("workers=2", f"workers={workers}"))
        run = ended(start(file)) / "runs" / "digits"
        assert far(load_file(run / "model.safetensors"), expected) < close


@pytest.mark.slow
def test_programs_for_lightning(start: Start, tmp_path: Path) -> None:
    python = ROOT / ".venv" / "lightning" / "bin" / "python"
    if not python.exists():
        pytest.skip("Lightning has an environment of its own: make lightning")
    expected = plain_loop(5)
    program = start("-c", EXECUTE, python, PROGRAMS / "lightning" / "with_lightning.py")
    assert far(torch.load(ended(program) / "model.pt"), expected) < CLOSE
    check_recipe(start, tmp_path, "lightning", expected, CLOSE)


def plain_loop_of_the_bert() -> State:
    """The recipe of our program, in one process with nothing but torch and transformers."""
    file = PROGRAMS / "hugging_face" / "with_instep.py"
    spec = importlib.util.spec_from_file_location("coming_from_the_trainer", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    recipe = module.recipe()
    model, optimizer = recipe.model.train(), recipe.optimizer(recipe.model.parameters())
    scheduler = recipe.scheduler(optimizer)
    for first in [*range(0, 1536, 64)] * 2:
        batch = default_collate(recipe.train[first : first + 64])
        recipe.compute_loss(model, batch).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning:transformers")
def test_programs_for_the_trainer_of_hugging_face(start: Start, tmp_path: Path) -> None:
    expected = plain_loop_of_the_bert()
    theirs = ended(start(*torchrun(2, PROGRAMS / "hugging_face" / "with_trainer.py")))
    assert far(load_file(theirs / "model" / "model.safetensors"), expected) < CLOSE_WITH_ADAM
    check_recipe(start, tmp_path, "hugging_face", expected, CLOSE_WITH_ADAM)


@pytest.mark.slow
def test_programs_for_ray_train(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray.train", exc_type=ImportError)
    expected, runs = plain_loop(5), []
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # names of sockets must be short
        monkeypatch.setenv("RAY_TMPDIR", folder)
        for name, workers in (("ray_train", 2), ("instep", 1), ("instep", 2), ("instep", 3)):
            runs.append(tmp_path / f"runs-{len(runs)}")
            text = (PROGRAMS / "ray_train" / f"with_{name}.py").read_text()
            text = text.replace("workers=2", f"workers={workers}")
            (file := tmp_path / f"{runs[-1].name}.py").write_text(
                text.replace("/shared/runs", str(runs[-1]))
            )
            ended(start(file))
    theirs, *ours = runs
    newest = max(theirs.rglob("model.pt"), key=lambda file: file.stat().st_mtime)
    assert far(torch.load(newest), expected) < CLOSE
    for run in ours:
        assert far(load_file(run / "digits" / "model.safetensors"), expected) < CLOSE


LONGER = ("--set", "train.epochs=40", "--set", "train.determinism=bits")
"""There is time to kill somebody. Over so many steps rounding grows, so bits are compared."""


def bits(start: Start, file: Path) -> str:
    """Of an undisturbed run on one worker."""
    program = start("-m", "instep", "run", file, "--workers", 1, *LONGER)
    ended(program)
    return str(program.summary["parameters_sha256"])


@pytest.mark.slow
def test_workers_of_the_script_that_was_one_for_ddp_are_killed(start: Start) -> None:
    file = PROGRAMS / "ddp" / "with_instep.py"
    program = start("-m", "instep", "run", file, "--workers", 2, *LONGER)
    program.until(program.is_training, "training")
    killed = kill_members(program, 2, random.Random(1), pauses_s=(0.1, 0.3))
    ended(program)
    assert killed.total() == len(program.events("worker_lost")) == 2
    assert program.summary["steps"] == 40 * 24
    assert program.summary["parameters_sha256"] == bits(start, file)


@pytest.mark.slow
def test_torchrun_restarts_the_recipe_that_continues_at_its_checkpoint(
    start: Start, tmp_path: Path
) -> None:
    text = (PROGRAMS / "torchrun" / "with_instep.py").read_text()
    longer = text.replace('"epochs": 5', '"epochs": 40, "determinism": "bits"')
    (file := tmp_path / "longer.py").write_text(longer)
    program = start(*torchrun(2, file, "--max-restarts", 3))
    run = program.work / "runs" / "digits"
    program.until(lambda: (run / "checkpoints").is_dir(), "a checkpoint")
    (second,) = (
        e for e in read_events(run / "events.jsonl") if e.get("worker") == 1 and "pid" in e
    )
    kill(second["pid"])
    ended(program)
    assert sum(e["event"] == "run_started" for e in read_events(run / "events.jsonl")) == 2
    summary = json.loads((run / "summary.json").read_text())
    assert summary["parameters_sha256"] == bits(start, file)
