"""Strategies, codecs, kills, predictions and notebooks on a GPU.

A worker has a GPU of its own, so on a machine with one a run has one worker. What it leaves is
held against a run of the same job on the CPU in float64, which other tests hold against plain
loops; and against plain PyTorch with its own `GradScaler` where the CPU has no such thing.
"""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import exact
import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES
from torch.utils.data import default_collate

import instep
from helpers import far_apart
from instep.data.order import Order, position
from instep.errors import SpecError
from instep.report.figures.outcomes import outcome_of
from instep.store.run_folder import RunFolder

pytestmark = [pytest.mark.process, pytest.mark.cuda]

ROUNDS = {"participants": 4, "name": "averaging", "options": {"local_steps": 3}}
BLOCKS = {"codec_options": {"block": 64}}
SGD = {"arguments": {"optimizer": "sgd"}}
FLOAT32 = {"dtype": "float32"}
APART = {"arguments": {"norm": False}}

CASES = {
    "micro-batches": {},
    "merged": {"train": {"merge": "always"}},
    "bits": {"train": {"determinism": "bits"}, **APART},
    "global statistics": {"train": {"batch_norm": "global"}},
    "clipped": {"train": {"max_grad_norm": 0.1}},
    "moving average": {"train": {"ema": 0.9}},
    "delayed": {"sync": {"options": {"delayed": True}}},
    "corruption": {"check": {"corruption": True}, "train": {"determinism": "bits"}, **APART},
    **{f"codec {name}": {"sync": {"codec": name, **BLOCKS}} for name in ("int8", "int4", "sign")},
    **{f"codec {name}": {"sync": {"codec": name}} for name in ("bfloat16", "float16", "nonzero")},
    "codec top_k": {"sync": {"codec": "top_k", "codec_options": {"density": 0.1}}},
    "codec dgc": {"sync": {"codec": "dgc"}, **SGD},
    "codec powersgd": {"sync": {"codec": "powersgd"}},
    "averaging": {"sync": ROUNDS},
    "averaging, optimizers reset": {
        "sync": {**ROUNDS, "options": {"local_steps": 3, "local_optimizers": "reset"}}
    },
    "averaging, bits": {"sync": ROUNDS, "train": {"determinism": "bits"}},
    "averaging in 8 bits": {"sync": {**ROUNDS, "codec": "int8", **BLOCKS}},
    "fedprox": {"sync": {**ROUNDS, "name": "fedprox"}},
    "fedopt": {"sync": {**ROUNDS, "name": "fedopt", "options": {"local_steps": 3, "rule": "adam"}}},
    "diloco in 4 bits": {"sync": {**ROUNDS, "name": "diloco", "codec": "int4", **BLOCKS}},
    "sign_vote": {"sync": {"name": "sign_vote"}, **APART},
}
"""Tables of a job, by what it is."""

CODED = 0.02
"""Of the way: they take float32, and where a number rounds otherwise its code may be the next."""


