"""Runs that hold out a part of their dataset, against a plain loop over the same `Subset`."""

import json
from pathlib import Path

import held_out as recipes
import numpy as np
import pytest
import torch
from averages import adam
from safetensors.torch import load_file
from started import Start
from torch import nn
from torch.utils.data import DataLoader, Subset

from instep.cli import main
from instep.data.order import Order
from instep.data.splits import SPLITS, Request
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

BATCH, EPOCHS, SHARE = 20, 3, 0.3


def plain_loop(**how):
    """One process; of ours it has the sides and the order of an epoch."""
    train, validate = SPLITS["random"](Request(samples=150, **how))
    training, held_out = (Subset(recipes.data(), side.tolist()) for side in (train, validate))
    torch.manual_seed(0)
    model = recipes.model()
    optimizer = adam(model.parameters())
    for epoch in range(EPOCHS):
        order = Order(len(train), 0).indices(epoch, 0, len(train)).tolist()
        for inputs, targets in DataLoader(training, batch_size=BATCH, sampler=order):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    inputs, targets = next(iter(DataLoader(held_out, batch_size=len(validate))))
    return model.state_dict(), nn.functional.mse_loss(model(inputs), targets).item()


@pytest.mark.tail
def test_a_run_equals_a_plain_loop_over_the_subset_and_refuses_other_data(
    run: Start, tmp_path, capsys
):
    more = tmp_path / "more"
    program = run(
        "held_out.py:recipe",
        'data.split="random"',
        f"data.validation={SHARE}",
        f"train.epochs={EPOCHS}",
        f"train.global_batch={BATCH}",
        "train.stop_after_steps=8",
        "arguments.loader=true",
        f'arguments.more_in="{more}"',
        "workers=2",
    )
    assert program.end() == 0, program.stderr
    (event,) = program.events("data_split")
    assert [event[key] for key in ("samples", "train", "validation")] == [150, 105, 45]
    assert (event["looked_at"], event["duplicates"]) == ([105, 45], 0)

    more.touch()
    assert main(["resume", str(program.run)]) != 0
    assert "had 150 samples when the run was started and has 160 now" in capsys.readouterr().err
    more.unlink()
    assert main(["resume", str(program.run), "--set", "data.validation=0.2"]) != 0
    assert "which samples are trained on follows from it" in capsys.readouterr().err

    assert main(["resume", str(program.run), "--workers", "3"]) == 0
    assert main(["audit", str(program.run), "--content"]) == 0
    state, loss = plain_loop(validation=SHARE)
    for name, value in load_file(program.run / "model.safetensors").items():
        torch.testing.assert_close(value, state[name], rtol=1e-9, atol=1e-10, msg=name)
    validated = RunFolder(program.run).named("validated")[-1]
    assert validated["samples"] == 45
    assert validated["metrics"]["loss"] == pytest.approx(loss, rel=1e-9)
    assert program.summary["same_as_one_machine"] == "yes"


@pytest.mark.tail
def test_folds_are_runs_over_the_subset_of_each(start: Start, tmp_path, monkeypatch, capsys):
    job = tmp_path / "job.toml"
    recipe = Path(recipes.__file__)
    job.write_text(
        f'name = "net"\nrecipe = "{recipe}:recipe"\nworkers = 1\n'
        f"[train]\nepochs = {EPOCHS}\nglobal_batch = {BATCH}\n"
        f'[data]\nsplit = "random"\nvalidation = {SHARE}\n'
    )
    program = start("-m", "instep", "run", job, "--folds", "2", "--json")
    assert program.end() == 0, program.stderr
    found = json.loads(program.stdout.splitlines()[-1])
    for fold in range(2):
        _, loss = plain_loop(folds=2, fold=fold)
        assert found["folds"][fold]["loss"] == pytest.approx(loss, rel=1e-9)
        assert len(RunFolder(Path(found["runs"][fold])).named("data_split")) == 1
    assert found["mean"]["loss"] == pytest.approx(np.mean([f["loss"] for f in found["folds"]]))
    monkeypatch.chdir(program.work)
    assert main(["run", str(job), "--folds", "2", "--json", "--resume"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
