"""A mixture of datasets in whole runs, against a plain loop over the planned samples."""

import mixed
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from started import RECIPES
from torch import nn

import instep
from instep.data.balance import ClassOrder
from instep.data.mixture import SourceMembers
from instep.events import CONTENTS, read_records
from instep.lab.contents import compare
from instep.store.run_folder import RunFolder

pytestmark = pytest.mark.process

SEED, BATCH, EPOCHS = 5, 12, 2
PLANNED = [59, 29, 29]
"""Half, a quarter and a quarter of 117 samples."""

JOB = {
    "seed": SEED,
    "quiet": True,
    "check": {"content": "all"},
    "train": {
        "epochs": EPOCHS,
        "global_batch": BATCH,
        "micro_batches": 4,
        "determinism": "bits",
    },
    "data": {
        "loaders": 0,
        "sources": [
            {"name": "web", "weight": 2},
            {"name": "books", "weight": 1},
            {"name": "code", "weight": 1},
        ],
    },
}


def planned():
    order = ClassOrder(SourceMembers(np.array([*mixed.SIZES.values()])), np.array(PLANNED), SEED)
    for epoch in range(EPOCHS):
        for first in range(0, order.samples, BATCH):
            yield epoch, order.indices(epoch, first, min(first + BATCH, order.samples))


def plain():
    """One process, whole batches."""
    every, net = [*mixed.sources().values()], mixed.model()
    inputs, targets = (torch.cat([each.tensors[n] for each in every]) for n in range(2))
    optimizer = mixed.optimizer(net.parameters())
    for _, chosen in planned():
        chosen = torch.from_numpy(chosen)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(inputs[chosen]), targets[chosen]).backward()
        optimizer.step()
    return net.state_dict()


def test_sources_come_in_their_shares_at_any_size_and_through_a_resume(tmp_path):
    recipe = f"{RECIPES / 'mixed.py'}:recipe"
    one = instep.train(recipe, name="one", runs=tmp_path, workers=1, **JOB)
    half = {**JOB, "train": {**JOB["train"], "stop_after_steps": 7}}
    instep.train(recipe, name="two", runs=tmp_path, workers=2, **half)
    run = instep.resume(tmp_path / "two", workers=3, quiet=True)
    for name, tensor in load_file(run.path / "model.safetensors").items():
        torch.testing.assert_close(tensor, plain()[name], rtol=0, atol=1e-9)
    assert run.summary["parameters_sha256"] == one.summary["parameters_sha256"]
    assert run.summary["repeated_samples"] == run.summary["missing_samples"] == 0
    assert run.summary["classes"]["planned"] == dict(zip(mixed.SIZES, PLANNED, strict=True))
    files = run.path.glob("contents-*.bin")
    rows = np.concatenate([read_records(file, CONTENTS) for file in files])
    read = {(int(row["epoch"]), int(row["index"])) for row in rows}
    assert read == {(epoch, index) for epoch, taken in planned() for index in taken.tolist()}
    assert compare(RunFolder(run.path)).exact
