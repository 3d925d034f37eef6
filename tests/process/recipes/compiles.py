"""A model that goes through torch.compile."""

from dataclasses import replace

import tiny
import torch
from torch import nn

import instep


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    assert isinstance(made.model, nn.Module)
    made.model.compile(backend="eager")
    assert hasattr(torch._dynamo, "OptimizedModule")  # the compiler itself, and no stand-in
    return replace(made, validate=None, metrics={})
