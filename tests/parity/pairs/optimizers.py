"""Optimizers, clipping, schedules, groups of parameters."""

from __future__ import annotations

import torch
from pair import Parts, pair, refused, samples_of
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from pairs.common import gentle_adamw, mlp, regression


def moved_by(optimizer, **changes):
    return Parts(
        model=mlp(outputs=3), train=regression(), loss=nn.MSELoss(), optimizer=optimizer, **changes
    )


@pair("AdamW")
def adamw():
    return moved_by(gentle_adamw)


@pair("Adagrad")
def adagrad():
    return moved_by(lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3))


@pair("RMSprop")
def rmsprop():
    return moved_by(lambda p: torch.optim.RMSprop(p, lr=1e-2, eps=1e-2, momentum=0.5))


@pair("gradient clipping", train={"max_grad_norm": 0.1})
def clipping():
    return moved_by(lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9))


@pair("cosine schedule")
def cosine():
    return moved_by(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    )


@pair("one cycle, which moves the momentum too")
def one_cycle():
    return moved_by(
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.2, total_steps=30),
    )


@pair("groups of parameters")
def groups():
    def parts(model):
        return [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "lr": 0.02},
        ]

    return moved_by(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), parameters=parts)


@pair("LBFGS", refused("LBFGS"))
def lbfgs():
    return moved_by(lambda p: torch.optim.LBFGS(p, lr=0.1))


class Langevin(torch.optim.SGD):
    """Adds noise to what it moves."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-2)


@pair("an optimizer that draws")
def langevin():
    return moved_by(lambda p: Langevin(p, lr=0.05))


class Taught(nn.Module):
    """A net, and the moving average of its weights, which counts in a buffer how often it moved."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.teacher = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.teacher.requires_grad_(False)


@pair("a moving average of the weights by a hook of the optimizer, in the loss", draws=True)
def averaged_by_a_hook():
    """`AveragedModel` copies the weights where its count is 0, and averages them from then on."""
    model = Taught()

    def optimizer(parameters):
        made = gentle_adamw(parameters)
        made.register_step_post_hook(lambda *_: model.teacher.update_parameters(model.net))
        return made

    def loss(model, batch):
        found = model.net(batch[0])
        return F.mse_loss(found, batch[1]) + F.mse_loss(found, model.teacher(batch[0]))

    return Parts(
        model=model,
        train=regression(),
        compute_loss=loss,
        optimizer=optimizer,
        given={"weight": samples_of},
    )
