"""What follows from validations and commits: learning rates on a plateau, averaged parameters."""

import os
import random
import signal
from pathlib import Path

import plateaus
import pytest
import tiny
import torch
from safetensors.torch import load_file
from started import RECIPES, Start, kill_members, newest_pids
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import instep
from instep.cli import main
from instep.data.order import Order
from instep.errors import InstepError
from instep.recipe.build import call
from instep.store.run_folder import RunFolder
from marks import slow

pytestmark = pytest.mark.process

STEPS, BATCH, EVERY, DECAY = 120, 16, 10, 0.9
TRAIN = {"steps": STEPS, "global_batch": BATCH, "determinism": "bits", "validate_every": EVERY}


def train(folder: Path, recipe: str, workers: int = 1, **more) -> Path:
    given = {"name": "w", "seed": 5, "train": TRAIN, "quiet": True} | more
    reference = f"{RECIPES / recipe}.py:recipe"
    return instep.train(reference, runs=folder, workers=workers, **given).path


def digest(run: Path) -> str:
    return RunFolder(run).last("model_saved")["parameters_sha256"]


def rates(run: Path) -> dict[int, tuple[float, float]]:
    lines = [line.split() for line in (run / "rates.txt").read_text().splitlines()]
    return {int(step): (float(rate), float(loss)) for step, rate, loss in lines}


@pytest.fixture(scope="module")
def on_plateaus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("plateaus"), "plateaus")


@pytest.fixture(scope="module")
def averaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    train_ = TRAIN | {"ema": DECAY}
    return train(tmp_path_factory.mktemp("averaged"), "tiny", train=train_)


# ---- ReduceLROnPlateau


@pytest.mark.tail
def test_the_rates_are_those_that_torch_makes_of_the_same_validation_losses(on_plateaus):
    found = rates(on_plateaus)
    assert sorted(found) == [*range(EVERY, STEPS + 1, EVERY)]
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.5)
    scheduler = plateaus.scheduler(optimizer)
    for _, (rate, loss) in sorted(found.items()):
        optimizer.step()
        scheduler.step(loss)
        assert rate == optimizer.param_groups[0]["lr"]
    assert rate < 0.5


@pytest.mark.slow
def test_any_number_of_workers_and_a_resumed_run_have_the_same_rates(tmp_path, on_plateaus):
    assert digest(train(tmp_path / "a", "plateaus", workers=3)) == digest(on_plateaus)
    stopped = train(tmp_path / "b", "plateaus", train=TRAIN | {"stop_after_steps": 65})
    instep.resume(stopped, quiet=True)
    assert {s: r for s, r in rates(stopped).items() if s != 65} == rates(on_plateaus)
    assert digest(stopped) == digest(on_plateaus)


@pytest.mark.tail
@pytest.mark.parametrize("kills", [2, slow(30)])
def test_a_kill_in_or_after_a_validation_steps_the_scheduler_once(
    start: Start, tmp_path: Path, on_plateaus: Path, kills: int
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "w"\nrecipe = "{RECIPES / "plateaus.py"}:recipe"\nworkers = 3\nseed = 5\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = {BATCH}\ndeterminism = "bits"\n'
        f"validate_every = {EVERY}\n[arguments]\npause_s = 0.004\n"
    )
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    kill_members(program, kills, random.Random(kills))
    assert program.end() == 0, program.stderr
    assert rates(program.run) == rates(on_plateaus)
    assert digest(program.run) == digest(on_plateaus)


# ---- train.ema


@pytest.mark.tail
def test_the_saved_model_is_the_averaged_model_of_torch(averaged):
    made = call(tiny.recipe, {}, 5)
    model, inputs, target = made.model, *made.train.tensors
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    optimizer = made.optimizer(model.parameters())
    order = Order(len(inputs), 5)
    begins = range(0, len(inputs), BATCH)
    for step in range(STEPS):
        epoch, first = step // len(begins), begins[step % len(begins)]
        taken = order.indices(epoch, first, min(first + BATCH, len(inputs)))
        optimizer.zero_grad()
        made.loss(model(inputs[taken]), target[taken]).backward()
        optimizer.step()
        average.update_parameters(model)
    saved = load_file(averaged / "model.safetensors")
    for name, value in average.module.state_dict().items():
        torch.testing.assert_close(saved[name], value, rtol=1e-4, atol=1e-5)
    raw = load_checkpoint(averaged)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(raw[name], value, rtol=1e-4, atol=1e-5)
        assert not torch.equal(saved[name], raw[name])
    with torch.no_grad():
        loss = made.loss(average.module(made.validate.tensors[0]), made.validate.tensors[1])
    run = RunFolder(averaged)
    assert run.validations[-1]["metrics"]["loss"] == pytest.approx(float(loss), rel=1e-4)


def test_a_checkpoint_is_exported_with_the_average_that_was_validated(tmp_path, averaged):
    to = tmp_path / "model.safetensors"
    assert main(["export", str(averaged), "--step", str(STEPS), "--to", str(to)]) == 0
    exported, saved = load_file(to), load_file(averaged / "model.safetensors")
    assert exported.keys() == saved.keys()
    assert all(torch.equal(exported[name], value) for name, value in saved.items())


def load_checkpoint(run: Path) -> dict[str, torch.Tensor]:
    newest = max((run / "checkpoints").glob("step-*"))
    return load_file(newest / "model.safetensors")