@pytest.fixture(autouse=True)
def gpu():
    """A GPU, or no test."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no GPU on this machine")


def trained(folder: Path, device: str, **tables) -> RunFolder:
    train = {
        "steps": 24, "global_batch": 16, "micro_batches": 4, "device": device, "threads": 1,
        **tables.pop("train", {}),
    }  # fmt: skip
    recipe = f"{RECIPES / 'exact.py'}:recipe"
    run = instep.train(
        recipe, workers=1, runs=folder, name=device, seed=5, quiet=True, train=train, **tables
    )
    return RunFolder(run.path)


def model_of(run: RunFolder) -> dict[str, torch.Tensor]:
    return load_file(run.path / "model.safetensors")


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_leaves_the_model_that_the_cpu_leaves(name, tmp_path):
    tables = CASES[name]
    coded = "codec" in tables.get("sync", {}) or name == "sign_vote"
    if coded:
        tables = {**tables, "arguments": {**tables.get("arguments", {}), **FLOAT32}}
    here, there = (trained(tmp_path, device, **tables) for device in ("cpu", "cuda"))
    left, expected = model_of(there), model_of(here)
    far = far_apart(left, expected)
    assert far < (CODED * way(expected, tables["arguments"]) if coded else 1e-9)
    here_loss, there_loss = (outcome_of(run).curve[-1][1] for run in (here, there))
    assert there_loss == pytest.approx(here_loss, rel=CODED if coded else 1e-9)


@pytest.mark.parametrize("name", ["server_sync", "server_async", "bounded_stale"])
def test_servers_refuse_gpus_and_leave_them_alone(name, tmp_path):
    sync = {"name": name, "servers": 1}
    with pytest.raises(SpecError, match="CPU"):
        trained(tmp_path, "cuda", sync=sync, **APART)
    trained(tmp_path, "auto", sync=sync, **APART)


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_mixed_precision_is_that_of_a_plain_loop(precision, tmp_path):
    arguments = {"dtype": "float32", "norm": False}
    train = {"precision": precision, "micro_batches": 1, "max_grad_norm": 1.0}
    run = trained(tmp_path, "cuda", arguments=arguments, train=train)
    plain = autocast(precision, arguments)
    assert far_apart(model_of(run), plain) < 1e-3 * way(plain, arguments)


def way(end, arguments):
    """How far the model has come, as `far_apart` counts."""
    return far_apart(dict(start(arguments).model.state_dict()), end)


def start(arguments):
    torch.manual_seed(5)
    return exact.recipe(**arguments)


def autocast(precision, arguments):
    """A plain loop."""
    made = start(arguments)
    model = made.model.cuda()
    optimizer = made.optimizer(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "float16")
    order = Order(96, 5)
    for step in range(1, 25):
        rows = order.indices(*position(step, 96, 16)).tolist()
        inputs, targets = (each.cuda() for each in default_collate([made.train[i] for i in rows]))
        optimizer.zero_grad()
        with torch.autocast("cuda", getattr(torch, precision)):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return {name: tensor.cpu() for name, tensor in model.state_dict().items()}


def command(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "instep", *map(str, words)]
    return subprocess.run(line, cwd=folder, capture_output=True, text=True)


def job(folder: Path, *lines: str) -> Path:
    file = folder / "job.toml"
    text = f'name = "run"\nrecipe = "{RECIPES / "exact.py"}:recipe"\nworkers = 1\nseed = 5\n'
    file.write_text(text + "\n".join(lines))
    return file


def test_killed_workers_leave_the_bits_of_an_undisturbed_run(tmp_path):
    file = job(
        tmp_path,
        "[arguments]", "norm = false",
        "[train]", "steps = 2000", "global_batch = 16", 'device = "cuda"', 'determinism = "bits"',
        "[checkpoint]", "every = 300",
    )  # fmt: skip
    done = command(tmp_path, "chaos", file, "--kills", 3, "--hangs", 1, "--json")
    assert done.returncode == 0, done.stderr
    print(done.stdout)


def test_predictions_are_those_of_the_cpu(tmp_path):
    run = trained(tmp_path, "cuda")
    source = f"{RECIPES / 'exact.py'}"
    out = tmp_path / "found.safetensors"
    done = command(tmp_path, "predict", run.path, "--data", f"{source}:held_out", "--out", out)
    assert done.returncode == 0, done.stderr
    model = exact.recipe().model
    model.load_state_dict(model_of(run))
    inputs, _ = default_collate(list(exact.held_out()))
    (found,) = load_file(out).values()
    torch.testing.assert_close(found, model.eval()(inputs), rtol=1e-9, atol=1e-12)


IN_A_CELL = """
    import os, torch
    {before}
    import instep
    def recipe():
        return instep.Recipe(
            model=torch.nn.Linear(3, 1), loss=torch.nn.MSELoss(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            train=torch.utils.data.TensorDataset(torch.randn(32, 3), torch.randn(32, 1)),
        )
    train = dict(steps=4, global_batch=8, device="cuda")
    instep.train(recipe, workers=1, quiet=True, train=train)
"""


@pytest.mark.parametrize(
    ("before", "started"),
    [
        ("", False),
        ("import instep; assert torch.cuda.is_available()", False),
        ("assert torch.cuda.is_available()", True),
        ("torch.zeros(1).cuda()", True),
    ],
)
def test_a_recipe_without_a_file_is_refused_once_cuda_has_started(before, started, tmp_path):
    script = textwrap.dedent(IN_A_CELL.format(before=before))
    environment = {k: v for k, v in os.environ.items() if k != "PYTORCH_NVML_BASED_CUDA_CHECK"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ("CUDA has started in this process" in done.stderr) == started
    assert (done.returncode != 0) == started, done.stderr
