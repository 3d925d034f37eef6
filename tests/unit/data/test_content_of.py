"""What a sample holds, as a number: however it was read, and whatever it is."""

import enum
from contextlib import closing

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from instep.data.loader import Loader, Slice
from instep.data.samples.contents import Selection, SliceContents, content_of


def test_a_sample_is_the_same_alone_and_as_a_row_of_a_batch():
    samples = [
        {"x": torch.arange(6.0).reshape(2, 3) + n, "y": n, "z": (0.5 * n, np.float32(n))}
        for n in range(3)
    ]
    contents = SliceContents([5, 7])
    contents.add_rows(np.array([3, 5, 7]), default_collate(samples))
    assert contents.found == [[5, content_of(samples[1])], [7, content_of(samples[2])]]
    assert len(set(map(content_of, samples))) == 3


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64)),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.tensor([1 + 2j]), torch.tensor([1 + 2j]).conj()),
        (np.zeros(2), np.array([0.0, 1e-300])),
        ("a", b"a"),
        (["ab", "c"], ["a", "bc"]),
        ([1, [2]], [[1], 2]),
        ({"a": 1}, {"b": 1}),
        (2**70, 2**70 + 1),
        (enum.Enum("Kind", "A B").A, enum.Enum("Kind", "A B").B),
    ],
)
def test_what_differs_has_another_number(one, other):
    assert content_of(one) != content_of(other)


class Endless:
    """Refers to itself, as an element of a graph may."""

    def __init__(self):
        self.itself = self


class Of:
    """A dataset of one sample, again and again."""

    def __init__(self, sample):
        self.sample = sample

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return self.sample


class Kept(list):
    """Stands for the file of contents."""

    def add(self, epoch, contents):
        self.extend(contents)


@pytest.mark.parametrize(
    ("sample", "recorded"),
    [(Endless(), 0), (enum.Enum("Kind", "A B").A, 4), (torch.tensor([1j]).conj(), 4)],
)
def test_a_strange_sample_is_trained_on_with_or_without_a_content(sample, recorded):
    kept = Kept()
    made = Loader(Of(sample), seed=1, shuffle=True, processes=0, contents="all", collate=list)
    with closing(made) as loader:
        (read,) = loader.read([Slice(0, 0, 4)], kept)
        assert len(read.batch) == 4
        assert len(kept) == recorded
        assert len(loader.fingerprint().contents) == 2 * recorded


@pytest.mark.parametrize("size", [1, 7, 128, 129, 1_600, 64_000])
def test_the_same_places_are_chosen_however_an_epoch_is_cut_and_others_in_another(size):
    chosen = Selection(64_000, 3, "sample")
    mine = chosen(0, 0, 64_000)
    cuts = range(0, 64_000, size)
    assert mine == [at + place for at in cuts for place in chosen(0, at, min(at + size, 64_000))]
    assert len(mine) == 250
    assert len(set(mine) & set(chosen(1, 0, 64_000))) < 20
    assert Selection(64_000, 3, "all")(0, 10, 14) == [0, 1, 2, 3]


@pytest.mark.parametrize("samples", [1, 2, 100, 255, 257, 600])
def test_some_sample_of_every_window_is_chosen_however_small_the_dataset(samples):
    windows = -(-samples // 256)
    for seed in range(20):
        assert len(Selection(samples, seed, "sample")(0, 0, samples)) == windows


def test_every_row_of_a_batch_is_chosen_in_some_step():
    chosen = Selection(64_000, 3, "sample")
    rows = {place for at in range(0, 64_000, 16) for place in chosen(0, at, at + 16)}
    assert rows == set(range(16))
