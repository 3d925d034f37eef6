"""A model of equal layers whose every step takes a fixed time, however busy the machine is."""

import time

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


class Sleeps(nn.Module):
    """Matrices that are applied to little; the time of a pass is slept."""

    def __init__(self, width: int, layers: int, step_s: float) -> None:
        super().__init__()
        self.step_s = step_s
        each = [nn.Linear(width, width, bias=False) for _ in range(layers)]
        self.layers = nn.Sequential(*each)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.step_s)
        result: Tensor = self.layers(inputs)
        return result


def recipe(width: int = 512, layers: int = 4, step_s: float = 0.1) -> instep.Recipe:
    inputs = torch.randn(4096, width, generator=torch.Generator().manual_seed(0))
    return instep.Recipe(
        model=lambda: Sleeps(width, layers, step_s),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        train=TensorDataset(inputs, inputs.flip(1)),
    )
