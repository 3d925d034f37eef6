"""A small regression that real processes train: BatchNorm, a frozen and a shared parameter."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import instep


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.norm, self.last = nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.second.bias = self.first.bias
        self.last.bias.requires_grad_(False)

    def forward(self, x):
        return self.last(torch.tanh(self.norm(self.second(torch.tanh(self.first(x))))))


def regression() -> instep.Recipe:
    inputs = torch.randn(56, 6)  # no micro-batch of one sample, which BatchNorm refuses
    return instep.Recipe(
        model=Small(),
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5),
        train=TensorDataset(inputs, inputs.sin().sum(1, keepdim=True)),
    )
