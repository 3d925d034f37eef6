"""As slow_tiny.py, with 16 MB that no step changes: a newcomer needs them all the same."""

import slow_tiny
import torch
from torch import Tensor, nn

import instep


class Heavy(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.ballast = nn.Parameter(torch.zeros(4_000_000), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs)


def recipe() -> instep.Recipe:
    made = slow_tiny.recipe()
    return instep.Recipe(
        model=Heavy(made.model),
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
        validate=made.validate,
        metrics=made.metrics,
    )
