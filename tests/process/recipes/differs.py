"""Every process builds other parameters, in the second layer."""

import os
from dataclasses import replace

import tiny
import torch
from torch import nn

import instep


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    assert isinstance(made.model, nn.Sequential)
    with torch.no_grad():
        made.model[2].bias.fill_(os.getpid() % 1009)  # far more apart than rounding
    return replace(made, validate=None, metrics={})
