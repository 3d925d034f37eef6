"""Clipped gradients of single samples, against one by one in plain torch, and against Opacus."""

from __future__ import annotations

import math
import random
import re

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from instep.errors import RecipeError, SpecError
from instep.privacy.gradients.collating import CollateApart
from instep.privacy.gradients.per_sample import PerSample
from instep.privacy.grid import Grid
from instep.recipe.build import set_generators

CLIP, SAMPLES = 0.7, 6


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTM(5, 8, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.cell(x)[0][:, -1])


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(11, 8), nn.LayerNorm(8)
        self.attend, self.out = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 3)

    def forward(self, x):
        x = self.norm(self.embed(x))
        return self.out(self.attend(x, x, x, need_weights=False)[0].mean(1))


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.each = nn.Embedding(2100, 8, padding_idx=0), nn.Linear(8, 6)  # a large one
        self.norm, self.out = nn.LayerNorm(6), nn.Linear(6, 3, bias=False)

    def forward(self, x):
        return self.out(self.norm(self.each(self.embed(x))).tanh().mean(1))


class Padded(nn.Module):
    """Has embeddings that are small, or read twice, and rows of padding that no stand-in names."""

    def __init__(self):
        super().__init__()
        self.small, self.twice = nn.Embedding(11, 8, padding_idx=-1), nn.Embedding(2100, 8, 5)
        self.plain, self.out = nn.Parameter(torch.randn(11, 8)), nn.Linear(8, 3)

    def forward(self, x):
        rows = self.small(x) + self.twice(x) + 2 * self.twice(x.flip(1))
        rows = rows + torch.embedding(self.plain, x, 3)
        return self.out(rows.tanh().mean(1))


def mlp():
    return nn.Sequential(nn.Linear(5, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3))


def convolution():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3)
    )


def tied():
    first = nn.Linear(5, 5)
    return nn.Sequential(first, nn.Tanh(), first, nn.Linear(5, 3))


FAMILIES = {
    "mlp": (mlp, lambda: torch.randn(SAMPLES, 5)),
    "convolution": (convolution, lambda: torch.randn(SAMPLES, 1, 6, 6)),
    "recurrent": (Recurrent, lambda: torch.randn(SAMPLES, 4, 5)),
    "attention": (Words, lambda: torch.randint(11, (SAMPLES, 7))),
    "tokens": (Tokens, lambda: torch.randint(11, (SAMPLES, 7))),
    "padded": (Padded, lambda: torch.randint(11, (SAMPLES, 7))),
    "tied": (tied, lambda: torch.randn(SAMPLES, 5)),
}


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def one_by_one(model, batch, clip):
    parameters = list(model.parameters())
    total = [torch.zeros_like(each) for each in parameters]
    for place in range(SAMPLES):
        loss = loss_of(model, [each[place : place + 1] for each in batch])
        found = torch.autograd.grad(loss, parameters, materialize_grads=True)
        norm = torch.cat([each.flatten() for each in found]).norm()
        for into, each in zip(total, found, strict=True):
            into += each * min(1.0, clip / float(norm))
    return total


def made(name, seed=3):
    torch.manual_seed(seed)
    model, inputs = FAMILIES[name]
    model, batch = model(), [inputs(), torch.randint(3, (SAMPLES,))]
    return model, batch


def summed(model, batch, clip=CLIP):
    parameters = list(model.parameters())
    grid = Grid(clip, sum(each.numel() for each in parameters), 60)
    per_sample = PerSample(model, parameters, loss_of, grid)
    sums = per_sample.sums(batch, SAMPLES)
    return per_sample, grid, sums


@pytest.mark.parametrize("name", FAMILIES)
def test_sums_are_those_of_samples_clipped_one_by_one(name):
    model, batch = made(name)
    per_sample, grid, sums = summed(model, batch)
    expected = one_by_one(model, batch, CLIP * (1 - 2.0**-16))
    far = [(s * grid.unit - e).abs().max() for s, e in zip(sums, expected, strict=True)]
    assert max(far) < 1e-6
    assert name == "recurrent" or per_sample.batched, per_sample.why


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ["mlp", "convolution", "tokens"])
def test_sums_are_those_of_opacus(name):
    opacus = pytest.importorskip("opacus.grad_sample")
    model, batch = made(name)
    if name == "tokens":
        batch[0] = batch[0] + 1  # Opacus trains the row of the padding too
    _, grid, sums = summed(model, batch)
    hooked = opacus.GradSampleModule(model)
    (loss_of(hooked, batch)).backward()
    samples = [each.grad_sample for each in model.parameters()]
    norms = torch.stack([each.flatten(1).norm(dim=1) for each in samples]).norm(dim=0)
    factors = (CLIP * (1 - 2.0**-16) / norms).clamp(max=1.0)
    for mine, theirs in zip(sums, samples, strict=True):
        clipped = torch.einsum("n,n...->...", factors, theirs)
        assert (mine * grid.unit - clipped).abs().max() < 1e-6


