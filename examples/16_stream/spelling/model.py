"""A network that reads bytes one after the other and says which comes next."""

from torch import Tensor, nn


class Speller(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(256, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.next = nn.Linear(width, 256)

    def forward(self, text: Tensor) -> Tensor:  # [batch, length] -> [batch, length, 256]
        seen, _ = self.memory(self.byte(text))
        return self.next(seen)
