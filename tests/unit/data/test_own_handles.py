"""Datasets that open their file at the first read are read correctly, in every mode.

Such a handle has an offset in its file: two threads, or two processes that share it
after a fork, would move it for each other. Each sample is compared with what
was written.
"""

import io
import os
import signal
import sqlite3
import tarfile
import zipfile
from contextlib import closing

import numpy as np
import pytest
import torch
from datasets import load
from torch.utils.data import ConcatDataset, Subset, random_split

from instep.data.loader import Loader, Slice
from instep.data.reading import template
from marks import tail

pytestmark = pytest.mark.process

SAMPLES, SIZE = 512, 700


def content(index):
    """What sample `index` holds: bytes that no other has."""
    return ((torch.arange(SIZE) * (index + 1)) % 251).to(torch.uint8).numpy().tobytes()


OPEN = []


@pytest.fixture(autouse=True)
def _closed_at_the_end():
    yield
    while OPEN:
        OPEN.pop().close()


class Lazy:
    """Opens its file at the first read, as datasets for `DataLoader` do."""

    def __init__(self, path, *, eager=False):
        self.path, self.handle = path, None
        if eager:
            self.open()

    def open(self):
        self.handle = self.opened()
        if hasattr(self.handle, "close"):
            OPEN.append(self.handle)

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        if self.handle is None:
            self.open()
        return torch.frombuffer(bytearray(self.read(index)), dtype=torch.uint8), index


class Plain(Lazy):
    def write(path):
        path.write_bytes(b"".join(map(content, range(SAMPLES))))

    def opened(self):
        return open(self.path, "rb")

    def read(self, index):
        self.handle.seek(index * SIZE)
        return self.handle.read(SIZE)


class Sendable(Plain):
    """Leaves its open file behind where it is sent."""

    def __getstate__(self):
        return {**vars(self), "handle": None}


class Zip(Lazy):
    def write(path):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for index in range(SAMPLES):
                file.writestr(str(index), content(index))

    def opened(self):
        return zipfile.ZipFile(self.path)

    def read(self, index):
        return self.handle.read(str(index))


class Tar(Lazy):
    def write(path):
        with tarfile.open(path, "w") as file:
            for index in range(SAMPLES):
                member = tarfile.TarInfo(str(index))
                member.size = SIZE
                file.addfile(member, io.BytesIO(content(index)))

    def opened(self):
        file = tarfile.open(self.path)  # noqa: SIM115
        self.members = file.getmembers()
        return file

    def read(self, index):
        return self.handle.extractfile(self.members[index]).read()


class H5(Lazy):
    def write(path):
        h5py = pytest.importorskip("h5py")
        with h5py.File(path, "w") as file:
            rows = [np.frombuffer(content(index), np.uint8) for index in range(SAMPLES)]
            file.create_dataset("rows", data=np.stack(rows), chunks=(1, SIZE))

    def opened(self):
        import h5py

        return h5py.File(self.path, "r")

    def read(self, index):
        return self.handle["rows"][index].tobytes()


class Lmdb(Lazy):
    def write(path):
        lmdb = pytest.importorskip("lmdb")
        with lmdb.open(str(path), map_size=1 << 24) as env, env.begin(write=True) as txn:
            for index in range(SAMPLES):
                txn.put(str(index).encode(), content(index))

    def opened(self):
        import lmdb

        env = lmdb.open(str(self.path), readonly=True, lock=False)
        OPEN.append(env)
        return env.begin(buffers=True)

    def read(self, index):
        return bytes(self.handle.get(str(index).encode()))


class Sql(Lazy):
    """Its connection may be used by the thread alone that opened it."""

    def write(path):
        with closing(sqlite3.connect(path)) as base:
            base.execute("CREATE TABLE rows (place INTEGER PRIMARY KEY, content BLOB)")
            base.executemany("INSERT INTO rows VALUES (?, ?)", enumerate(map(content, range(512))))
            base.commit()

    def opened(self):
        return sqlite3.connect(self.path)

    def read(self, index):
        rows = self.handle.execute("SELECT content FROM rows WHERE place = ?", (index,))
        return rows.fetchone()[0]


KINDS = [Plain, Zip, Tar, H5, Lmdb, Sql]
SLICES = [Slice(0, first, first + 16) for first in range(0, SAMPLES, 16)]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """The file of a kind, written once."""
    folder, written = tmp_path_factory.mktemp("files"), {}

    def path(kind):
        if kind not in written:
            written[kind] = folder / kind.__name__
            kind.write(written[kind])
        return written[kind]

    return path


def wrong(batches):
    """Samples whose content is not theirs; and how many there were."""
    found, count = [], 0
    for rows, indices in batches:
        count += len(indices)
        pairs = zip(rows, indices.tolist(), strict=True)
        found += [i for row, i in pairs if row.numpy().tobytes() != content(i)]
    return found, count


def loaders_of(*datasets, processes):
    options = {"seed": 5, "shuffle": True, "processes": processes}
    made = [Loader(dataset, **options) for dataset in datasets]
    for loader in made:
        loader.begin()
    return made


