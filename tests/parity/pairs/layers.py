"""Layers that look at their batch, or seem to; heads of zero; hooks."""

from __future__ import annotations

import torch
from pair import Parts, pair, said
from torch import nn
from torch.nn.utils import parametrizations

from pairs.common import classes, mlp

COMPARED = "apart|gradient|micro-batch|samples"


def classifier(model, **changes):
    return Parts(**{"model": model, "train": classes(), "loss": nn.CrossEntropyLoss(), **changes})


@pair("BatchNorm1d and dropout-free layers", said("batch_?norm|norm"))
def batch_norm():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)))


class Watched(nn.Module):
    """Normalises what it sees and throws it away, as a monitor does."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x):
        self.norm(x.detach())
        return x


@pair("BatchNorm that only looks on", said("batch_?norm"))
def watched():
    return classifier(nn.Sequential(nn.Linear(6, 8), Watched(), nn.Tanh(), nn.Linear(8, 4)))


@pair("LayerNorm")
def layer_norm():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 4)))


class Centred(nn.Module):
    """Takes away the mean of the batch."""

    def forward(self, x):
        return x - x.mean(0)


class Spread(nn.Module):
    """A further column: how far the samples of the batch lie apart."""

    def forward(self, x):
        spread = (x - x.mean(0)).square().mean().sqrt()
        return torch.cat([x, spread.expand(len(x), 1)], 1)


@pair("a layer that centres its batch", said(COMPARED))
def centred():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Centred(), nn.Linear(8, 4)))


@pair("deviation within the batch as a feature", said(COMPARED))
def spread():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Spread(), nn.Linear(9, 4)))


def zero(head):
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


@pair("a head of zeros")
def zero_head():
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), zero(nn.Linear(8, 4))))


@pair("a head of zeros behind a layer that centres its batch", said(COMPARED))
def zero_head_hides():
    """At the start every loss is the same, whatever the layers before the head do."""
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Centred(), zero(nn.Linear(8, 4))))


class Gated(nn.Module):
    """A residual branch that counts nothing at first."""

    def __init__(self, branch):
        super().__init__()
        self.branch, self.gate = branch, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + self.gate * self.branch(x)


@pair("a gate of zero before a layer that centres its batch", said(COMPARED))
def zero_gate_hides():
    branch = nn.Sequential(Centred(), nn.Linear(8, 8))
    return classifier(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), Gated(branch), nn.Linear(8, 4)))


class Seldom(nn.Module):
    """Centres its batch only where one sample is extreme: three of ten micro-batches show it."""

    def forward(self, x):
        return x - x.mean(0) if x.abs().max() > 2.3 else x


@pair("a layer that looks at few of its batches", said(COMPARED))
def seldom():
    layers = (Seldom(), nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    return classifier(nn.Sequential(*layers))


@pair("spectral norm")
def spectral():
    """Its vectors move once a step, by the weight alone."""
    return classifier(
        nn.Sequential(parametrizations.spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4))
    )


@pair("weight norm")
def weight():
    return classifier(
        nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 4))
    )


@pair("a hook that clamps a gradient", said("hook"))
def hook():
    model = mlp()
    model[0].weight.register_hook(lambda gradient: gradient.clamp(-0.003, 0.003))
    return classifier(model)


@pair("a hook after accumulation", said("hook"))
def post_hook():
    model = mlp()

    def halve(parameter):
        parameter.grad.clamp_(-0.003, 0.003)

    model[2].weight.register_post_accumulate_grad_hook(halve)
    return classifier(model)


class Clamped(nn.Module):
    """Clamps the gradient of what passes through: smaller batches have larger ones."""

    def forward(self, x):
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return x


@pair("a clamped gradient inside the model", said("hook|gradient"))
def clamped():
    return classifier(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), Clamped(), nn.Linear(16, 4)))


@pair("a backward hook that clamps a layer's gradient", said("hook|gradient"))
def module_hook():
    model = mlp()
    model[1].register_full_backward_hook(
        lambda module, inputs, outputs: tuple(g.clamp(-0.01, 0.01) for g in inputs)
    )
    return classifier(model)


@pair("a forward hook that only looks")
def forward_hook():
    model = mlp()
    seen = []
    model[1].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    return classifier(model)
