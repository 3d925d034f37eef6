"""Ordinary passes: their gradients, weighted, add up to those of a plain pass over the batch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from instep.data.loader import Read, Slice
from instep.data.order import Position
from instep.engine.clock import Clock
from instep.engine.passes import Pass, Share
from instep.recipe.forward import Forward
from instep.recipe.recipe import Recipe
from instep.worker.passes.activity import Activity
from instep.worker.passes.ordinary import Ordinary

WHOLE = 32


class Frozen16(nn.Module):
    """A frozen layer in 16 bits beside one that is trained."""

    def __init__(self):
        super().__init__()
        self.low, self.high = nn.Linear(8, 8).bfloat16(), nn.Linear(8, 8)
        self.low.requires_grad_(False)

    def forward(self, x):
        return x + self.high(torch.tanh(self.low(x.bfloat16())).float())


def layers():
    torch.manual_seed(0)
    return nn.Sequential(Frozen16(), Frozen16(), Frozen16(), nn.Linear(8, 2))


def batch():
    inputs = torch.randn(WHOLE, 8, generator=torch.Generator().manual_seed(1))
    return inputs, (inputs[:, 0] > 0).long()


class Summing:
    """Stands in for the engine: sums the gradients of passes, each by the weight it is given."""

    def __init__(self, model):
        self.model, self.trained = model, [p for p in model.parameters() if p.requires_grad]
        self.sums = [torch.zeros_like(p) for p in self.trained]
        self.clock, self.passes, self.taken, self.ends_step = Clock(), self, 0, True
        self.buffers, self.weight, self.seen = (), 0.0, []
        update = SimpleNamespace(scaler=torch.amp.GradScaler("cpu", enabled=False))
        self.turn = SimpleNamespace(number=0, update=update)

    def begin(self, part, weight, *, last):
        self.weight = weight

    def end(self, part, share, *, left_out):
        self.seen.append([parameter.grad.clone() for parameter in self.trained])
        for parameter, total in zip(self.trained, self.sums, strict=True):
            total.add_(parameter.grad, alpha=self.weight)
            parameter.grad = None


def in_passes(model, loss, sizes, data):
    """The gradients of a step that is cut into passes of these sizes."""
    engine, at, parts, reads = Summing(model), 0, [], []
    for size in sizes:
        parts.append(Pass(Slice(0, at, at + size), len(parts)))
        reads.append(Read(tuple(each[at : at + size] for each in data), size))
        at += size
    recipe = Recipe(model=model, train=[0], optimizer=lambda p: None, loss=loss)
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    passes = Ordinary(engine, forward, 7, Activity(), lambda: False)
    found = passes.run(Position(0, 0, WHOLE), Share(parts, 0, WHOLE), iter(reads), 1)
    assert len(found.losses) == len(sizes)
    return engine.sums


def off(gradients, model, loss, data):
    """How far they are from those of the whole batch, of the length of these."""
    model.zero_grad()
    loss(model(data[0]), data[1]).backward()
    plain = torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad]).double()
    ours = torch.cat([each.flatten() for each in gradients]).double()
    return float((ours - plain).norm() / plain.norm())


@pytest.mark.parametrize("sizes", [(32,), (16, 16), (11, 11, 10), (5, 27), (1,) * 32])
def test_what_goes_back_through_layers_of_16_bits_is_rounded_as_in_the_whole_batch(sizes):
    model, data, loss = layers(), batch(), nn.CrossEntropyLoss()
    assert off(in_passes(model, loss, sizes, data), model, loss, data) < 1e-6


def test_a_loss_of_16_bits_does_not_round_the_share_of_its_pass():
    """Its gradient is the share itself, the same for all: a rounded one is off as a whole."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    data = torch.ones(WHOLE, 1).bfloat16(), torch.zeros(WHOLE, 1).bfloat16()
    loss = lambda out, target: (out - target).mean()  # noqa: E731
    given = Recipe(model=model, train=[0], optimizer=lambda p: None, loss=loss, weight=lambda b: 3)
    engine = Summing(model)
    forward = Forward(given, model, torch.device("cpu"), "float32")
    passes = Ordinary(engine, forward, 7, Activity(), lambda: False)
    reads = iter([Read(data, WHOLE)])
    engine.sums = [each.double() for each in engine.sums]
    passes.run(Position(0, 0, 13), Share([Pass(Slice(0, 0, 13), 0)], 0, 13), reads, 1)
    assert float(engine.sums[0]) == pytest.approx(3 / 13, rel=1e-9)


def test_a_pass_that_repeats_another_has_its_gradients_and_counts_nothing():
    model, data = layers(), batch()
    engine, slice_ = Summing(model), Slice(0, 0, 11)
    parts = [Pass(slice_, 0), Pass(slice_, 0, repeats=True)]
    recipe = Recipe(model=model, train=[0], optimizer=lambda p: None, loss=nn.CrossEntropyLoss())
    forward = Forward(recipe, model, torch.device("cpu"), "float32")
    passes = Ordinary(engine, forward, 7, Activity(), lambda: False)
    reads = [Read(tuple(each[:11] for each in data), 11) for _ in parts]
    found = passes.run(Position(0, 0, WHOLE), Share(parts, 0, 11), iter(reads), 1)
    own, again = engine.seen
    assert all(map(torch.equal, own, again))
    assert all(map(torch.equal, own, engine.sums))
    assert len(found.losses) == 1
