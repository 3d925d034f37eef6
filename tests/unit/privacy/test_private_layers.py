"""Clipped gradients of layers that are used in other ways than most, against one by one."""

from __future__ import annotations

import pytest
import torch
from test_private_gradients import CLIP, SAMPLES, one_by_one, summed
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations


class Body(nn.Module):
    """One layer of the test's, and a last one: `use` says how the first is called."""

    def __init__(self, layer, use=None):
        super().__init__()
        self.layer, self.head, self.use = layer, nn.Linear(8, 3), use

    def forward(self, x):
        found = self.use(self.layer, x) if self.use else self.layer(x)
        return self.head(found.flatten(1, -2).mean(1) if found.dim() > 2 else found)


class Positions(nn.Module):
    """The same rows of a table for all samples."""

    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(10, 8), nn.Embedding(5, 8)

    def forward(self, x):
        return self.words(x) + self.places(torch.arange(5))


class TiedTokens(nn.Module):
    """An embedding whose table is the last layer's matrix."""

    def __init__(self):
        super().__init__()
        self.words, self.out = nn.Embedding(10, 8), nn.Linear(8, 10, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.words(x).mean(1).tanh())


def numbers(*shape):
    return lambda: torch.randn(SAMPLES, *shape)


def tokens():
    ids = torch.randint(0, 10, (SAMPLES, 5))
    ids[:, 0], ids[:, 1] = 0, ids[:, 2]
    return ids


def last(layer, x):
    return layer(x)[0][:, -1]


def channels_last(layer, x):
    return layer(x).movedim(1, -1)


def same_input(layer, x):
    return layer(x) + layer(torch.ones(8))


def padded(mode):
    layer = nn.Conv1d(3, 8, 3, padding=1, padding_mode=mode)
    return lambda: Body(layer, lambda conv, x: torch.relu(channels_last(conv, x)))


GROUPED = {"groups": 4, "stride": 2, "dilation": 2, "padding": 3, "bias": False}
LINEAR = {
    "twice": lambda layer, x: layer(torch.relu(layer(x))),
    "its weight alone too": lambda layer, x: F.linear(torch.relu(layer(x)), layer.weight),
    "its weight turned": lambda layer, x: F.linear(x, layer.weight.t(), layer.bias),
    "once without gradient": lambda layer, x: layer(x).detach() + layer(x),
    "what all samples share": same_input,
    "one axis more": lambda layer, x: layer(x.unsqueeze(0)).squeeze(0),
    "changed in place": lambda layer, x: layer(x).relu_(),
}
MODELS = {
    **{
        f"linear: {name}": (lambda use=use: Body(nn.Linear(8, 8), use), numbers(8))
        for name, use in LINEAR.items()
    },
    **{
        f"padding {mode}": (padded(mode), numbers(3, 9))
        for mode in ("circular", "reflect", "replicate")
    },
    "time first": (
        lambda: Body(nn.Linear(8, 8), lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1)),
        numbers(5, 8),
    ),
    "same padding": (
        lambda: Body(nn.Conv1d(3, 8, 3, padding="same", dilation=2), channels_last),
        numbers(3, 9),
    ),
    "one axis": (
        lambda: Body(nn.Conv1d(4, 8, 3, stride=2, padding=3, dilation=2, groups=2), channels_last),
        numbers(4, 9),
    ),
    "each channel by itself": (
        lambda: Body(nn.Conv2d(4, 8, (3, 1), padding=(1, 0), groups=4), channels_last),
        numbers(4, 5, 5),
    ),
    "grouped": (lambda: Body(nn.Conv2d(4, 8, 3, **GROUPED), channels_last), numbers(4, 9, 9)),
    "transposed": (
        lambda: Body(nn.ConvTranspose1d(3, 8, 3, padding=1), channels_last),
        numbers(3, 9),
    ),
    "two axes": (lambda: Body(nn.LayerNorm((4, 8))), numbers(4, 8)),
    "RMSNorm": (lambda: Body(nn.RMSNorm(8)), numbers(8)),
    "GRU": (lambda: Body(nn.GRU(8, 8, batch_first=True), last), numbers(5, 8)),
    "encoder": (
        lambda: Body(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)),
        numbers(5, 8),
    ),
    "weight_norm": (lambda: Body(parametrizations.weight_norm(nn.Linear(8, 8))), numbers(8)),
    "orthogonal": (lambda: Body(parametrizations.orthogonal(nn.Linear(8, 8))), numbers(8)),
    "bilinear": (
        lambda: Body(nn.Bilinear(8, 8, 8), lambda layer, x: layer(x, x.flip(1))),
        numbers(8),
    ),
    "padding row": (lambda: Body(nn.Embedding(10, 8, padding_idx=0)), tokens),
    "by frequency": (lambda: Body(nn.Embedding(10, 8, scale_grad_by_freq=True)), tokens),
    "bag": (lambda: Body(nn.EmbeddingBag(10, 8, mode="max")), tokens),
    "positions": (lambda: Body(Positions()), tokens),
    "tied tokens": (TiedTokens, tokens),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_that_is_used_otherwise_is_clipped_by_its_samples(name):
    torch.manual_seed(5)
    make, inputs = MODELS[name]
    model, batch = make(), [inputs(), torch.randint(3, (SAMPLES,))]
    _, grid, sums = summed(model, batch)
    expected = one_by_one(model, batch, CLIP * (1 - 2.0**-16))
    assert all(each.any() for each in expected)
    far = [(s * grid.unit - e).abs().max() for s, e in zip(sums, expected, strict=True)]
    assert max(far) < 1e-6


@pytest.mark.parametrize("name", ["one axis", "each channel by itself", "grouped"])
def test_what_a_convolution_reads_is_enough(name):
    torch.manual_seed(5)
    make, inputs = MODELS[name]
    model, batch = make(), [inputs(), torch.randint(3, (SAMPLES,))]
    per_sample, *_ = summed(model, batch)
    (taps,) = per_sample._taps.values()
    assert {type(each.layer) for each in taps.tapped} == {type(model.layer), nn.Linear}
    assert len(taps.covered) == len(list(model.parameters()))
