"""What cannot be divided among participants is refused, in one sentence."""

from itertools import pairwise
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from instep.client.job_checks import check_job
from instep.errors import RecipeError, SpecError
from instep.job.data import DataSpec
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.job.train import TrainSpec
from instep.worker.rounds import own_data
from instep.worker.rounds.own_data import divide


def job(partition, participants=4, global_batch=20, **options):
    sync = SyncSpec(
        name="averaging",
        participants=participants,
        options={"partition": partition, "local_steps": 2, **options},
    )
    return JobSpec(recipe="a.py:recipe", sync=sync, train=TrainSpec(global_batch=global_batch))


def recipe(samples=12, **given):
    parts = {"validate": None, "owners": None, "labels": None, "train": range(samples)}
    return SimpleNamespace(**parts | given)


class Table:
    """A dataset with columns, as shards are."""

    def __init__(self, **columns):
        self.columns, self.values = list(columns), columns

    def __len__(self):
        return len(self.values[self.columns[0]])

    def column(self, name):
        return self.values[name]


def with_columns(partition, **names):
    return msgspec.structs.replace(job(partition), data=DataSpec(**names))


WRONG = {
    "more participants than samples": (
        job("blocks", 13, 26),
        recipe(),
        "sync.participants = 13 but the training set has 12 samples",
    ),
    "a participant without data": (
        job("owner"),
        recipe(owners=[0, 1, 3] * 4),
        r"'owner' leaves 1 of 4 participants without data \(2\).*Recipe.owners name each",
    ),
    "no owners": (job("owner"), recipe(), "'owner' needs Recipe.owners, which was not given"),
    "no labels": (job("labels"), recipe(), "'labels' needs Recipe.labels, which was not given"),
    "too few owners": (
        job("owner"),
        recipe(owners=[0, 1, 2]),
        "Recipe.owners has 3 values, and the training set has 12 samples",
    ),
    "nothing": (job("owner"), recipe(owners=[None] * 12), "gives None, and a whole number"),
    "more words than participants": (
        job("owner"),
        recipe(owners=[*"abcdefghijkl"]),
        r"Recipe.owners has 12 owners.*Set sync\.participants = 12",
    ),
    "no such column": (
        with_columns("owner", owners="wohse"),
        recipe(train=Table(whose=[0] * 12)),
        "data.owners = 'wohse': there is no such column. Did you mean 'whose'",
    ),
    "no columns": (
        with_columns("owner", owners="whose"),
        recipe(),
        "data.owners = 'whose' is a column, and",
    ),
    "fractions": (job("labels"), recipe(labels=[0.5] * 12), "labels gives a float, and a whole"),
    "too large": (job("owner"), recipe(owners=[4] * 12), "says 4 of sample 0, and there are"),
    "one class for many": (
        job("labels", 12, 24, skew=0.01),
        recipe(labels=[1] * 12),
        "'labels' leaves .* of 12 participants without data.*a larger sync.options.skew",
    ),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_data_that_cannot_be_divided_are_refused(wrong):
    job, recipe, sentence = WRONG[wrong]
    with pytest.raises((SpecError, RecipeError), match=sentence):
        divide(job, recipe)


def test_a_function_divides_the_validation_set_too():
    def owner(dataset, index):
        return index % 4

    found = divide(job("owner"), recipe(owners=owner, validate=range(6)))
    assert found.validate.sizes.tolist() == [2, 2, 1, 1]
    assert found.validate.indices(0, 0, 3).tolist() == [0, 4, 1]
    assert found.rounds.portion == 10
    listed = divide(job("owner"), recipe(owners=torch.arange(12) % 4, validate=range(6)))
    assert listed.validate is None
    assert listed.train.digest == found.train.digest
    assert divide(job("none"), recipe()) is None


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"partition": "block"}, "no partition is called 'block'. Did you mean 'blocks'"),
        ({"partition": "blocks", "skew": 0.1}, "skew = 0.1 with partition = 'blocks'"),
    ],
)
def test_a_partition_is_checked_before_anything_starts(options, sentence):
    with pytest.raises(SpecError, match=sentence):
        check_job(job(**options))