@pytest.mark.slow
def test_any_number_of_workers_and_a_resumed_run_have_the_same_average(tmp_path, averaged):
    train_ = TRAIN | {"ema": DECAY}
    assert digest(train(tmp_path / "a", "tiny", workers=3, train=train_)) == digest(averaged)
    stopped = train(tmp_path / "b", "tiny", train=train_ | {"stop_after_steps": 65})
    instep.resume(stopped, workers=2, quiet=True)
    assert digest(stopped) == digest(averaged)
    wanted = [event["metrics"] for event in RunFolder(averaged).validations]
    own = [e["metrics"] for e in RunFolder(stopped).validations if e["step"] != 65]
    assert own == wanted


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, slow(30)])
def test_a_worker_that_takes_a_killed_ones_place_has_the_average(
    start: Start, tmp_path: Path, averaged: Path, kills: int
) -> None:
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "w"\nrecipe = "{RECIPES / "slow_tiny.py"}:recipe"\nworkers = 3\nseed = 5\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = {BATCH}\ndeterminism = "bits"\nema = {DECAY}\n'
        f"validate_every = {EVERY}\n[arguments]\npause_s = 0.004\n"
    )
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    kill_members(program, kills, random.Random(kills))
    assert program.end() == 0, program.stderr
    assert digest(program.run) == digest(averaged)


def test_what_has_no_average_is_refused(tmp_path):
    for more, said in (
        ({"mesh": {"shard": 2}, "workers": 2}, "mesh.shard = 2"),
        ({"sync": {"name": "server_sync"}}, "sync.name = 'server_sync'"),
    ):
        with pytest.raises(InstepError, match=rf"train.ema = 0.9|{said}"):
            train(tmp_path, "tiny", train=TRAIN | {"ema": DECAY}, **more)


@pytest.mark.slow
def test_rounds_have_the_average_of_what_participants_agreed_on(tmp_path):
    more = {
        "sync": {"name": "diloco", "participants": 3, "options": {"local_steps": 2}},
        "train": TRAIN | {"steps": 12, "ema": DECAY},
        "checkpoint": {"every": 1, "keep_last": 12},
    }
    run = train(tmp_path / "a", "tiny", **more)
    agreed = [
        load_file(folder / "model.safetensors")
        for folder in sorted((run / "checkpoints").glob("step-*"))
    ]
    assert len(agreed) == 12
    average = dict(agreed[0])
    for each in agreed[1:]:
        average = {name: torch.lerp(average[name], each[name], 1 - DECAY) for name in average}
    saved = load_file(run / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in average.items())
    assert digest(train(tmp_path / "b", "tiny", workers=2, **more)) == digest(run)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["cut", "changed"])
@pytest.mark.parametrize("kind", ["average", "rates"])
def test_a_damaged_checkpoint_is_passed_over_and_the_end_is_the_same(
    tmp_path, averaged, on_plateaus, kind, damage
):
    recipe, settings, wanted = {
        "average": ("tiny", {"ema": DECAY}, averaged),
        "rates": ("plateaus", {}, on_plateaus),
    }[kind]
    settings = TRAIN | settings | {"stop_after_steps": 65}
    stopped = train(tmp_path, recipe, train=settings, checkpoint={"every": 20, "keep_last": 3})
    for file in (stopped / "checkpoints" / "step-00000065").glob("*.safetensors"):
        data = file.read_bytes()
        changed = data[:-1] + bytes([data[-1] ^ 1])
        file.write_bytes(data[:-9] if damage == "cut" else changed)
    instep.resume(stopped, quiet=True)
    assert RunFolder(stopped).last("run_started")["resumed_step"] == 60
    assert digest(stopped) == digest(wanted)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["slow_tiny", "plateaus"])
def test_a_worker_that_is_stopped_and_a_run_that_is_told_to_end_leave_no_trace(
    start: Start, tmp_path: Path, averaged: Path, on_plateaus: Path, recipe: str
) -> None:
    ema = f"ema = {DECAY}\n" if recipe == "slow_tiny" else ""
    job = tmp_path / "job.toml"
    job.write_text(
        f'name = "w"\nrecipe = "{RECIPES / recipe}.py:recipe"\nworkers = 3\nseed = 5\n'
        f'[train]\nsteps = {STEPS}\nglobal_batch = {BATCH}\ndeterminism = "bits"\n{ema}'
        f'validate_every = {EVERY}\n[report]\nloggers = ["csv"]\n[arguments]\npause_s = 0.006\n'
    )
    program = start("-m", "instep", "run", job)
    program.until(program.is_training, "training")
    os.kill(newest_pids(program)[1], signal.SIGSTOP)
    program.until(lambda: bool(program.events("worker_lost")), "a lost worker")
    program.process.terminate()
    assert program.end() == 130, program.stderr
    assert RunFolder(program.run).last_step < STEPS
    again = start("-m", "instep", "resume", program.run)
    assert again.end() == 0, again.stderr
    assert digest(program.run) == digest(averaged if ema else on_plateaus)
    lines = (program.run / "metrics.csv").read_text().splitlines()
    steps = {int(line.split(",")[0]) for line in lines[1:] if ",train/loss," in line}
    assert steps == {*range(1, STEPS + 1)}
