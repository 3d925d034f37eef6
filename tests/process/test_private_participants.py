"""Runs that protect participants, against DP-FedAvg in a plain loop: the same model on any number
of workers, after a kill, and with masks."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from pathlib import Path

import numpy as np
import pytest
import sealed as recipes
import torch
from safetensors.torch import load_file
from started import RECIPES
from test_private_runs import killing_one

from instep.client.submit import Run, run_job
from instep.data.order import Order, key, micro_batch
from instep.data.partition import PARTITIONS
from instep.job import file as spec_file
from instep.privacy import secret_files
from instep.privacy.grid import Grid
from instep.privacy.keys import derived
from instep.privacy.noise import rounded_gaussian
from instep.privacy.sampling import Allocation
from instep.report.figures.proof import prove_private
from instep.store.run_folder import RunFolder
from lazily import needs

pytestmark = [pytest.mark.process, needs("dp_accounting")]

PARTICIPANTS, TAKING, LOCAL_STEPS, ROUNDS, BATCH = 6, 2, 3, 7, 5
CLIP, NOISE, SECRET = 0.4, 1.5, bytes(range(32))


@pytest.fixture(autouse=True)
def one_secret(tmp_path, monkeypatch):
    """Runs that are compared have the same secret, and leave it here."""
    monkeypatch.setenv(secret_files.ENVIRONMENT, str(tmp_path / "secrets"))
    monkeypatch.setattr(secret_files, "new_secret", lambda: SECRET)


def trained(folder: Path, workers: int, watch=None, taking=TAKING, **options) -> Run:
    table = {
        "name": f"of-{workers}-{len(options)}",
        "recipe": f"{RECIPES / 'sealed.py'}:recipe",
        "workers": workers,
        "train": {
            "steps": ROUNDS,
            "global_batch": taking * BATCH,
            "determinism": "bits",
            "threads": 1,
            "validate_every": 3,
        },
        "sync": {
            "name": "averaging",
            "participants": PARTICIPANTS,
            "options": {
                "partition": "labels",
                "skew": 5.0,
                "local_steps": LOCAL_STEPS,
                "fraction": taking / PARTICIPANTS,
                **options,
            },
        },
        "privacy": {"protects": "participant", "noise": NOISE, "delta": 1e-4, "clip": CLIP},
    }
    job = spec_file.build(table, source="a test")
    return run_job(job, folder / "runs", named=False, quiet=True, watch=watch)


def federated_averaging():
    """McMahan et al. 2018, by a plain loop: uniform weights, a fixed divisor, noise on the sum."""
    torch.manual_seed(0)
    recipe = recipes.recipe()
    server, (inputs, targets) = recipe.model, recipes.data().tensors
    shares = PARTITIONS["labels"](
        len(inputs), PARTICIPANTS, column=targets.numpy(), skew=5.0, seed=0
    )
    drawn, uses = Allocation(PARTICIPANTS, TAKING, SECRET), [0] * PARTICIPANTS
    numbers = sum(each.numel() for each in server.parameters())
    grid, portion = Grid(CLIP, numbers, drawn.places), BATCH * LOCAL_STEPS
    for step in range(1, ROUNDS + 1):
        total = np.zeros(numbers, np.int64)
        for participant in drawn.of_step(*divmod(step - 1, drawn.steps)).tolist():
            share = np.asarray(shares[participant])
            epoch, place = divmod(uses[participant], math.ceil(len(share) / portion))
            uses[participant] += 1
            order = Order(len(share), key(0, 12, participant))
            first = place * portion
            rows = share[order.indices(epoch, first, min(first + portion, len(share)))]
            own = copy.deepcopy(server)
            optimizer = recipe.optimizer(own.parameters())
            for number in range(LOCAL_STEPS):
                some = rows[slice(*micro_batch(0, portion, number, LOCAL_STEPS))]
                if not len(some):
                    continue
                optimizer.zero_grad()
                recipe.loss(own(inputs[some]), targets[some]).backward()
                optimizer.step()
            pairs = zip(server.parameters(), own.parameters(), strict=True)
            came = torch.cat([(a - b).detach().flatten() for a, b in pairs]).double()
            factor = min(1.0, CLIP * (1 - 2.0**-16) / float(came.norm()))
            total += np.rint(came.numpy() * (factor / grid.unit)).astype(np.int64)
        total += noise_of(step, total, server, grid, drawn.planned)
        place = 0
        with torch.no_grad():
            for each in server.parameters():
                mean = total[place : place + each.numel()] * (grid.unit / drawn.planned)
                each -= torch.from_numpy(mean.astype(np.float32)).view_as(each)
                place += each.numel()
    return server.state_dict()


def noise_of(step, total, server, grid, planned):
    """Keyed by the content of the sum; of each parameter, from an even place on."""
    sigma = NOISE * grid.sensitivity
    digest = hashlib.sha256(repr((sigma, grid.unit, planned)).encode())
    digest.update(total.astype(np.int32).tobytes())
    noise_key, found, place = derived(SECRET, "noise", step, digest.digest()), [], 0
    for each in server.parameters():
        found.append(rounded_gaussian(noise_key, sigma, place, each.numel()))
        place += each.numel() + each.numel() % 2
    return np.concatenate(found)


def check(run: Run) -> None:
    """What it says of itself, and that its records agree with the secret."""
    found = run.summary["privacy"]
    assert found["released"] == ROUNDS
    assert 0 < found["epsilon_lower"] <= found["epsilon"]
    assert found["adjacency"].startswith("all samples of one participant")
    assert run.summary["loss"] is None
    assert run.summary["repeated_samples"] == run.summary["missing_samples"] == 0
    proof = prove_private(RunFolder(run.path))
    assert proof.exact, proof.fault
    text = (run.path / "events.jsonl").read_text()
    events = [json.loads(line) for line in text.splitlines()]
    assert not {e["event"] for e in events} & {"participants_apart", "participants_validated"}
    assert all(e["sizes"] == e["labels"] == [] for e in events if e["event"] == "data_divided")


@pytest.mark.tail
def test_two_workers_of_which_one_is_killed_give_the_model_of_a_plain_loop(tmp_path):
    two = trained(tmp_path, 2, killing_one(2))
    assert two.summary["generations"] > 1
    check(two)
    expected = federated_averaging()
    found = load_file(two.path / "model.safetensors")
    for name, each in found.items():
        torch.testing.assert_close(each, expected[name], rtol=0, atol=1e-6)


@pytest.mark.slow
def test_one_worker_and_three_give_the_same_bits(tmp_path):
    alone, three = trained(tmp_path, 1), trained(tmp_path, 3)
    check(alone)
    assert three.summary["parameters_sha256"] == alone.summary["parameters_sha256"]


@pytest.mark.slow
def test_masked_sums_have_the_bits_of_open_ones(tmp_path):
    opened = trained(tmp_path, 1, taking=PARTICIPANTS)
    masked = trained(tmp_path, 2, killing_one(2), taking=PARTICIPANTS, secure_sums=True, least=5)
    check(masked)
    assert masked.summary["parameters_sha256"] == opened.summary["parameters_sha256"]
