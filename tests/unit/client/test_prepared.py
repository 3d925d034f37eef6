"""What `session.prepare` takes, in which order, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from instep.client.join.prepared import Prepared
from instep.errors import SpecError
from instep.job.train import TrainSpec

DATA = TensorDataset(torch.zeros(24, 4))
TRAIN = TrainSpec(global_batch=8, micro_batches=4)


def parts() -> tuple[nn.Module, Any]:
    model = nn.Linear(4, 3)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def test_parts_come_in_any_order_and_go_back_in_it():
    model, optimizer = parts()
    scheduler, scaler = StepLR(optimizer, 1), torch.amp.GradScaler("cpu")
    held_out = DataLoader(DATA, batch_size=5)
    found = Prepared.of([scaler, DATA, scheduler, held_out, model, optimizer], None, TRAIN)
    assert (found.model, found.optimizer) == (model, optimizer)
    assert (found.scheduler, found.scaler) == (scheduler, scaler)
    assert [data.given.dataset for data in found.data] == [DATA, DATA]
    assert [data.batch for data in found.data] == [None, 5]
    back = found.handed_back(["to train on", "to evaluate on"])
    assert back == (scaler, "to train on", scheduler, "to evaluate on", model, optimizer)


@pytest.mark.parametrize("batch", [8, 2])
def test_a_batch_size_is_that_of_a_step_or_of_an_iteration(batch: int):
    found = Prepared.of([*parts(), DataLoader(DATA, batch_size=batch, shuffle=True)], None, TRAIN)
    assert list(found.lost) == []


def test_a_sampler_that_decides_what_is_trained_is_told():
    sampler = WeightedRandomSampler([1.0] * 24, 24)
    found = Prepared.of([*parts(), DataLoader(DATA, batch_size=8, sampler=sampler)], None, TRAIN)
    (lost,) = found.lost
    assert "has a sampler (WeightedRandomSampler), which is not used" in lost.text
    assert lost.remedy


def test_a_loader_that_shuffles_is_told_that_the_job_does_not():
    loaders = [DataLoader(DATA, batch_size=8, shuffle=True) for _ in range(2)]
    found = Prepared.of([*parts(), *loaders], None, TRAIN, shuffled=False)
    (lost,) = found.lost  # the second is to evaluate on
    assert lost.text.startswith("the training's DataLoader has shuffle = True, which is not used")


def test_what_is_not_used_of_a_loader_to_evaluate_on_is_told_and_changes_no_verdict():
    drawn = WeightedRandomSampler([1.0] * 24, 5)
    held_out = DataLoader(DATA, batch_size=5, sampler=drawn, drop_last=True)
    found = Prepared.of([*parts(), DATA, DataLoader(DATA, batch_size=5), held_out], None, TRAIN)
    sampler, last = found.lost
    assert sampler.text.startswith("an evaluation's DataLoader has a sampler (WeightedRandomS")
    assert last.text.startswith("an evaluation's DataLoader has drop_last = True")
    assert (sampler.remedy, last.remedy) == ("", "")


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ([DataLoader(DATA, batch_size=6)], r"batch_size = 6, but train\.global_batch = 8"),
        ([DataLoader(DATA, batch_size=6)], r"steps of 6 .*join\(train=\{'global_batch': 6\}\)"),
        (
            [DataLoader(DATA, batch_size=6)],
            "and 2 an iteration.* iterations of 6: a global_batch of 24",
        ),
        ([DataLoader(DATA, batch_size=None)], "DataLoader that has batch_size = None"),
        ([DataLoader(Endless())], "an Endless, which is iterable"),
        ([DATA, nn.ReLU()], "a Linear and a ReLU: a session has one model"),
        ([], "was given no data"),
        ([DATA, 3], "was given an int"),
        ([{"x": [1], "y": [2]}], "was given a dict with the keys 'x', 'y': .* give rows"),
    ],
)
def test_what_cannot_be_used_is_refused(more: list[Any], sentence: str):
    with pytest.raises(SpecError, match=sentence):
        Prepared.of([*parts(), *more], None, TRAIN)


@pytest.mark.parametrize(("left_out", "name"), [(0, "model"), (1, "optimizer")])
def test_what_is_missing_is_named(left_out: int, name: str):
    given = [part for number, part in enumerate(parts()) if number != left_out]
    with pytest.raises(SpecError, match=f"was given no {name}"):
        Prepared.of([*given, DATA], None, TRAIN)


def test_a_scheduler_that_is_not_given_is_refused():
    model, optimizer = parts()
    StepLR(optimizer, 1)
    with pytest.raises(SpecError, match="a scheduler that prepare\\(\\) was not given"):
        Prepared.of([model, optimizer, DATA], None, TRAIN)


def test_the_scheduler_of_another_optimizer_is_refused():
    model, optimizer = parts()
    with pytest.raises(SpecError, match="of another optimizer"):
        Prepared.of([model, optimizer, DATA, StepLR(parts()[1], 1)], None, TRAIN)
