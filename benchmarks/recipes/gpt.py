"""A GPT of 10 million parameters on made-up bytes: a step of about a second on two cores."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import instep


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).view(samples, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, length, width))
        result: Tensor = x + self.mlp(self.before_mlp(x))
        return result


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.place = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        result: Tensor = self.head(self.norm(self.blocks(self.token(tokens) + self.place(places))))
        return result


def recipe(
    layers: int = 8, width: int = 320, heads: int = 5, length: int = 128, samples: int = 2000
) -> instep.Recipe:
    tokens = torch.randint(256, (samples, length + 1))
    return instep.Recipe(
        model=GPT(layers, width, heads, length),
        loss=lambda logits, target: F.cross_entropy(logits.flatten(0, 1), target.flatten()),
        weight=lambda batch: batch[1].numel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4),
        train=TensorDataset(tokens[:, :-1], tokens[:, 1:]),
    )
