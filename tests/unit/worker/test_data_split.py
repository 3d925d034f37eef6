"""A recipe's dataset is divided as the job says, or refused in one sentence."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from instep.client.job_checks import check_job
from instep.data.loader import Loader, Slice
from instep.data.partition import PARTITIONS
from instep.data.splits import SPLITS, Request
from instep.data.splits.columns import Column
from instep.errors import DataError, RecipeError, SpecError
from instep.events import EventLog
from instep.job import file as spec_file
from instep.recipe.recipe import Recipe
from instep.store.run_folder import RunFolder
from instep.worker.reading.data_split import check, split_data
from instep.worker.rounds import own_data

SAMPLES = 24
LABELS = [0, 0, 1] * 8


class Table:
    """Samples with columns, as shards have them; nobody may read the samples."""

    columns = ("kind", "owner", "when")

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        raise AssertionError("a sample was read")

    def column(self, name):
        kinds, owners = ["cat", "cat", "dog"] * 8, np.arange(24) // 3
        return {"kind": kinds, "owner": owners, "when": np.arange(24.0)}[name]


def job(**tables):
    return spec_file.build({"recipe": "a.py:recipe", **tables}, source="a test")


def recipe(train=None, **parts):
    return Recipe(
        model=nn.Linear(1, 1),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=list(range(SAMPLES)) if train is None else train,
        **parts,
    )


def labelled(dataset, index):
    return torch.tensor(LABELS[dataset[index]])


@pytest.mark.parametrize(
    "parts",
    [
        {"labels": LABELS},
        {"labels": torch.tensor(LABELS)},
        {"labels": np.array(LABELS)},
        {"labels": labelled},
        {"labels": [torch.tensor(each) for each in LABELS]},
        {"labels": [["cat", "dog"][each] for each in LABELS]},
        {"labels": "kind", "train": Table()},
    ],
)
def test_a_side_has_the_samples_that_the_split_gives_it(parts):
    given = recipe(**parts)
    split = split_data(job(data={"split": "stratified", "folds": 4, "fold": 1}), given)
    labels = Column("labels", np.array(LABELS))
    wanted = SPLITS["stratified"](Request(samples=SAMPLES, folds=4, fold=1, labels=labels))
    for name, side in zip(("train", "validate"), wanted, strict=True):
        dataset = getattr(split.recipe, name)
        assert isinstance(dataset, Subset)
        assert dataset.dataset is given.train
        assert [*dataset.indices] == side.tolist()
        assert type(dataset.indices[0]) is int
        assert split.recipe.given[name].dataset is dataset
    assert given.validate is None, "the recipe itself has changed"


def test_columns_that_the_job_names_are_read_and_no_sample_is():
    for split, columns in [
        ("stratified_group", {"labels": "kind", "groups": "owner"}),
        ("hash", {"groups": "owner"}),
        ("time", {"times": "when"}),
    ]:
        found = split_data(
            job(data={"split": split, "validation": 0.5, **columns}), recipe(Table())
        )
        assert len(found.recipe.train) + len(found.recipe.validate) == SAMPLES


def test_without_a_split_a_recipe_is_what_it_was():
    given = recipe(labels=LABELS)
    assert split_data(job(), given).recipe is given


def test_a_recipe_learns_from_the_training_side_alone_and_draws_by_the_seed():
    learnt = []

    def fit(dataset, indices):
        learnt.append((len(dataset), indices.tolist(), float(torch.rand(()))))

    held_out = job(data={"split": "stratified", "validation": 0.5})
    given = recipe(labels=LABELS, fit=fit)
    before = torch.get_rng_state()
    found = [split_data(held_out, given) for _ in range(2)]
    assert learnt[0] == learnt[1]
    assert learnt[0][:2] == (SAMPLES, found[0].sides.train.tolist())
    split_data(job(), given)
    assert learnt[2][:2] == (SAMPLES, list(range(SAMPLES)))
    assert torch.equal(before, torch.get_rng_state())
    with pytest.raises(RecipeError, match=r"Recipe\.fit returned a float, which nothing uses"):
        split_data(held_out, recipe(labels=LABELS, fit=lambda dataset, indices: 0.5))


WRONG = {
    "a validation set": (
        {"split": "random"},
        {"validate": [1]},
        r"divides Recipe\.train, and Recipe\.validate was given, too.*Leave one",
    ),
    "no labels": (
        {"split": "stratified"},
        {},
        r"'stratified' needs labels.*set data\.labels to a column.*or give Recipe\(labels=",
    ),
    "no such column": (
        {"split": "group", "groups": "ownr"},
        {"train": Table()},
        r"data\.groups = 'ownr': there is no such column\. Did you mean 'owner'\? Known: kind",
    ),
    "no columns": (
        {"split": "time", "times": "when"},
        {},
        r"'when' is a column, and Recipe\.train is a list, which has no columns",
    ),
    "too few labels": (
        {"split": "stratified"},
        {"labels": [0, 1]},
        r"Recipe\.labels has 2 values, and the dataset has 24 samples",
    ),
    "a number": ({"split": "stratified"}, {"labels": 3}, r"Recipe\.labels is an int"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_a_recipe_lacks_for_a_split_is_said(wrong):
    data, parts, sentence = WRONG[wrong]
    with pytest.raises((RecipeError, DataError), match=sentence):
        split_data(job(data=data), recipe(**parts))


def test_a_data_loader_is_split_and_nothing_is_said_to_be_unused_but_what_is():
    dataset = TensorDataset(torch.arange(24.0))

    def opened(worker):
        pass

    loader = DataLoader(
        dataset, batch_size=8, shuffle=True, num_workers=2, worker_init_fn=opened, collate_fn=list
    )
    split = split_data(job(data={"split": "random"}), recipe(loader)).recipe
    for parts in split.given.values():
        assert (parts.collate, parts.worker_init, parts.loaders) == (list, opened, 2)
        assert parts.info_dataset is dataset
    lost = {name: parts.unused(name, shuffled=True, batch=8) for name, parts in split.given.items()}
    assert [each.text for every in lost.values() for each in every] == []

    chosen = SubsetRandomSampler([5, 3, 8, 13])
    split = split_data(
        job(data={"split": "blocks", "validation": 0.5}),
        recipe(DataLoader(dataset, batch_size=8, sampler=chosen)),
    ).recipe
    assert [float(split.train[n][0]) for n in range(2)] == [5, 3]
    assert [float(split.validate[n][0]) for n in range(2)] == [8, 13]
    assert not list(split.given["train"].unused("it", shuffled=True, batch=8))


@pytest.mark.parametrize(
    ("partition", "given"),
    [
        *(
            (name, given)
            for name in ("labels", "owner", "blocks")
            for given in ("list", "function")
        ),
        ("labels", "column"),
    ],
)
def test_participants_get_of_each_side_what_is_theirs(partition, given):
    owners, labels = [n // 3 % 4 for n in range(SAMPLES)], LABELS
    parts = {
        "list": {"owners": owners, "labels": labels},
        "function": {
            "owners": lambda dataset, n: owners[dataset[n]],
            "labels": lambda dataset, n: labels[dataset[n]],
        },
        "column": {"labels": "number", "train": SimpleColumns()},
    }[given]
    sync = {
        "name": "averaging",
        "participants": 4,
        "options": {"partition": partition, "local_steps": 2, "skew": 100.0},
    }
    if partition != "labels":
        del sync["options"]["skew"]
    the_job = job(data={"split": "blocks", "validation": 0.5}, sync=sync, train={"global_batch": 8})
    own = own_data.divide(the_job, split_data(the_job, recipe(**parts)).recipe)
    column = np.array(owners if partition == "owner" else labels)
    for regions, side in ((own.train, range(12)), (own.validate, range(12, 24))):
        wanted = PARTITIONS[partition](12, 4, column=column[side], skew=100.0, seed=0)
        assert regions.sizes.tolist() == [len(each) for each in wanted]
    shares = PARTITIONS[partition](12, 4, column=column[12:], skew=100.0, seed=0)
    assert own.validate.indices(0, 0, 12).tolist() == [n for share in shares for n in share]


class SimpleColumns(list):
    def __init__(self):
        super().__init__(range(SAMPLES))

    def column(self, name):
        return np.array(LABELS)


def looked(tmp_path, rows, resumed=False, times=None, labels=None, **data):
    """The last event, and the warnings, of a run whose dataset has these rows."""
    the_job = job(data={"split": "blocks", **data})
    given = recipe(TensorDataset(torch.tensor(rows)), times=times, labels=labels)
    split = split_data(the_job, given)
    train, validation = (
        Loader.of_job(the_job, split.recipe.given[key], name, processes=0, say=print)
        for key, name in (("train", "training"), ("validate", "validation"))
    )
    (tmp_path / "job.toml").write_text(spec_file.dump(the_job))
    log = EventLog(tmp_path / "events.jsonl")
    before = tmp_path if resumed else None
    member = SimpleNamespace(checkpoint=before, run=tmp_path, job=the_job, emit=log.emit)
    try:
        check(split, member, train, validation)
    finally:
        log.close()
        train.close()
        validation.close()
    folder = RunFolder(tmp_path)
    return folder.last("data_split"), [each["text"] for each in folder.named("warning")]


def test_the_log_has_the_classes_of_both_sides_as_counted_by_hand(tmp_path):
    rows = [[float(n)] for n in range(SAMPLES)]
    event, _ = looked(tmp_path, rows, labels=LABELS, split="stratified", validation=0.25)
    divided = split_data(
        job(data={"split": "stratified", "validation": 0.25}), recipe(Doubled(), labels=LABELS)
    )
    for found, side in zip(event["classes"], divided.sides, strict=True):
        assert found == Counter(str(LABELS[index]) for index in side)


@pytest.mark.parametrize(
    ("split", "readers"), [*((name, 0) for name in SPLITS), ("stratified_group", 2)]
)
def test_each_side_is_read_whole_and_nothing_else_is(split, readers):
    """By content, against a plain read; each participant's part too."""
    partitions = {0: ("none", "labels"), 2: ("owner",)}[readers]
    columns = {
        "labels": LABELS,
        "groups": [n // 3 for n in range(SAMPLES)],
        "times": [n // 2 for n in range(SAMPLES)],
        "owners": [n // 3 % 2 for n in range(SAMPLES)],
    }
    for partition in partitions:
        sync = {} if partition == "none" else {"sync": averaging(partition)}
        the_job = job(
            data={"split": split, "folds": 3, "fold": 1}, train={"global_batch": 8}, **sync
        )
        divided = split_data(the_job, recipe(Doubled(), **columns))
        own = own_data.divide(the_job, divided.recipe)
        for name, side in zip(("train", "validate"), divided.sides, strict=True):
            loader = Loader.of_job(
                the_job,
                divided.recipe.given[name],
                "training" if name == "train" else "validation",
                order=getattr(own, name, None),
                processes=readers,
                say=print,
            )
            loader.begin()
            slices = [Slice(2, n, min(n + 3, len(side))) for n in range(0, len(side), 3)]
            read = [int(each) for part in loader.read(slices) for each in part.batch]
            loader.close()
            assert sorted(read) == [2 * index for index in side.tolist()]


@pytest.mark.parametrize("unreadable", ["stop", "skip"])
def test_a_sample_that_cannot_be_read_is_named_as_in_the_whole_dataset(unreadable):
    class Broken(Doubled):
        def __getitem__(self, index):
            if index == 20:
                raise ValueError("no such page")
            return index

    the_job = job(data={"split": "blocks", "validation": 0.5, "unreadable": unreadable})
    parts = split_data(the_job, recipe(Broken())).recipe.given["validate"]
    loader = Loader.of_job(the_job, parts, "validation", processes=0, say=print)
    loader.begin()
    if unreadable == "skip":
        (read,) = loader.read([Slice(0, 0, 12)])
        (skipped,) = read.skipped
        assert skipped.sample == 8
        assert skipped.cause.startswith("ValueError: no such page")
        assert skipped.cause.endswith(" (20 of the whole dataset)")
    else:
        with pytest.raises(DataError, match=r"sample 8 \(20 of the whole dataset\) cannot be read"):
            list(loader.read([Slice(0, 0, 12)]))
    loader.close()


class Doubled:
    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        return 2 * index


def averaging(partition):
    options = {"partition": partition, "local_steps": 2}
    return {"name": "averaging", "participants": 2, "options": options}


def test_samples_on_both_sides_are_counted_and_one_is_named(tmp_path):
    rows = [float(n) for n in range(20)]
    rows[17] = rows[18] = 4.0
    rows[3] = 2.0  # both on one side
    event, warnings = looked(tmp_path, rows, validation=0.25)
    assert (event["looked_at"], event["duplicates"], event["example"]) == ([15, 5], 2, [17, 4])
    (text,) = warnings
    assert "2 of 5 samples to validate on" in text
    assert "sample 17 is the same as sample 4." in text


def test_a_resumed_run_has_the_same_sides_or_is_refused(tmp_path):
    rows = [float(n) for n in range(20)]
    looked(tmp_path, rows)
    looked(tmp_path, rows, resumed=True)
    with pytest.raises(DataError, match="had 20 samples when the run was started and has 24 now"):
        looked(tmp_path, [*rows, 1.0, 2.0, 3.0, 4.0], resumed=True)


def test_columns_that_have_changed_are_refused_unless_the_training_side_is_the_same(tmp_path):
    rows, folds = [float(n) for n in range(20)], {"split": "time", "folds": 3}
    first, _ = looked(tmp_path, rows, times=rows, **folds)
    later = [*rows[:18], 99.0, 98.0]  # on no side of fold 0
    assert looked(tmp_path, rows, True, later, **folds)[0]["digests"] == first["digests"]
    on_the_other, trained = [*rows[:5], 50.0, *rows[6:]], [*rows[:4], 50.0, *rows[5:]]
    for times in (on_the_other, trained):
        with pytest.raises(DataError, match="other samples are on the two sides"):
            looked(tmp_path, rows, True, times, **folds)
    with pytest.raises(DataError, match="other samples are on the two sides"):
        looked(tmp_path, rows, True, trained, changed="accept", **folds)
    looked(tmp_path, rows, True, on_the_other, changed="accept", **folds)


class Slow:
    def __len__(self):
        return 5000

    def __getitem__(self, index):
        return index


def test_of_a_large_dataset_a_keyed_choice_is_looked_at():
    now = [0.0]

    def clock():
        now[0] += 0.3
        return now[0]

    loader = Loader(Slow(), seed=3, shuffle=True, processes=0)
    loader.begin()
    some = loader.contents(1.0, clock)
    assert 16 < len(some) < 5000
    assert len({index for index, _ in some}) == len(some)
    assert max(index for index, _ in some) > 2500
    every = dict(loader.contents(1e9))
    assert len(every) == 5000
    assert all(every[index] == content for index, content in some)


SPECS = {
    "both": ({"validation": 0.2, "folds": 5}, r"both validation = 0\.2 and folds = 5"),
    "beyond": ({"folds": 5, "fold": 5}, r"fold = 5, and folds = 5.*Set fold from 0 to 4"),
    "no folds": ({"fold": 1}, "fold = 1, and folds is not given"),
    "one fold": ({"folds": 1}, "folds"),
    "a share of all": ({"validation": 1.0}, "validation"),
    "no split": ({"split": "", "validation": 0.2}, r"validation = 0\.2 says how to divide"),
    "gap": ({"gap": 3}, r"gap = 3.* is for split = 'time'"),
    "strange gap": ({"split": "time", "gap": "soon"}, "gap = 'soon': needs a number in the unit"),
    "embargo": ({"split": "time", "embargo": 3}, "embargo = 3.*Set folds, or leave"),
    "no such split": ({"split": "stratify"}, "no split is called 'stratify'. Did you mean 'strati"),
    "unused": ({"groups": "who"}, "data.groups = 'who', and data.split = 'random' does not"),
}


@pytest.mark.parametrize("wrong", SPECS)
def test_a_job_whose_keys_do_not_go_together_is_refused(wrong):
    data, sentence = SPECS[wrong]
    with pytest.raises(SpecError, match=sentence):
        check_job(job(data={"split": "random", **data}))
