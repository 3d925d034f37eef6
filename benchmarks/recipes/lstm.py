"""An LSTM of two layers that predicts the next of made-up bytes."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import instep


class Reader(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        result: Tensor = self.head(self.lstm(self.token(tokens))[0])
        return result


def recipe(samples: int = 4000, width: int = 256, length: int = 64) -> instep.Recipe:
    tokens = torch.randint(256, (samples, length + 1))
    return instep.Recipe(
        model=Reader(width),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        weight=lambda batch: batch[1].numel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        train=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
    )
