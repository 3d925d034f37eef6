"""Noise and keys: the distribution, and the same numbers however they are asked for."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from instep.privacy.grid import Grid
from instep.privacy.keys import derived, words
from instep.privacy.noise import _approximate, _exactly, rounded_gaussian
from instep.privacy.sums import PrivateSums

KEY = bytes(range(32))


def test_a_million_draws_have_the_variance_of_the_gaussian_within_half_a_percent():
    drawn = rounded_gaussian(KEY, 3.0, 0, 1_000_000)
    assert abs(drawn.var() / (9.0 + 1 / 12) - 1) < 0.005
    # the probability of each whole number, by the error function
    scipy = np.vectorize(lambda x: 0.5 * (1 + torch.erf(torch.tensor(x / 3.0 / 2**0.5)).item()))
    edges = np.arange(-12.5, 13.0)
    expected = np.diff(scipy(edges)) * 1e6
    counted, _ = np.histogram(drawn, bins=edges)
    assert ((counted - expected) ** 2 / expected).sum() < 60  # chi-square of 25, p < 1e-4


def test_the_same_numbers_come_however_they_are_asked_for():
    whole = rounded_gaussian(KEY, 2.0**20, 0, 200_001)
    parts = [rounded_gaussian(KEY, 2.0**20, a, b - a) for a, b in ((0, 70_000), (70_000, 200_001))]
    assert (np.concatenate(parts) == whole).all()


def test_a_number_near_the_middle_of_two_is_computed_with_more_bits():
    drawn = words(KEY, 0, 400)
    near, error = _approximate(drawn, 2.0**20)
    exact = [_exactly(KEY, 2.0**20, n, *map(int, drawn[n // 2 * 2 :][:2])) for n in range(400)]
    assert exact == np.rint(near).astype(int).tolist()
    assert error.max() < 1e-4
    # a word of zeros, the tail: the logarithm has no bits of its own to go by
    assert isinstance(_exactly(KEY, 2.0**20, 0, 0, 1), int)


def sums_for(commit, contents, secret=KEY):
    parameters = [torch.zeros(3, 5), torch.zeros(2)]
    made = PrivateSums(parameters, Grid(1.0, 17, 60), 1.0, 40.0, secret)
    tag = made.seal(commit, contents)
    return tag, made._key, [made.gradient(n, each) for n, each in enumerate(contents)]


def test_noise_is_that_of_the_content_and_differs_where_the_content_does():
    one = [torch.ones(3, 5, dtype=torch.int32), torch.ones(2, dtype=torch.int32)]
    two = [one[0].clone(), one[1] + torch.tensor([0, 1], dtype=torch.int32)]
    tag, _, released = sums_for(7, one)
    again_tag, _, again = sums_for(7, [each.clone() for each in one])
    assert tag == again_tag
    assert all(map(torch.equal, released, again))
    other_tag, _, other = sums_for(7, two)
    assert tag != other_tag
    assert not (released[0] == other[0]).any()  # though this part of the content is equal
    assert tag != sums_for(8, one)[0] != sums_for(8, one, bytes(32))[0]


def test_one_content_never_gets_the_same_noise_in_two_sizes():
    contents = [torch.ones(3, 5, dtype=torch.int32), torch.ones(2, dtype=torch.int32)]
    grids = Grid(1.0, 17, 60), Grid(1.0, 17, 60), Grid(2.0, 17, 60), Grid(1.0, 17, 200)
    tags, keys = [], []
    for grid, noise in zip(grids, (1.0, 2.0, 1.0, 1.0), strict=True):
        made = PrivateSums(contents, grid, noise, 40.0, KEY)
        tags.append(made.seal(7, contents))
        keys.append(made._key)
    assert len(set(tags)) == len(set(keys)) == 4


def test_keys_of_different_purposes_differ():
    parts = [("noise", 1, b"a"), ("noise", 1, b"ab"), ("noise", 11, b""), ("sampling", 1, b"a")]
    found = [derived(KEY, *each) for each in parts]
    assert all(a != b for a, b in itertools.combinations(found, 2))
