"""A small model of linear layers in float64, of which some get adapters."""

import torch
from slow_tiny import Slow
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import instep

SAMPLES = 53


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        gate: Tensor = self.q_proj(x).sigmoid() * self.k_proj(x).tanh()
        return x + gate * self.v_proj(x)


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Linear(6, 16)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(16, 3)
        self.spare = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        for block in self.blocks:
            x = block(x)
        outputs: Tensor = self.head(self.dropout(x))
        return outputs


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return inputs, inputs.sin().cumsum(1)[:, :3]


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1),
}


def recipe(optimizer: str = "sgd", dropout: float = 0.0, pause_s: float = 0.0) -> instep.Recipe:
    train = TensorDataset(*data())
    return instep.Recipe(
        model=lambda: Net(dropout).double(),
        loss=nn.MSELoss(),
        optimizer=OPTIMIZERS[optimizer],
        train=Slow(train, pause_s) if pause_s else train,
        validate=train,
    )
