"""Gradients one step late, as whole runs: the bits of one worker, whatever happens on the way."""

import os
import random
import signal
import time

import pytest
import tiny
import torch
from safetensors.torch import load_file
from started import Start, Started
from torch import nn

from instep.client.running import scale
from instep.data.order import Order, position
from instep.state.files.manifest import published
from instep.state.load import load
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

STEPS, BATCH = 40, 16


SETTINGS = {
    "train.steps": STEPS,
    "train.global_batch": BATCH,
    "train.max_grad_norm": 0.5,
    "sync.options.delayed": "true",
}


def begin(run: Start, workers: int, pause_s: float = 0.0, **more: object) -> Started:
    table = SETTINGS | {
        "name": f'"on-{workers}-{"-".join(more)}-{pause_s}"',
        "workers": workers,
        "train.steps": 200,
        "train.determinism": '"bits"',
        "checkpoint.every": 50,
        "checkpoint.keep_last": 9,
        "arguments.pause_s": pause_s,
    }
    table |= {f"train.{key}": value for key, value in more.items()}
    return run("slow_tiny.py:recipe", *(f"{key}={value}" for key, value in table.items()))


def late_loop() -> dict[str, torch.Tensor]:
    """Plain PyTorch: whole batches, each gradient applied after the passes of the next step."""
    torch.manual_seed(0)
    made = tiny.recipe()
    parameters = list(made.model.parameters())
    optimizer = made.optimizer(parameters)
    order, data = Order(len(made.train), 0), made.train.tensors
    waiting = []
    for step in range(1, STEPS + 1):
        rows = torch.from_numpy(order.indices(*position(step, len(made.train), BATCH)))
        loss = made.loss(made.model(data[0][rows]), data[1][rows])
        waiting.append(torch.autograd.grad(loss, parameters))
        while len(waiting) > (step < STEPS):
            for parameter, gradient in zip(parameters, waiting.pop(0), strict=True):
                parameter.grad = gradient
            nn.utils.clip_grad_norm_(parameters, 0.5)
            optimizer.step()
    return dict(made.model.state_dict())


@pytest.mark.tail
def test_a_run_gives_what_a_plain_loop_gives_and_says_that_it_is_late(run: Start) -> None:
    program = run("tiny.py:recipe", *(f"{key}={value}" for key, value in SETTINGS.items()))
    assert program.end() == 0, program.stderr
    said = program.summary["same_as_one_machine"]
    assert said.startswith("no: with sync.options.delayed = true each gradient is applied one step")
    found, wanted = load_file(program.run / "model.safetensors"), late_loop()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5)


def result(program: Started) -> str:
    assert program.end() == 0, program.stderr
    program.check_nothing_is_left()
    assert not program.events("warning")
    assert program.summary["repeated_samples"] == program.summary["missing_samples"] == 0
    return str(RunFolder(program.run).last("model_saved")["parameters_sha256"])


@pytest.mark.slow
def test_kills_changes_of_size_and_a_resume_leave_the_bits_of_one_worker(
    start: Start, run: Start
) -> None:
    wanted = result(begin(run, 1))
    assert result(begin(run, 3)) == wanted

    draw, killed = random.Random(5), begin(run, 3, 0.01)
    killed.until(killed.is_training, "training")
    for _ in range(3):
        time.sleep(draw.uniform(0.1, 0.5))  # the moment is what is drawn
        pids = {int(e["worker"]): int(e["pid"]) for e in killed.events("worker_joined")}
        try:
            os.kill(draw.choice(list(pids.values())), signal.SIGKILL)
        except ProcessLookupError:
            continue  # it is being replaced already
    assert result(killed) == wanted
    assert killed.summary["generations"] > 1

    scaled = begin(run, 4, 0.03)
    scaled.until(scaled.is_training, "training")
    for workers in (3, 4):
        scale(scaled.run, workers)
        scaled.until(
            lambda: len(scaled.events("generation_started")[-1]["members"]) == workers,  # noqa: B023
            f"of {workers} workers",
        )
    assert result(scaled) == wanted

    stopped = begin(run, 3, stop_after_steps=70)
    assert stopped.end() == 0, stopped.stderr
    own = load(dict(published(stopped.run / "checkpoints"))[70]).tensors["own"]
    assert any(bool(waits.any()) for waits in own.values())
    resumed = start("-m", "instep", "resume", stopped.run, "--workers", "2")
    assert resumed.end() == 0, resumed.stderr
    assert str(RunFolder(stopped.run).last("model_saved")["parameters_sha256"]) == wanted
