"""A DataLoader's parts are used; what is not used is reported by name."""

from contextlib import closing

import pytest
import torch
from datasets import Plain, load
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.distributed import DistributedSampler

import instep
from instep.data.loader import Loader, Slice
from instep.data.torch_loader import LoaderParts, unpack_loader
from instep.errors import RecipeError


def said(loader, *, shuffled=True, batch=64):
    return list(unpack_loader(loader).unused("Recipe.train", shuffled=shuffled, batch=batch))


def collate(samples):
    return default_collate(samples)


def begin(number):
    return None


def test_the_parts_of_a_loader_are_kept():
    dataset = Plain()
    loader = DataLoader(dataset, num_workers=1, collate_fn=collate, worker_init_fn=begin)
    assert unpack_loader(loader) == LoaderParts(dataset, collate, begin, 1, loader)
    plain = DataLoader(dataset, 64, shuffle=True)
    assert unpack_loader(plain) == LoaderParts(dataset, None, None, 0, plain)
    assert said(plain) == []
    assert unpack_loader(dataset) == LoaderParts(dataset)
    assert said(dataset) == []


@pytest.mark.parametrize("nested", [False, True])
def test_a_sampler_of_some_of_the_samples_leaves_the_others_out(nested):
    some = SubsetRandomSampler([4, 2, 7])
    given = {"batch_sampler": BatchSampler(some, 64, False)} if nested else {"sampler": some}
    loader = DataLoader(Plain(), **({} if nested else {"batch_size": 64}), **given)
    dataset = unpack_loader(loader).dataset
    assert type(dataset) is Subset
    assert [dataset[place][0][0].item() for place in range(3)] == [4.0, 2.0, 7.0]
    assert said(loader) == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"batch_size": 5, "shuffle": True}, "batch_size = 5"),
        ({"batch_size": 64}, "shuffle = False"),
        ({"batch_size": 64, "shuffle": True, "drop_last": True}, "drop_last = True"),
        ({"batch_size": 64, "shuffle": True, "generator": torch.Generator()}, "a generator"),
        (
            {"batch_size": 64, "sampler": WeightedRandomSampler([1.0] * 100, 100)},
            "a sampler (WeightedRandomSampler)",
        ),
        (
            {"batch_size": 64, "sampler": RandomSampler(range(100), replacement=True)},
            "a sampler (RandomSampler)",
        ),
        (
            {"batch_size": 64, "sampler": SequentialSampler(range(5))},
            "a sampler (SequentialSampler)",
        ),
        (
            {"batch_sampler": BatchSampler(WeightedRandomSampler([1.0] * 100, 100), 64, False)},
            "a sampler (WeightedRandomSampler)",
        ),
        ({"batch_size": 64, "shuffle": True, "num_workers": 1, "timeout": 30}, "timeout = 30"),
        (
            {
                "batch_size": 64,
                "shuffle": True,
                "num_workers": 1,
                "multiprocessing_context": "spawn",
            },
            "multiprocessing_context = spawn",
        ),
        (
            {"batch_sampler": type("Own", (BatchSampler,), {})(RandomSampler(range(9)), 3, False)},
            "a batch_sampler (Own)",
        ),
    ],
)
def test_an_unused_property_of_a_loader_is_reported(options, word):
    ((text, remedy),) = said(DataLoader(Plain(), **options))
    assert text.startswith(f"Recipe.train's DataLoader has {word}")
    assert "not used" in text
    assert bool(remedy) == ("sampler" in word)  # those decide what is trained