def test_each_participant_takes_as_many_samples():
    with pytest.raises(ValueError, match=r"Set train\.global_batch to a multiple of 8, such as 24"):
        job("blocks", 8)


USERS = ["mo", "al", "zoe", "al", "zoe", "bo", "al", "mo", "zoe", "bo", "bo", "mo"]


COLUMN = with_columns("owner", owners="whose")


@pytest.mark.parametrize(
    ("job", "owners", "users"),
    [
        (COLUMN, None, USERS),
        (COLUMN, None, [ord(user[0]) for user in USERS]),
        (job("owner"), "whose", USERS),
        (job("owner"), lambda dataset, n: dataset.column("whose")[n], USERS),
    ],
)
def test_owners_of_a_column_are_participants_in_their_order(job, owners, users):
    """Against a plain comparison."""
    column, held_out = np.array(users), np.array(users)[[5, 0, 2]]
    names = sorted(set(users))
    plain = [[n for n in range(12) if column[n] == name] for name in names]
    validated = [[n for n in range(3) if held_out[n] == name] for name in names]
    data = {"train": Table(whose=column), "validate": Table(whose=held_out)}
    found = divide(job, recipe(**data, owners=owners))
    ends = np.cumsum([0, *map(len, plain)])
    every = found.train.indices(0, 0, 12).tolist()
    assert [sorted(every[a:b]) for a, b in pairwise(ends)] == plain
    assert found.validation_sizes == [len(own) for own in validated]
    assert found.validate.indices(0, 0, 3).tolist() == [n for own in validated for n in own]


def test_classes_of_a_column_are_dealt_as_their_numbers_are():
    column = ["cat", "dog", "ant", "dog"] * 30
    numbers = [["ant", "cat", "dog"].index(name) for name in column]
    named = divide(with_columns("labels", labels="kind"), recipe(train=Table(kind=column)))
    plain = divide(job("labels"), recipe(120, labels=numbers))
    assert named.train.digest == plain.train.digest


def logged_labels(job, recipe):
    """The labels of each participant in the log, and the samples that each has."""
    events = []
    member = SimpleNamespace(job=job, checkpoint=None, emit=lambda name, **of: events.append(of))
    own = divide(job, recipe)
    own_data.check(own, member, recipe)
    begins = pairwise(own.train.offsets.tolist())
    return events[0]["labels"], [own.train.indices(0, *each).tolist() for each in begins]


@pytest.mark.parametrize("partition", ["random", "owner", "labels"])
@pytest.mark.parametrize("said", ["list", "function", "column"])
def test_the_log_has_the_labels_of_each_participant(partition, said):
    labels = np.random.default_rng(4).integers(0, 3, 60)
    given = {"list": labels, "function": lambda _, index: int(labels[index]), "column": None}
    train = Table(kind=labels)
    spec = msgspec.structs.replace(job(partition), data=DataSpec(labels="kind"))
    spec = spec if said == "column" else job(partition)
    owners = [n % 4 for n in range(60)]
    logged, samples = logged_labels(spec, recipe(train=train, labels=given[said], owners=owners))
    assert len(logged) == 4
    for counts, own in zip(logged, samples, strict=True):
        names, found = np.unique(labels[own], return_counts=True)
        assert counts == dict(zip(map(str, names.tolist()), found.tolist(), strict=True))


@pytest.mark.parametrize("labels", [None, [0, 1], [None] * 12, [f"{n}" for n in range(12)]])
def test_labels_that_nobody_says_or_that_are_too_many_are_not_in_the_log(monkeypatch, labels):
    monkeypatch.setattr(own_data, "MOST_COUNTS", 47)
    assert logged_labels(job("random"), recipe(labels=labels))[0] == []
