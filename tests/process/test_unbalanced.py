"""Unbalanced classes in whole runs, against a plain PyTorch loop over the planned samples."""

import json

import numpy as np
import pytest
import torch
import unbalanced
from safetensors.torch import load_file
from started import RECIPES
from torch import nn

import instep
from instep.cli import main
from instep.data.balance import (
    ClassOrder,
    InProportion,
    Members,
    Wished,
    class_weights,
    planned_counts,
)
from instep.data.order import Order
from instep.data.splits.columns import Classes, Column
from instep.errors import SpecError
from instep.events import CONTENTS, read_records
from instep.store.run_folder import RunFolder
from marks import tail

pytestmark = pytest.mark.process

SEED, BATCH, EPOCHS, SAMPLES = 5, 12, 2, sum(unbalanced.COUNTS)
LABELS = unbalanced.dataset().tensors[1].numpy()


TRAIN = {"epochs": EPOCHS, "global_batch": BATCH, "micro_batches": 5, "merge": "never"}


def trained(folder, workers, *, arguments=None, **changes):
    run = instep.train(
        f"{RECIPES / 'unbalanced.py'}:recipe",
        name=f"on-{workers}",
        runs=folder,
        workers=workers,
        seed=SEED,
        quiet=True,
        arguments=arguments or {},
        check={"content": "all"},
        **{"train": TRAIN, "data": {"loaders": 0, **changes.pop("data", {})}, **changes},
    )
    return run.path


def plain(batches, weights=None):
    """One process, whole batches, and weights in the loss where there are some."""
    (inputs, labels), net = unbalanced.dataset().tensors, unbalanced.model()
    optimizer = unbalanced.optimizer(net.parameters())
    for chosen in map(torch.from_numpy, batches):
        losses = nn.functional.cross_entropy(net(inputs[chosen]), labels[chosen], reduction="none")
        own = torch.ones(len(chosen)) if weights is None else weights[labels[chosen]]
        optimizer.zero_grad()
        ((losses * own).sum() / own.sum()).backward()
        optimizer.step()
    return net.state_dict()


def batches_of(order, size=BATCH):
    return [
        order.indices(epoch, first, min(first + size, order.samples))
        for epoch in range(EPOCHS)
        for first in range(0, order.samples, size)
    ]


def assert_same(run, wanted, *, within=1e-9):
    found = load_file(run / "model.safetensors")
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=within)


def seen(run):
    """How often each sample was read in each epoch and first trained on, by content."""
    rows = np.concatenate([read_records(file, CONTENTS) for file in run.glob("contents-*.bin")])
    return {(int(row["epoch"]), int(row["index"])) for row in rows}


@pytest.mark.parametrize("workers", [1, 2, tail(3)])
def test_reweighting_is_the_weighted_mean_over_the_whole_global_batch(tmp_path, workers):
    run = trained(tmp_path, workers, data={"balance": "reweight"})
    batches = batches_of(Order(SAMPLES, SEED))
    cuts = [np.array_split(batch, 5) for batch in batches]
    assert any(len(np.unique(LABELS[part])) < 3 for parts in cuts for part in parts)
    weights = torch.from_numpy(class_weights(np.array(unbalanced.COUNTS), "inverse"))
    assert_same(run, plain(batches, weights))
    assert RunFolder(run).same_as_one_machine == "yes"


@pytest.mark.parametrize(
    ("balance", "workers"), [("resample", 2), tail("stratified", 3), tail("resample", 1)]
)
def test_planned_classes_are_trained_on_as_a_plain_loop_would(tmp_path, balance, workers, capsys):
    run = trained(tmp_path, workers, data={"balance": balance})
    members = Members(Classes.of(Column("labels", LABELS), SAMPLES).codes)
    planned = planned_counts(members.counts, "inverse")
    order = ClassOrder(members, planned, SEED)
    if balance == "stratified":
        order = InProportion(members, SEED)
    assert_same(run, plain(batches_of(order)))
    assert seen(run) == {(epoch, index) for epoch in range(EPOCHS) for index in range(SAMPLES)}
    capsys.readouterr()
    assert main(["audit", str(run), "--content", "--json"]) == 0
    proof = json.loads(capsys.readouterr().out)
    assert proof["exact"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["classes"]["before"] == {"0": 40, "1": 9, "2": 3}
    assert sum(summary["classes"]["planned"].values()) == order.samples
    assert summary["samples"] == EPOCHS * order.samples


@pytest.mark.tail
def test_a_weighted_sampler_is_planned_and_a_resumed_run_goes_on_in_it(tmp_path):
    weights = 1.0 / np.bincount(LABELS)[LABELS]
    order = Wished(weights / weights.sum() * SAMPLES, SEED)
    steps = -(-SAMPLES // BATCH)
    batches = []
    for epoch in range(EPOCHS):
        ends = np.arange(steps + 1) * order.positions(epoch) // steps
        batches += [order.indices(epoch, *ends[n : n + 2]) for n in range(steps)]
    run = trained(tmp_path, 2, arguments={"sampled": True}, train={**TRAIN, "stop_after_steps": 3})
    assert main(["resume", str(run), "--workers", "3"]) == 0
    assert_same(run, plain(batches))
    assert RunFolder(run).audit.exact
    classes = json.loads((run / "summary.json").read_text())["classes"]
    assert classes["before"] == {"0": 40, "1": 9, "2": 3}
    assert sorted(classes["planned"].values()) == [17, 17, 17]  # of 52


@pytest.mark.tail
def test_a_loss_of_ones_own_gives_a_number_for_each_sample(tmp_path):
    runs = [
        trained(tmp_path / f"{own}", 2, data={"balance": "reweight"}, arguments={"own": own})
        for own in (False, True)
    ]
    assert_same(runs[1], load_file(runs[0] / "model.safetensors"))


def test_what_does_not_go_together_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(SpecError, match="order = 'windowed': classes are mixed over the whole set"):
        trained(tmp_path, 1, data={"balance": "resample", "order": "windowed"})
    averaging = {"name": "averaging", "participants": 2, "options": {"local_steps": 2}}
    with pytest.raises(SpecError, match=r"'reweight' does not go with sync\.name = 'averaging'"):
        trained(tmp_path, 1, data={"balance": "reweight"}, sync=averaging)
