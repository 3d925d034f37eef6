"""A model that goes through torch.compile."""

import time
from dataclasses import replace
from typing import Any

import tiny
import torch
from torch import Tensor, nn

import instep


def recipe() -> instep.Recipe:
    made = tiny.recipe()
    assert isinstance(made.model, nn.Module)
    made.model.compile(backend="eager")
    assert hasattr(torch._dynamo, "OptimizedModule")  # the compiler itself, and no stand-in
    return replace(made, validate=None, metrics={})


class Again(nn.Module):
    """Becomes another program after so many passes, as with a batch of another size."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.layer, self.kind, self.passes, self.after = nn.Linear(6, 3), 0, 0, after

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * 1.0 if self.kind else self.layer(x)


def again(after: int, seconds: float) -> instep.Recipe:
    """Compiles anew in the middle of training, for longer than a step may take."""
    model = Again(after)

    def slowly(graph: Any, inputs: Any) -> Any:
        time.sleep(seconds if model.kind else 0.0)
        return graph.forward

    def loss(outputs: Tensor, target: Tensor) -> Tensor:
        model.passes += 1
        model.kind = int(model.passes > model.after)
        return nn.functional.cross_entropy(outputs, target)

    model.compile(backend=slowly)
    made = tiny.recipe()
    return replace(made, model=model, loss=loss, validate=None, metrics={})
