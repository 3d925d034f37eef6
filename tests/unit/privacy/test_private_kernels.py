"""Compiled loops give what the operations of torch give, and Gaussian numbers are as near to the
true ones as noise counts on."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from instep.privacy import kernels
from instep.privacy.keys import words
from instep.privacy.noise import _approximate

KEY = bytes(range(32))


@pytest.mark.parametrize("count", [1, 16, 5003])
def test_rows_are_multiplied_rounded_and_added_as_torch_does_it(count):
    torch.manual_seed(count)
    rows, factors = torch.randn(7, count), torch.rand(7) * 1e6
    rows[2], factors[2] = math.nan, 0.0
    total = torch.randint(-1000, 1000, (count,), dtype=torch.int32)
    kept = [each for each in range(7) if each != 2]
    wanted = total + (rows[kept] * factors[kept, None]).round().to(torch.int32).sum(0)
    kernels.add_rounded(rows.numpy(), factors.numpy(), total.numpy())
    assert torch.equal(total, wanted.to(torch.int32))
    found = np.empty(6)
    kernels.squared_norms(rows[kept].numpy(), found)
    exact = [math.fsum(float(x) ** 2 for x in row) for row in rows[kept].double()]
    assert found == pytest.approx(exact, rel=2**-45)
    whole = np.empty(count, np.int32)
    kernels.scaled_and_rounded(rows[0].numpy(), 12345.678, whole)
    assert (whole == (rows[0].double() * 12345.678).round().numpy()).all()
    noise, back = np.arange(count) << 31, np.empty((2, count), np.float32)
    kernels.unscaled(whole, 1 / 3, back[0])
    kernels.unscaled_with_noise(whole, noise, 1 / 3, back[1])
    for one, wanted in zip(back, (whole, whole + noise), strict=True):
        assert (one == (wanted.astype(np.float64) * (1 / 3)).astype(np.float32)).all()


def test_products_are_rounded_and_added_as_torch_does_it():
    torch.manual_seed(0)
    sent, read = torch.randn(6, 11).relu() * 1e4, torch.randn(6, 4100)
    sent[1], read[1] = 0.0, math.inf  # a sample that counts as nothing
    total = torch.zeros(11, 4100, dtype=torch.int32)
    kernels.add_products(sent.numpy(), read.numpy(), total.numpy())
    kept = [0, 2, 3, 4, 5]
    products = sent[kept].unsqueeze(2) * read[kept].unsqueeze(1)
    assert torch.equal(total, products.round().to(torch.int32).sum(0).to(torch.int32))


def test_gaussian_numbers_are_within_their_error_of_the_true_ones():
    drawn = words(KEY, 0, 60_000)
    top = 2**64 - 1
    ends = [0, 1, 2**52, 2**61 - 1, 2**61, 2**62, 2**63 - 1, 2**63, top - 2**61, top - 1, top]
    drawn[: 2 * len(ends)].reshape(-1, 2)[:] = np.array([ends, ends[::-1]], np.uint64).T
    found, error = _approximate(drawn, 1.0)
    first, second = (drawn[n::2].astype(np.longdouble) for n in (0, 1))  # all 64 bits of a word
    radius = np.sqrt(-2 * np.log((first + 0.5) / np.longdouble(2.0**64)))
    turns = 2 * np.longdouble("3.14159265358979323846264338327950288")
    angle = (second + 0.5) / np.longdouble(2.0**64) * turns
    for place, turned in ((0, np.cos(angle)), (1, np.sin(angle))):
        assert (np.abs(found[place::2] - radius * turned) <= error[place::2]).all()