def test_what_is_sent_back_to_a_layer_may_lie_column_by_column():
    model, (inputs, _) = made("mlp")
    targets = torch.randn(3, SAMPLES)
    parameters = list(model.parameters())
    grid = Grid(CLIP, sum(each.numel() for each in parameters), 60)
    found = [
        PerSample(model, parameters, lambda m, b: (m(b[0]) * b[1]).sum(), grid).sums(
            [inputs, each], SAMPLES
        )
        for each in (targets.T, targets.T.contiguous())
    ]
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_a_sample_changes_a_sum_by_no_more_than_the_sensitivity(scale):
    model, batch = made("mlp")
    batch[0] = batch[0] * scale
    _, grid, sums = summed(model, batch)
    for place in range(SAMPLES):
        others = [torch.cat([each[:place], each[place + 1 :]]) for each in batch]
        parameters = list(model.parameters())
        less = PerSample(model, parameters, loss_of, grid).sums(others, SAMPLES - 1)
        own = torch.cat([(a - b).flatten() for a, b in zip(sums, less, strict=True)]).double()
        assert own.norm() <= grid.sensitivity
    assert sums[0].dtype == torch.int32


@pytest.mark.parametrize("clip", [1e-20, 1e20])
def test_a_clip_at_the_end_of_its_range_is_kept_to_and_one_beyond_is_refused(clip):
    model, batch = made("mlp")
    _, grid, sums = summed(model, batch, clip)
    whole = torch.cat([each.flatten() for each in sums]).double()
    assert whole.norm() <= SAMPLES * grid.sensitivity
    with pytest.raises(SpecError, match="clipped to norms between"):
        summed(model, batch, clip * (0.9 if clip < 1 else 1.1))


def test_a_sample_that_is_not_finite_counts_as_nothing():
    model, batch = made("mlp")
    _, _, sums = summed(model, batch)
    batch[0][2] = float("nan")
    _, grid, without = summed(model, batch)
    assert all(each.abs().max() < 2**31 - 1 for each in without)
    own = torch.cat([(a - b).flatten() for a, b in zip(sums, without, strict=True)]).double()
    assert 0 < own.norm() <= grid.sensitivity


def test_a_sample_that_is_not_finite_does_not_choose_how_others_are_computed():
    for place in (0, 3):
        model, batch = made("mlp")
        batch[0][place] = float("nan")
        per_sample, _, _ = summed(model, batch)
        assert per_sample.batched, per_sample.why


def test_what_looks_at_other_samples_or_remembers_them_is_refused_by_name():
    for layer, name in (
        (nn.BatchNorm1d(5), "BatchNorm1d"),
        (nn.InstanceNorm1d(5, track_running_stats=True), "running"),
        (nn.Embedding(5, 5, sparse=True), "sparse"),
        (nn.Embedding(5, 5, max_norm=1.0), "max_norm"),
        (nn.Linear(5, 5).double(), "float64"),
    ):
        with pytest.raises(RecipeError, match=name):
            summed(nn.Sequential(layer, nn.Linear(5, 3)), made("mlp")[1])


def centred(samples):
    inputs = torch.stack([each[0] for each in samples])
    return [inputs - inputs.mean(0) + 1, torch.stack([each[1] for each in samples])]


def test_a_collate_that_mixes_samples_cannot_have_one_change_the_sum_by_more_than_itself():
    model, (inputs, targets) = made("mlp")
    samples = list(zip(inputs, targets, strict=True))
    other = [(1e4 * inputs[0], targets[0]), *samples[1:]]
    for collate, holds in ((centred, False), (CollateApart(centred), True)):
        _, grid, one = summed(model, collate(samples))
        _, _, two = summed(model, collate(other))
        apart = torch.cat([(a - b).flatten() for a, b in zip(one, two, strict=True)]).double()
        # replaced and not left out: twice as much
        assert (apart.norm() <= 2 * grid.sensitivity) == holds
    with pytest.raises(RecipeError, match="pad all to one length"):
        CollateApart(torch.stack)([torch.zeros(3), torch.zeros(4)])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.sum().detach()
        return self.linear(x)