def test_the_order_of_the_dataset_is_kept_where_the_job_says_so():
    loader = DataLoader(Plain(), batch_size=64)
    (lost,) = unpack_loader(loader).unused("Recipe.train", shuffled=True, batch=64)
    assert lost.text.endswith("Set data.order = 'dataset' for the order of the dataset")
    assert said(loader, shuffled=False) == []


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"shuffle": True}, "shuffle = True"),
        ({"sampler": SubsetRandomSampler([4, 2, 7])}, "a SubsetRandomSampler"),
    ],
)
def test_a_loader_that_shuffles_is_told_that_the_job_does_not(options, word):
    loader = DataLoader(Plain(), batch_size=64, **options)
    ((text, remedy),) = said(loader, shuffled=False)
    assert text.startswith(f"Recipe.train's DataLoader has {word}, which is not used to shuffle")
    assert "data.order = 'dataset'" in text
    assert not remedy
    assert said(loader, shuffled=None) == []  # of an evaluation


def test_a_distributed_sampler_changes_nothing_that_is_trained():
    dealing = DistributedSampler(Plain(), num_replicas=2, rank=0)
    ((text, remedy),) = said(DataLoader(Plain(), 64, sampler=dealing))
    assert "a sampler (DistributedSampler), which is not used" in text
    assert not remedy


def test_an_unused_property_without_effect_is_not_reported():
    options = {"num_workers": 1, "prefetch_factor": 4, "persistent_workers": True}
    loader = DataLoader(
        Plain(), 64, shuffle=True, pin_memory=True, multiprocessing_context="fork", **options
    )
    assert said(loader) == []


@pytest.mark.parametrize(
    "dataset", [Plain(), type("Stream", (IterableDataset,), {"__iter__": iter})()]
)
def test_what_torchdata_has_in_the_place_of_torchs_samplers_is_not_foreign(dataset):
    loader = DataLoader(dataset, 64, shuffle=not isinstance(dataset, IterableDataset))
    for given in (loader.batch_sampler, loader.sampler):
        module = {"__module__": "torchdata.stateful_dataloader.sampler"}
        if type(given).__name__ in ("BatchSampler", "RandomSampler"):
            given.__class__ = type(type(given).__name__, (type(given),), module)
    assert type(loader.batch_sampler) is not BatchSampler
    assert said(loader) == []


class Seen(Plain):
    """Tells whether it is the dataset that the process which reads it is told of."""

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        return torch.tensor([index, info.dataset is self])


def test_a_dataset_with_a_sampler_gets_the_worker_info_of_torch():
    theirs = DataLoader(Seen(), 2, num_workers=1, sampler=SubsetRandomSampler([40, 20, 70]))
    given = unpack_loader(theirs)
    ours = Loader(given.dataset, seed=5, shuffle=True, processes=1, info_dataset=given.info_dataset)
    with closing(ours):
        (batch,) = load(ours, [Slice(0, 0, 3)])
    expected = sorted(torch.cat(list(theirs)).tolist())
    assert sorted(batch.tolist()) == expected == [[20, 1], [40, 1], [70, 1]]


def test_a_validation_in_its_natural_order_loses_nothing():
    loader = DataLoader(Plain(), 64, sampler=SequentialSampler(Plain()))
    assert said(loader, shuffled=False) == []


def test_a_stream_is_read_in_as_many_parts_as_its_loader_has_processes():
    loader = DataLoader(Stream(), batch_size=4, num_workers=2)
    parts = unpack_loader(loader)
    assert parts.streams
    assert parts.loaders == 2
    assert said(loader, batch=4) == []


class Stream(IterableDataset):
    def __len__(self):
        return 10

    def __iter__(self):
        return iter([(torch.zeros(3), 0)] * 10)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (iter([1, 2]), "Recipe.train is a list_iterator, which can be read once"),
        (DataLoader(Stream(), None), "Recipe.train is a DataLoader that has batch_size = None"),
        (DataLoader(Plain(), None), r"Recipe.train is a DataLoader that has batch_size = None"),
        (DataLoader(Plain(0)), "Recipe.train has length zero"),
    ],
)
def test_what_cannot_be_read_by_index_is_refused(train, message):
    with pytest.raises(RecipeError, match=message):
        instep.Recipe(
            model=nn.Linear(3, 1), loss=nn.MSELoss(), optimizer=torch.optim.SGD, train=train
        )
