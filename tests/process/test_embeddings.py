"""Embeddings on servers, in runs: whoever is killed, and wherever the rows are afterwards.

With `determinism = "bits"` all runs end with the same model, to the bit.
"""

import contextlib
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES, Start, Started, kill_members, newest_pids

import instep
from instep.cli import main
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

RECIPE = f"{RECIPES / 'rows.py'}:recipe"
STEPS = 60
TRAIN: dict[str, Any] = {"global_batch": 16, "determinism": "bits", "validate_every": 20}


def trained(runs: Path, name: str, workers: int, servers: int, **more: Any) -> Path:
    settings: dict[str, Any] = {"train": {**TRAIN, "steps": 24}, "checkpoint": {"every": 5}, **more}
    sync = {"name": "server_sync", "servers": servers}
    if not servers:
        sync = {"name": "all_reduce"}
    run = instep.train(
        RECIPE, name=name, runs=runs, seed=5, quiet=True, workers=workers, sync=sync, **settings
    )
    return run.path


def model_of(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model.safetensors")


def sha256(run: Path) -> str:
    return str(RunFolder(run).last("model_saved")["parameters_sha256"])


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = tmp_path_factory.mktemp("undisturbed")
    return trained(runs, "w", 1, 1, train={**TRAIN, "steps": STEPS})


def begin(start: Start, folder: Path, workers: int, servers: int, pause_s: float) -> Started:
    job = folder / "job.toml"
    job.write_text(
        f'name = "disturbed"\nrecipe = "{RECIPE}"\nworkers = {workers}\nseed = 5\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = 16\ndeterminism = "bits"\nvalidate_every = 20\n'
        f'[sync]\nname = "server_sync"\nservers = {servers}\n[checkpoint]\nevery = 5\n'
        f"[arguments]\npause_s = {pause_s * workers / 1000}\n"
    )
    return start("-m", "instep", "run", job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("workers", "servers", "kills"), [(2, 1, 3), slow(2, 2, 20), slow(3, 1, 20)]
)
def test_servers_and_workers_that_are_killed_leave_no_trace(
    start: Start, tmp_path: Path, undisturbed: Path, workers: int, servers: int, kills: int
) -> None:
    draw = random.Random(f"{workers} {servers} {kills}")
    program = begin(start, tmp_path, workers, servers, pause_s=8 if kills < 10 else 40)
    program.until(program.is_training, "training")
    killed = kill_members(program, kills, draw)
    assert program.end() == 0, program.stderr
    run, wanted = RunFolder(program.run), RunFolder(undisturbed)
    assert run.audit.sha256 == wanted.audit.sha256
    assert sha256(run.path) == sha256(undisturbed)
    metrics = [{e["step"]: e["metrics"] for e in each.validations} for each in (run, wanted)]
    assert metrics[0] == metrics[1]
    assert killed.total() == kills
    program.check_nothing_is_left()


@pytest.mark.slow
def test_rows_are_trained_saved_and_read_as_those_of_a_plain_model(tmp_path: Path) -> None:
    """Resumed with another number of servers, exported from a checkpoint, and used to predict."""
    plain = trained(tmp_path, "plain", 1, 0)
    wanted = model_of(plain)
    halted = trained(tmp_path, "halted", 2, 2, train={**TRAIN, "steps": 24, "stop_after_steps": 11})
    out = tmp_path / "eleven.safetensors"
    assert main(["export", str(halted), "--step", "11", "--to", str(out)]) == 0
    after_eleven = model_of(halted)
    exported = load_file(out)
    assert exported.keys() == after_eleven.keys() == wanted.keys()
    assert all(torch.equal(exported[name], each) for name, each in after_eleven.items())
    again = instep.resume(
        halted, quiet=True, train={"stop_after_steps": None}, sync={"servers": 3}
    ).path
    found = model_of(again)
    for name, each in found.items():
        torch.testing.assert_close(each, wanted[name], rtol=1e-4, atol=1e-5, msg=name)
    validations = [RunFolder(run).validations[-1]["metrics"] for run in (again, plain)]
    assert validations[0] == pytest.approx(validations[1], rel=1e-4)
    assert sha256(again) == sha256(trained(tmp_path, "one", 1, 1))
    data = f"{RECIPES / 'rows.py'}:words"
    predicted = tmp_path / "predicted.jsonl"
    assert main(["predict", str(again), "--data", data, "--out", str(predicted)]) == 0
    assert len([json.loads(line) for line in predicted.read_text().splitlines()]) == 101


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "sparse_adam"])
def test_other_optimizers_go_on_from_a_checkpoint(tmp_path: Path, optimizer: str) -> None:
    arguments = {"optimizer": optimizer}
    halted = trained(
        tmp_path,
        "halted",
        2,
        1,
        train={**TRAIN, "steps": 24, "stop_after_steps": 11},
        arguments=arguments,
    )
    again = instep.resume(
        halted, quiet=True, train={"stop_after_steps": None}, sync={"servers": 2}
    ).path
    assert sha256(again) == sha256(trained(tmp_path, "one", 1, 1, arguments=arguments))


def memory_of(pid: int) -> dict[str, int]:
    """Bytes by kind, as the kernel calls them; empty if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return {}
    rows = [line.split() for line in lines if line.startswith("Rss")]
    return {row[0].rstrip(":"): 1024 * int(row[1]) for row in rows}


@pytest.mark.slow
def test_ten_million_rows_train_in_the_memory_of_those_that_are_touched(
    start: Start, tmp_path: Path
) -> None:
    """Two tables of five million rows, 1.28 GB, which a server has and no worker."""
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "big"\nrecipe = "{RECIPE}"\nworkers = 2\nseed = 5\n'
        "[train]\nsteps = 12\nglobal_batch = 1024\n"
        '[sync]\nname = "server_sync"\nservers = 1\n'
        "[arguments]\nrows = 5_000_000\ndim = 32\nsamples = 20_000\n"
    )
    program = start("-m", "instep", "run", job)
    table, seen = 2 * 5_000_000 * 32 * 4, dict[int, dict[str, int]]()

    while program.process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            program.process.wait(0.3)
        if not ((program.work / "runs").is_dir() and program.is_training()):
            continue
        for number, pid in newest_pids(program).items():
            for kind, size in memory_of(pid).items():
                most = seen.setdefault(number, {})
                most[kind] = max(most.get(kind, 0), size)
    assert program.process.returncode == 0, program.stderr
    for worker in (0, 1):
        assert sum(seen[worker].values()) < table / 2, seen
    assert seen[2]["RssShmem"] > table, seen
    assert seen[2]["RssAnon"] < table / 2, seen


@pytest.mark.slow
def test_rows_travel_as_they_are_beside_encoded_layers(tmp_path: Path) -> None:
    losses = []
    for codec in ("none", "int8"):
        run = instep.train(
            RECIPE,
            name=codec,
            runs=tmp_path,
            seed=5,
            quiet=True,
            workers=2,
            sync={"name": "server_sync", "servers": 2, "codec": codec},
            train={"global_batch": 16, "steps": 40, "max_grad_norm": 1.0},
        )
        losses.append(run.summary["loss"])
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