class Growing(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight += x.sum()
        return super().forward(x)


@pytest.mark.parametrize("model", [Counting, lambda: Growing(5, 3)])
def test_a_buffer_or_parameter_that_moves_is_refused(model):
    with pytest.raises(RecipeError, match="a buffer or parameter of the model changed"):
        summed(model(), made("mlp")[1])


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(x if float(x.sum()) > 0 else -x)


class Checkpointed(nn.Module):
    """Computes a part of its forward pass again in the backward pass."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        again = torch.utils.checkpoint.checkpoint(self.first, x, use_reentrant=False)
        return self.out(again.tanh())


@pytest.mark.parametrize("make", [Branching, Checkpointed])
def test_what_torch_func_cannot_compute_is_computed_one_by_one(make):
    torch.manual_seed(0)
    model, batch = make(), made("mlp")[1]
    per_sample, grid, sums = summed(model, batch)
    assert per_sample.batched is False
    assert "torch.func cannot" in per_sample.why
    expected = one_by_one(model, batch, CLIP * (1 - 2.0**-16))
    for mine, other in zip(sums, expected, strict=True):
        assert (mine * grid.unit - other).abs().max() < 1e-6


def test_a_batch_with_something_that_is_not_of_a_sample_is_refused():
    model, batch = made("mlp")
    with pytest.raises(RecipeError, match="first dimension"):
        summed(model, [batch[0], batch[1][:3]])
    with pytest.raises(RecipeError, match="beside its tensors"):
        summed(model, [*batch, "a name"])


def test_a_loss_that_compares_samples_is_seen_and_a_mean_over_samples_is_not():
    def mean(model, batch):
        return nn.functional.mse_loss(model(batch[0]), batch[1])

    def compares(model, batch):
        outputs = model(batch[0])
        return (outputs @ outputs.T).square().mean()

    torch.manual_seed(0)
    batch = torch.randn(6, 3), torch.randn(6, 2)
    for loss, seen in ((mean, False), (compares, True)):
        model = nn.Linear(3, 2)
        parameters = list(model.parameters())
        per_sample = PerSample(model, parameters, loss, Grid(1.0, 8, 16))
        per_sample.sums(batch, 6)
        said = per_sample.compared()
        assert bool(said) == seen
        assert not seen or "Have compute_loss be a mean over samples" in said
        assert not re.search(r"\d", said)  # it is logged: no figure of samples
        assert not per_sample.compared()


class Twice(nn.Module):
    """Uses a weight in its layer, and by itself too."""

    def __init__(self):
        super().__init__()
        self.first, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.out(self.first(x).tanh() + nn.functional.linear(x, self.first.weight))


def changed_by_a_hook():
    model = mlp()
    model[0].register_forward_hook(lambda layer, given, output: output.tanh())
    return model


@pytest.mark.parametrize("make", [Twice, changed_by_a_hook])
def test_layers_that_are_not_used_plainly_are_computed_otherwise(make):
    torch.manual_seed(0)
    model, batch = make(), made("mlp")[1]
    per_sample, grid, sums = summed(model, batch)
    assert per_sample.batched, per_sample.why
    expected = one_by_one(model, batch, CLIP * (1 - 2.0**-16))
    for mine, other in zip(sums, expected, strict=True):
        assert (mine * grid.unit - other).abs().max() < 1e-6


class Added(nn.Module):
    """Has parameters of which a sample has one and the same gradient."""

    def __init__(self, count):
        super().__init__()
        self.added = nn.ParameterList(torch.randn(1, 5) for _ in range(count))
        self.first, self.out = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        for each in self.added:
            x = x + each
        return self.out(x)


class Trained(nn.Module):
    """Does something else in train mode than in eval mode."""

    def __init__(self, how):
        super().__init__()
        self.how, self.first, self.out = how, nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        if not self.training:
            return self.out(self.first(x).tanh())
        if self.how == "twice":
            return self.out(self.first(self.first(x).tanh()))
        if self.how == "weight":
            return self.out(self.first(x).tanh() + self.first.weight.square().sum())
        return self.out(x)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Added(1),
        lambda: Added(2),
        lambda: Trained("twice"),
        lambda: Trained("weight"),
        lambda: Trained("not at all"),
    ],
)
def test_no_gradient_is_changed_by_anothers_nor_by_what_only_train_mode_does(make):
    torch.manual_seed(0)
    model, batch = make(), made("mlp")[1]
    per_sample, grid, sums = summed(model, batch)
    assert per_sample.batched, per_sample.why
    expected = one_by_one(model, batch, CLIP * (1 - 2.0**-16))
    for mine, other in zip(sums, expected, strict=True):
        assert (mine * grid.unit - other).abs().max() < 1e-6


class ByChance(nn.Module):
    """Leaves a layer out by chance, as in stochastic depth."""

    def __init__(self, draw):
        super().__init__()
        self.first, self.out = nn.Linear(5, 5), nn.Linear(5, 3)
        self.draw, self.left_out = draw, False

    def forward(self, x):
        self.left_out = bool(self.training and self.draw() < 0.5)
        return self.out(x if self.left_out else x + self.first(x))


@pytest.mark.parametrize("batched", [True, False])
def test_a_layer_that_is_left_out_by_chance_counts_where_it_was_called(batched):
    torch.manual_seed(0)
    model, batch = ByChance(random.random if batched else lambda: torch.rand(())), made("mlp")[1]
    seen = set()
    for number in range(6):
        parameters = list(model.parameters())
        grid = Grid(CLIP, sum(each.numel() for each in parameters), 60)
        per_sample = PerSample(
            model, parameters, loss_of, grid, lambda place, by=number: set_generators(by)
        )
        sums = per_sample.sums(batch, SAMPLES)
        assert per_sample.batched is batched
        seen.add(model.left_out)
        drawn, model.draw = model.draw, lambda out=model.left_out: 0.0 if out else 1.0
        expected = one_by_one(model, batch, CLIP * (1 - 2.0**-16))
        model.draw = drawn
        for mine, other in zip(sums, expected, strict=True):
            assert (mine * grid.unit - other).abs().max() < 1e-6
    assert seen == {True, False}


@pytest.mark.parametrize("large", [1e18, 1e30])
def test_gradients_that_float32_cannot_hold_are_clipped_where_their_factors_fit(large):
    torch.manual_seed(0)
    model = nn.Linear(5, 3, bias=False)
    batch = [torch.randn(SAMPLES, 5) * large, torch.randn(SAMPLES, 3)]

    def steep(model, batch):
        return large * (model(batch[0]) * batch[1]).sum()

    parameters = list(model.parameters())
    grid = Grid(CLIP, 15, 60)
    (found,) = PerSample(model, parameters, steep, grid).sums(batch, SAMPLES)
    wanted = torch.zeros(3, 5, dtype=torch.float64)
    for read, sent in zip(*(each.double() for each in batch), strict=True):
        wanted += torch.outer(sent, read) * CLIP / float(sent.norm() * read.norm())
    torch.testing.assert_close(found.double() * grid.unit, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("large", [1.0, 1e30, 1e37])
@pytest.mark.parametrize("read", [0.0, 1e-38])
def test_a_sample_that_is_steep_in_one_side_of_a_product_counts_as_it_is(large, read):
    model = nn.Linear(5, 2, bias=False)
    grid = Grid(1e-3, 10, 60)
    batch = [torch.full((2, 5), read), torch.ones(2, 2)]

    def steep(model, batch):
        return (model(batch[0]) * batch[1] * large).sum()

    (found,) = PerSample(model, [model.weight], steep, grid).sums(batch, 2)
    norm = read * large * math.sqrt(10)
    each = read * large * min(1.0, 1e-3 / norm if norm else 1.0) / grid.unit
    torch.testing.assert_close(
        found, torch.full((2, 5), 2 * each), rtol=1e-4, atol=1, check_dtype=False
    )


def held_elsewhere(model):
    model.hidden = [model.first.weight]


def masked(model):
    model.first.weight.register_hook(lambda gradient: gradient.tril())


class Behind(nn.Module):
    """Has a layer behind a number that starts at zero."""

    def __init__(self, how):
        super().__init__()
        self.first, self.out = nn.Linear(5, 5, bias=False), nn.Linear(5, 3)
        self.gate, self.hidden = nn.Parameter(torch.zeros(())), []
        how(self)

    def forward(self, x):
        first = nn.functional.linear(x, self.hidden[0]) if self.hidden else self.first(x)
        return self.out(x + self.gate * first)


@pytest.mark.parametrize("how", [held_elsewhere, masked])
def test_a_layer_behind_a_zero_is_tried_too_and_nothing_has_moved(how):
    torch.manual_seed(0)
    model, batch = Behind(how), made("mlp")[1]
    before = [each.clone() for each in model.parameters()]
    per_sample, grid, _ = summed(model, batch)
    assert per_sample.batched is False
    assert all(map(torch.equal, model.parameters(), before))
    with torch.no_grad():
        model.gate += 1.0
    expected = one_by_one(model, batch, CLIP * (1 - 2.0**-16))
    for mine, other in zip(per_sample.sums(batch, SAMPLES), expected, strict=True):
        assert (mine * grid.unit - other).abs().max() < 1e-6


def test_no_content_of_a_sample_chooses_how_gradients_are_computed():
    chosen = []
    for content in (0.0, 1.0, 1e30, float("nan")):
        model, batch = made("mlp")
        batch[0] = batch[0] * 0 + content
        per_sample, _, _ = summed(model, batch)
        chosen.append((per_sample.batched, per_sample.why))
    assert len(set(chosen)) == 1
