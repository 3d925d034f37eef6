"""Small models of many kinds for the tests of tensor plans; float64 unless said."""

import torch
from torch import nn
from torch.nn import functional as F

WIDTH, WORDS, LENGTH = 16, 24, 6


class Attention(nn.Module):
    """Stores its number of heads; key and value heads may be fewer; may normalise each head."""

    def __init__(self, width, heads=4, pairs=4, norm=False, dropout=0.0):
        super().__init__()
        each = width // heads
        self.heads, self.pairs, self.dropout = heads, pairs, dropout
        self.wq, self.wo = nn.Linear(width, width), nn.Linear(width, width)
        self.wk, self.wv = nn.Linear(width, pairs * each), nn.Linear(width, pairs * each)
        self.norm = nn.RMSNorm(each) if norm else nn.Identity()

    def forward(self, x):
        batch, length, _ = x.shape
        q = self.norm(self.wq(x).view(batch, length, self.heads, -1)).transpose(1, 2)
        k = self.norm(self.wk(x).view(batch, length, self.pairs, -1)).transpose(1, 2)
        v = self.wv(x).view(batch, length, self.pairs, -1).transpose(1, 2)
        made = F.scaled_dot_product_attention(
            q,
            k,
            v,
            is_causal=True,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.heads != self.pairs,
        )
        return self.wo(made.transpose(1, 2).reshape(batch, length, -1))


class Block(nn.Module):
    def __init__(self, width, dropout=0.0, **attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, dropout=dropout, **attention)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(self.dropout(F.gelu(self.up(self.norm2(x))))))


class GPT(nn.Module):
    def __init__(self, layers=2, tied=False, width=WIDTH, **block):
        super().__init__()
        self.embed, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, **block) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS, bias=False)
        self.dropout = nn.Dropout(block.get("dropout", 0.0))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.dropout(self.embed(ids) + self.places(torch.arange(ids.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def one_attention():
    """Its third block has the attention of the first: one module under two names."""
    model = GPT(layers=3)
    model.blocks[2].attention = model.blocks[0].attention
    return model


class LlamaBlock(nn.Module):
    """Rotated queries and keys, a gated perceptron; works on what its model hands over."""

    def __init__(self, width, heads, pairs):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = RotaryAttention(width, heads, pairs)
        self.mlp = GatedPerceptron(width)

    def forward(self, x, turns):
        x = x + self.attention(self.norm1(x), turns=turns)
        return x + self.mlp(self.norm2(x))


class RotaryAttention(nn.Module):
    def __init__(self, width, heads, pairs):
        super().__init__()
        self.each = width // heads
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, pairs * self.each, bias=False) for _ in range(2))

    def forward(self, x, turns):
        heads = (*x.shape[:2], -1, self.each)
        q, k, v = (each(x).view(heads).transpose(1, 2) for each in (self.wq, self.wk, self.wv))
        q, k = (torch.view_as_complex(each.unflatten(-1, (-1, 2)).contiguous()) for each in (q, k))
        q, k = (torch.view_as_real(each * turns).flatten(-2) for each in (q, k))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.wo(made.transpose(1, 2).flatten(2))


class GatedPerceptron(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, 3 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * width, width, bias=False)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Llama(nn.Module):
    def __init__(self, width=WIDTH, heads=4, pairs=2):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, width), nn.RMSNorm(width)
        self.layers = nn.ModuleList(LlamaBlock(width, heads, pairs) for _ in range(2))
        self.head = nn.Linear(width, WORDS, bias=False)
        self.each = width // heads

    def forward(self, ids):
        x = self.embed(ids)
        rates = 100.0 ** -torch.linspace(0, 1, self.each // 2, dtype=x.dtype)
        angles = torch.outer(torch.arange(ids.shape[1], dtype=x.dtype), rates)
        for layer in self.layers:
            x = layer(x, torch.polar(torch.ones_like(angles), angles))
        return self.head(self.norm(x))


class Fused(nn.Module):
    """One head whose query, key and value come from one layer; its other layers in a row."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.chain = nn.Sequential(
            *(each for n in range(4) for each in (nn.Linear(8, 8, bias=n != 1), nn.Tanh()))
        )

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + self.out((q @ k.transpose(-2, -1)).softmax(-1) @ v)
        return self.chain(F.layer_norm(x, (8,)))


class Gated(nn.Module):
    """A gated perceptron, an LSTM, and a convolution."""

    def __init__(self):
        super().__init__()
        self.conv, self.lstm = nn.Conv1d(4, 8, 3, padding=1), nn.LSTM(8, 8, batch_first=True)
        self.gate, self.up, self.down = nn.Linear(8, 32), nn.Linear(8, 32), nn.Linear(32, 8)
        self.out = nn.Linear(8, 3)

    def forward(self, x):
        x = self.lstm(self.conv(x).transpose(1, 2))[0]
        return self.out((x + self.down(F.silu(self.gate(x)) * self.up(x))).mean(1))


class Experts(nn.Module):
    """Samples go to one of three experts, which may get none; another reads a raw weight."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 8))
            for _ in range(3)
        )
        self.raw = nn.Linear(8, 8)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(1).max(1)
        out = x @ self.raw.weight
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weights[rows].unsqueeze(1))
        return out