@pytest.mark.grid
@pytest.mark.parametrize("processes", [0, 1, 2, "auto"])
@pytest.mark.parametrize("eager", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_the_one_that_was_written(file_of, kind, eager, processes):
    if eager and kind in (Lmdb, Sql) and processes:
        pytest.skip("its makers forbid what is open to go through a fork")
    (loader,) = loaders_of(kind(file_of(kind), eager=eager), processes=processes)
    with closing(loader):
        assert wrong(load(loader, SLICES)) == ([], SAMPLES)


@pytest.mark.grid
@pytest.mark.parametrize("processes", [0, 2, "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_halves_of_one_dataset_that_are_read_at_a_time_do_not_mix(file_of, kind, processes):
    halves = random_split(kind(file_of(kind)), [256, 256])
    one, other = loaders_of(*halves, processes=processes)
    with closing(one), closing(other):
        pairs = zip(load(one, SLICES[:16]), load(other, SLICES[:16]), strict=True)
        assert wrong(batch for pair in pairs for batch in pair) == ([], SAMPLES)


def test_one_that_hides_in_a_concatenation_of_subsets_is_not_mixed_either(file_of):
    dataset = Zip(file_of(Zip))
    parts = [Subset(dataset, range(256)), Subset(dataset, range(256, 512))]
    one, other = loaders_of(ConcatDataset(parts), ConcatDataset(parts[::-1]), processes=0)
    with closing(one), closing(other):
        pairs = zip(load(one, SLICES), load(other, SLICES), strict=True)
        assert wrong(batch for pair in pairs for batch in pair) == ([], 2 * SAMPLES)


@pytest.mark.grid(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_replacement_of_a_killed_process_has_an_unread_dataset(file_of, kind):
    """The process that trains reads from the same object meanwhile, for itself."""
    dataset = kind(file_of(kind))
    (loader,) = loaders_of(dataset, processes=2)
    with closing(loader):
        batches, loaded = [], load(loader, SLICES)
        for number in range(len(SLICES)):
            if number % 16 == 8:
                for pid in loader.pids:
                    os.kill(pid, signal.SIGKILL)
            assert wrong([(dataset[number][0][None], torch.tensor([number]))]) == ([], 1)
            batches.append(next(loaded))
        assert wrong(batches) == ([], SAMPLES)


def test_the_process_that_forks_the_others_is_replaced_too(file_of):
    (loader,) = loaders_of(Tar(file_of(Tar)), processes=2)
    with closing(loader):
        loaded = load(loader, SLICES)
        batches = [next(loaded)]
        os.kill(loader._pool._template.pid, signal.SIGKILL)
        assert wrong([*batches, *loaded]) == ([], SAMPLES)


def test_the_process_that_forks_the_others_is_replaced_though_those_in_its_place_are_killed(
    file_of, monkeypatch
):
    (loader,) = loaders_of(Tar(file_of(Tar)), processes=1)
    begin, left = loader._pool._begin, [True] * 3

    def killed():
        pid, end = begin()
        if left and left.pop():
            os.kill(pid, signal.SIGKILL)
        return pid, end

    monkeypatch.setattr(loader._pool, "_begin", killed)
    with closing(loader):
        loaded = load(loader, SLICES)
        batches, first = [next(loaded)], loader._pool._template.pid
        os.kill(first, signal.SIGKILL)
        os.waitpid(first, 0)  # and with it its loader process ends
        assert wrong([*batches, *loaded]) == ([], SAMPLES)
    assert not left


def test_the_process_that_forks_the_others_is_replaced_where_it_was_stopped(file_of, monkeypatch):
    monkeypatch.setattr(template, "_TIMEOUT_S", 600.0)  # of the one that takes its place
    (loader,) = loaders_of(Tar(file_of(Tar)), processes=1)
    with closing(loader):
        loaded = load(loader, SLICES)
        batches = [next(loaded)]
        stopped = loader._pool._template.pid
        os.kill(stopped, signal.SIGSTOP)
        loader._pool._template._end.settimeout(0.1)  # no matter how long: it never answers
        os.kill(loader.pids[0], signal.SIGKILL)
        assert wrong([*batches, *loaded]) == ([], SAMPLES)
        assert loader._pool._template.pid != stopped


@pytest.mark.parametrize("sendable", [False, tail(True)])
def test_where_this_process_has_read_no_other_is_forked_from_it(file_of, sendable):
    """Others come from an interpreter of their own; or this process reads, if they cannot."""
    dataset, said = (Sendable if sendable else Plain)(file_of(Plain)), []
    loader = Loader(dataset, seed=3, shuffle=False, processes=2, say=said.append)
    with closing(loader):
        loaded = load(loader, SLICES)
        batches = [next(loaded)]
        loader._fetch.content(7)
        killed = [loader._pool._template.pid, *loader.pids]
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        assert wrong([*batches, *loaded]) == ([], SAMPLES)
        assert bool(loader.pids) == sendable
        assert not {*loader.pids} & {*killed}
    assert "is gone, and the dataset has been read here since. Now processes are" in said[0]
    assert len(said) == (1 if sendable else 2)


@pytest.mark.slow
def test_a_loader_ends_though_the_process_that_forks_the_others_was_stopped(file_of):
    (loader,) = loaders_of(Tar(file_of(Tar)), processes=1)
    os.kill(loader._pool._template.pid, signal.SIGSTOP)
    loader.close()


def test_a_dataset_on_the_module_is_read_by_each_process_from_a_place_of_its_own(file_of):
    """What is open when a process is forked has one place in its file for both."""
    dataset = Plain(file_of(Plain), eager=True)
    mine, theirs = loaders_of(dataset, processes=0)[0], loaders_of(dataset, processes=1)[0]
    with closing(mine), closing(theirs):
        pairs = zip(load(mine, SLICES), load(theirs, SLICES), strict=True)
        assert wrong(batch for pair in pairs for batch in pair) == ([], 2 * SAMPLES)
