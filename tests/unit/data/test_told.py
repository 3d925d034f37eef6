"""What is said to a dataset while a run goes on holds from the next batch on in every reader."""

import copy
import pickle
from contextlib import closing
from functools import cached_property
from multiprocessing import Value

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from instep.data.loader import Loader, Slice
from instep.data.reading import told as telling
from instep.data.reading.own_writes import set_by_reading
from instep.errors import DataError


class Strong:
    def __init__(self):
        self.strength = 0


class Told(Dataset):
    """Gives what it has been told."""

    def __init__(self, samples=24):
        self.samples, self.epoch, self.order, self.level = samples, -1, np.arange(3), 0
        self.transform, self.file = Strong(), None

    def set_epoch(self, epoch):
        self.epoch, self.order = epoch, np.random.default_rng(epoch).permutation(100)

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        told = [self.epoch, self.level, self.transform.strength]
        return torch.tensor([*told, index])


def loader(dataset, processes, **options):
    return Loader(dataset, seed=1, shuffle=True, processes=processes, **options)


def epochs(count=4):
    return [Slice(epoch, first, first + 8) for epoch in range(count) for first in (0, 8, 16)]


def read(reads):
    return next(reads).batch[:, :3].unique(dim=0).tolist()


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("calls", ["set_epoch", "attributes", "both"])
def test_what_a_loop_says_to_its_dataset_reaches_every_reader(processes, calls):
    data = Told()
    with closing(loader(Subset(data, range(24)), processes)) as it:
        reads = it.read(epochs())
        assert read(reads) == [[-1, 0, 0]]
        for epoch in range(1, 4):
            told = [-1, 0, 0]
            if calls != "attributes":
                data.set_epoch(epoch)
                told[0] = epoch
            if calls != "set_epoch":
                data.level, data.transform.strength = told[1:] = 10 * epoch, epoch
            assert [read(reads) for _ in range(3)] == [[told]] * 3


class SharedEpoch(Dataset):
    """Has its epoch in memory that processes share, as OpenCLIP does."""

    def __init__(self):
        self.epoch = Value("i", 0)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.tensor([self.epoch.value, 0, 0, index])


class SharedCount(SharedEpoch):
    """Counts what it gives."""

    def __getitem__(self, index):
        with self.epoch.get_lock():
            self.epoch.value += 1
        return torch.tensor(index)


@pytest.mark.parametrize("processes", [0, 2])
def test_what_lies_in_shared_memory_holds_from_the_next_batch_on(processes):
    data = SharedEpoch()
    with closing(loader(data, processes)) as it:
        reads = it.read(epochs())
        assert read(reads) == [[0, 0, 0]]
        for epoch in range(1, 4):
            data.epoch.value = epoch
            assert [read(reads) for _ in range(3)] == [[[epoch, 0, 0]]] * 3


def test_a_count_of_reading_in_shared_memory_has_nothing_read_again():
    data = SharedCount()
    with closing(loader(data, 2)) as it:
        assert len(list(it.read(epochs()))) == 12
    assert 4 * 24 <= data.epoch.value <= 4 * 24 + 2  # and the first one, to look at


class Handing(Dataset):
    """Has what the one within has."""

    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, index):
        return self.inner[index]

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_dataset_that_hands_set_epoch_on_is_told_each_epoch(processes):
    with closing(loader(Handing(Told()), processes, tells=True)) as it:
        reads = it.read(epochs())
        for epoch in range(4):
            assert [read(reads)[0][0] for _ in range(3)] == [epoch] * 3


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: ConcatDataset([data])])
def test_a_recipes_dataset_is_told_each_epoch_and_one_read_beside_it_its_own(wrap, processes):
    data = Told()
    told = loader(wrap(data), processes, tells=True)
    with closing(told), closing(loader(data, processes, name="validation")) as beside:
        reads, of_validation = told.read(epochs()), beside.read([Slice(0, 0, 8)] * 4)
        for epoch in range(4):
            assert [read(reads)[0][0] for _ in range(3)] == [epoch] * 3
            assert read(of_validation)[0][0] == 0