class Table(nn.Module):
    """An embedding with sparse gradients, and a perceptron."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(30, 16, sparse=True)
        self.body = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))

    def forward(self, ids):
        return self.body(self.table(ids))


class Encoder(nn.Module):
    """torch's own layers, whose attention packs its weights."""

    def __init__(self, first=True):
        super().__init__()
        self.embed, self.first = nn.Embedding(WORDS, WIDTH, padding_idx=0), first
        layer = nn.TransformerEncoderLayer(WIDTH, 4, dim_feedforward=64, batch_first=first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=first)

    def forward(self, ids):
        x, padded = self.embed(ids), ids == 0
        if not self.first:  # the sequence comes before the batch
            return self.encoder(x.transpose(0, 1), src_key_padding_mask=padded).mean(0)
        return self.encoder(x, src_key_padding_mask=padded).mean(1)


def next_word(model, ids):
    logits = model(ids)
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def squares(model, x):
    return model(x).square().mean()


def words(rows=4, length=LENGTH):
    return torch.randint(1, WORDS, (rows, length))


def of_some_length():
    return words(length=int(torch.randint(3, LENGTH + 1, ())))


MODELS = {
    "GPT": (GPT, next_word, words),
    "tied": (lambda: GPT(tied=True), next_word, words),
    "dropout": (lambda: GPT(dropout=0.2), next_word, words),
    "grouped": (lambda: GPT(pairs=2, norm=True), next_word, words),
    "one attention": (one_attention, next_word, words),
    "llama": (Llama, next_word, words),
    "odd heads": (lambda: GPT(width=24, layers=1), next_word, words),
    "fused": (Fused, squares, lambda: torch.randn(3, 5, 8)),
    "gated": (Gated, squares, lambda: torch.randn(5, 4, 7)),
    "experts": (Experts, squares, lambda: torch.randn(12, 8)),
    "sparse": (Table, squares, lambda: torch.randint(0, 30, (6, 2))),
    "encoder": (Encoder, squares, lambda: words().masked_fill(torch.rand(4, LENGTH) < 0.2, 0)),
}
"""Name to how the model is built, its loss from model and batch, and a batch."""

SEQUENCES = {
    "time first": (lambda: Encoder(first=False), squares, words),
    "lengths": (lambda: GPT(dropout=0.2), next_word, of_some_length),
    "odd lengths": (lambda: GPT(width=24, dropout=0.2), next_word, of_some_length),
}
"""The same, for tests of sequences."""


def made(name, dtype=torch.float64):
    """A model from a fixed seed, its loss, and four batches."""
    torch.manual_seed(11)
    build, compute_loss, batch = {**MODELS, **SEQUENCES}[name]
    batches = [batch() for _ in range(4)]
    batches = [each.to(dtype) if each.is_floating_point() else each for each in batches]
    return build().to(dtype), compute_loss, batches
