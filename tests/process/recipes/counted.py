"""A model whose result depends on its buffers, one of which its state dict leaves out."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep


class Counted(nn.Module):
    """Normalises by running statistics, and scales by how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros(1), persistent=False)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.norm(self.first(inputs)) + 0.1 * self.norm.running_mean)
        if self.training:
            self.calls = self.calls + 1
            self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        output: Tensor = self.last(hidden + self.mean) / (1 + 0.05 * self.calls)
        return output


def recipe() -> instep.Recipe:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(101, 6, generator=generator)
    labels = (inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1)
    return instep.Recipe(
        model=Counted(),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        train=TensorDataset(inputs, labels),
    )