@pytest.mark.parametrize("processes", [0, 2])
def test_a_loss_sees_the_epoch_of_its_samples_and_a_scheduler_that_of_its_step(processes):
    data = Told()
    with closing(loader(data, processes, tells=True)) as it:
        reads, seen = it.read(epochs()), []
        for slice_ in epochs():
            next(reads)  # while others of the next epoch may have been read
            seen.append((data.epoch, slice_.epoch))
        assert [own for own, _ in seen] == [epoch for _, epoch in seen]
        it.tell(7)  # no sample of this epoch is read here
        assert data.epoch == 7
        it.tell(2)  # the run went back
        assert data.epoch == 2


def test_what_a_callback_sets_before_an_epoch_reaches_the_processes_with_it():
    data = Told()
    with closing(loader(data, 1, tells=True)) as it:
        reads = it.read([Slice(0, 0, 8), *[Slice(1, 0, 8)] * 9])
        assert read(reads) == [[0, 0, 0]]
        data.level = 5
        it.tell(1)
        assert read(reads) == [[1, 5, 0]]


def test_readers_beside_take_what_an_epoch_changes_for_no_setting_of_the_loops():
    data = Told()
    with (
        closing(loader(data, 1, tells=True)) as told,
        closing(loader(data, 1, name="validation")) as beside,
    ):
        reads, of_validation = told.read(epochs()), beside.read([Slice(0, 0, 8)] * 9)
        for epoch in (0, 0, 0, 1):
            assert read(reads) == [[epoch, 0, 0]]
            assert read(of_validation) == [[0, 0, 0]]
            assert data.epoch == epoch


class Calling(Subset):
    def set_epoch(self, epoch):
        self.dataset.set_epoch(epoch)


@pytest.mark.parametrize("processes", [0, 2])
def test_a_dataset_that_calls_the_set_epoch_of_another_is_told_each_epoch(processes):
    data = Told()
    train = loader(Calling(data, range(24)), processes, tells=True)
    with closing(train), closing(loader(data, processes, name="validation")) as beside:
        reads, of_validation = train.read(epochs()), beside.read([Slice(0, 0, 8)] * 4)
        for epoch in range(4):
            assert [(read(reads)[0][0], data.epoch) for _ in range(3)] == [(epoch, epoch)] * 3
            read(of_validation)


def test_a_validation_set_of_its_own_is_told_nothing():
    train, other = Told(), Told()
    with closing(loader(train, 0, tells=True)), closing(loader(other, 0)) as it:
        assert read(it.read(epochs(1)))[0][0] == -1


def test_what_cannot_be_sent_is_refused_and_what_the_loop_opened_is_not():
    data = Told()
    with closing(loader(data, 1)) as it:
        reads = it.read(epochs())
        next(reads)
        data.file = object()
        next(reads)
        data.order = np.zeros(3)
        with pytest.raises(DataError, match=r"'order' of Told was set .* ndarray cannot be sent"):
            next(reads)


