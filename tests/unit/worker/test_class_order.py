"""Data sorted by class are said before the first step, from labels alone."""

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

import instep
from instep.data.shard_sizes import shards_or_blocks
from instep.data.windowed import Windowed
from instep.job.data import DataSpec
from instep.job.spec import JobSpec
from instep.worker.reading.class_order import said_of_classes

CLASSES = torch.arange(4_000) // 400
MIXED = CLASSES[torch.randperm(4_000, generator=torch.Generator().manual_seed(1))]
JOB = JobSpec(recipe="a.py:f", data=DataSpec(order="windowed", window=200))


class Plain(Dataset):
    """Samples must not be read."""

    def __len__(self):
        return 4_000

    def __getitem__(self, index):
        raise AssertionError("only labels are needed")


class WithTargets(Plain):
    def __init__(self, targets):
        self.targets = targets


class WithColumns(Plain):
    columns = ("x", "label")

    def __init__(self, values):
        self.values = values

    def column(self, name):
        return {"label": self.values, "kind": self.values.numpy()}[name]


def said(dataset, job=JOB, labels=None):
    recipe = instep.Recipe(
        model=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=torch.optim.SGD,
        train=dataset,
        labels=labels,
    )
    order = Windowed.of_job(job, shards_or_blocks(dataset, len(dataset), 200, 8))
    return said_of_classes(job, recipe, order)


@pytest.mark.parametrize(
    "given",
    [
        lambda labels: (WithTargets(labels),),
        lambda labels: (WithColumns(labels),),
        lambda labels: (Subset(WithTargets(labels.tolist()), range(4_000)),),
        lambda labels: (Plain(), JOB, labels.tolist()),
        lambda labels: (Plain(), JOB, lambda _, index: labels[index]),
        lambda labels: (WithColumns(labels), JOB, "kind"),
        lambda labels: (
            WithColumns(labels),
            JobSpec(recipe="a.py:f", data=DataSpec(order="windowed", window=200, labels="kind")),
        ),
    ],
)
def test_classes_that_come_one_after_the_other_are_said(given):
    text = said(*given(CLASSES))
    assert text.startswith("the training set seems to be sorted by class: a window of 200 samples")
    assert "instep prepare --shuffle" in text
    assert said(*given(MIXED)) == ""


def test_nothing_is_said_where_nobody_knows_the_classes():
    assert said(Plain()) == ""
    assert said(Plain(), labels=[[1, 0]] * 4_000) == ""
    recipe = instep.Recipe(
        model=nn.Linear(1, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD, train=Plain()
    )
    assert said_of_classes(JOB, recipe, None) == ""
