"""A tiny GAN: two updates in each step, of which the second sees the first. It may kill itself."""

import os
import signal
from pathlib import Path

import torch
from first_come import first
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import instep

NOISE = 3
MOMENTS = {"generator": 9, "discriminator": 14, "its optimizer": 9, "other optimizer": 11}
"""Where a worker is killed, once, and by which call."""


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(NOISE, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 2)
        )
        self.discriminator = nn.Sequential(
            nn.Linear(2, 8), nn.LeakyReLU(), nn.Dropout(0.2), nn.Linear(8, 1)
        )


def fakes(model, real):
    return model.generator(torch.randn(len(real), NOISE, dtype=real.dtype))


def judged(logits, wanted):
    return functional.binary_cross_entropy_with_logits(logits, torch.full_like(logits, wanted))


def discriminator_loss(model, batch):
    (real,) = batch
    fake = fakes(model, real).detach()
    return judged(model.discriminator(real), 1.0) + judged(model.discriminator(fake), 0.0)


def generator_loss(model, batch):
    (real,) = batch
    return judged(model.discriminator(fakes(model, real)), 1.0)


def samples():
    return torch.randn(66, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01, betas=(0.5, 0.9))


def decaying(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)


def recipe(marks: str = "", validates: bool = False, spoils: bool = False) -> instep.Recipe:
    """Where `marks` is a folder, a worker is killed once at each of `MOMENTS`.

    With `spoils` the loss of the first turn, but no gradient, is at its moment no number.
    """
    model, calls = Gan().double(), dict.fromkeys(MOMENTS, 0)

    def moment(name):
        calls[name] += 1
        if marks and calls[name] >= MOMENTS[name] and first(Path(marks, name.replace(" ", "-"))):
            os.kill(os.getpid(), signal.SIGKILL)

    def turn(name, loss, optimizer_name, scheduler=None):
        def compute_loss(given, batch):
            if given is model and given.training:  # and no copy on which something is tried
                moment(name)
            mean = loss(given, batch)
            if spoils and name == "discriminator" and calls[name] == MOMENTS[name]:
                mean = mean + float("nan")
            return instep.WeightedLoss(mean * len(batch[0]), len(batch[0]))

        def optimizer(parameters):
            made = adam(parameters)
            made.register_step_post_hook(lambda *_: moment(optimizer_name))
            return made

        return instep.Turn(
            name, lambda m: getattr(m, name).parameters(), optimizer, compute_loss, scheduler
        )

    return instep.Recipe(
        model=model,
        train=TensorDataset(samples()),
        validate=TensorDataset(samples()[:20]) if validates else None,
        turns=[
            turn("discriminator", discriminator_loss, "its optimizer"),
            turn("generator", generator_loss, "other optimizer", decaying),
        ],
    )