class Shards(Dataset):
    """Keeps the shard that it read last, and an index and a table that the first read builds."""

    def __init__(self):
        self.shard, self.at, self.index = {}, -1, None

    def __len__(self):
        return 240

    @cached_property
    def table(self):
        return list(range(1000))

    def of(self, number):
        if number != self.at:
            self.shard.clear()
            self.shard.update((n, torch.tensor([n])) for n in range(10 * number, 10 * number + 10))
            self.at = number
        return self.shard

    def __getitem__(self, index):
        if self.index is None:
            self.index = list(range(1000))
        return self.of(self.index[index] // 10)[self.table[index]]

    def use(self, index):
        self.index = index


@pytest.mark.parametrize("processes", [0, 1, 2])
@pytest.mark.parametrize("built", [False, True])
def test_what_reading_sets_is_each_processs_own(processes, built):
    data = Shards()
    if built:
        data.use(data.table)
    train, validate = Subset(data, range(200)), Subset(data, range(200, 240))
    with (
        closing(Loader(train, seed=1, shuffle=False, processes=processes)) as one,
        closing(Loader(validate, seed=1, shuffle=False, processes=0, name="validation")) as other,
    ):
        reads = one.read([Slice(0, first, first + 4) for first in range(0, 200, 4)])
        beside = other.read([Slice(0, first, first + 4) for first in range(0, 40, 4)] * 5)
        for first in range(0, 200, 4):
            assert next(reads).batch.flatten().tolist() == [*range(first, first + 4)]
            at = 200 + first % 40
            assert next(beside).batch.flatten().tolist() == [*range(at, at + 4)]
            following = min(first + 4, 199)
            assert data[following].item() == following  # as a user's loop may


def test_what_a_method_sets_that_reading_does_not_call_is_the_loops():
    data = Shards()
    kinds = set_by_reading([Subset(data, [0]), data])
    assert kinds[Subset].set == frozenset()
    assert kinds[Shards].set == {"at", "index", "table"}
    assert set_by_reading([Told()])[Told].set == frozenset()


class Level(Dataset):
    """Has many ways in which a loop may set what is read, and in which reading sets it too."""

    def __init__(self):
        self.level, self.lazy, self.count, self.seen, self.at = 0, None, 0, {}, Strong()
        self.active, self.table, self.weights = {0, 1}, {"a": 1}, [float(i) for i in range(100)]
        self.array, self.large, self.log = np.zeros(5), np.zeros(1 << 17), {}

    def update(self, level):
        self.level = level

    def __len__(self):
        return 4

    def __getitem__(self, index):
        self.seen.update({index: 1})
        other = Strong()
        other.level = self.level
        self.count += 1
        self.at.strength = index
        if self.lazy is None:
            self.lazy = 1
        looked_up = self.weights[index] + self.array[index] + self.large[index] + self.table["a"]
        return torch.tensor([self.level, self.lazy, looked_up * (index in self.active)])


class Slotted:
    __slots__ = ("level",)

    def __init__(self):
        self.level = 0

    def __getitem__(self, index):
        return self.level


def said_to(data, says):
    told = telling.Told(data)
    says(data)
    told.look()
    return [(name, value) for _, name, value in told.changes]


@pytest.mark.parametrize("data", [Level(), Slotted()])
def test_what_a_loop_sets_is_said_though_reading_sets_or_calls_others_of_that_name(data):
    assert said_to(data, lambda data: setattr(data, "level", 3)) == [("level", 3)]
    if isinstance(data, Level):
        assert said_to(data, lambda data: data.update(4)) == [("level", 4)]
        assert said_to(data, lambda data: data[0]) == []
        assert said_to(data, lambda data: data.log.update(a=1)) == []  # reading never looks there


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("lazy", lambda data: setattr(data, "lazy", 3)),
        ("count", lambda data: setattr(data, "count", 0)),
        ("strength", lambda data: setattr(data.at, "strength", 1)),
    ],
)
def test_what_both_a_loop_and_reading_set_is_refused(name, says):
    words = f"'{name}' of .* reading a sample sets it too.*loaders = 0"
    with pytest.raises(DataError, match=words):
        said_to(Level(), says)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("active", lambda data: data.active.add(2)),
        ("table", lambda data: data.table.update(a=2)),
        ("weights", lambda data: data.weights.reverse()),
        ("array", lambda data: data.array.fill(1)),
    ],
)
def test_what_a_loop_changes_in_place_is_refused(name, says):
    with pytest.raises(DataError, match=f"'{name}' of Level was set .* cannot be sent"):
        said_to(Level(), says)


def test_a_dataset_that_is_listened_to_can_be_copied_and_pickled():
    data = Told()
    with closing(loader(data, 0)):
        for other in (copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
            other.set_epoch(5)
            assert (other.epoch, data.epoch) == (5, -1)
