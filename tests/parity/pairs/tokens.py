"""Sequences of unequal length: a mean over tokens is not a mean over samples."""

from __future__ import annotations

import torch
from pair import Parts, pair, said, samples_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence

import instep
from pairs.common import gentle_adamw, lengths

PAD = 0


def sentences(longest=12):
    """Sequences of tokens above 0."""
    return [(torch.randint(1, 20, (size,)),) for size in lengths(longest, 2)]


def padded(samples):
    """Token ids, padded to the longest of the batch."""
    return {"tokens": pad_sequence([x for (x,) in samples], batch_first=True)}


class Reader(nn.Module):
    """Predicts the next token from those so far."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 8, padding_idx=PAD), nn.GRU(8, 16, batch_first=True)
        self.out = nn.Linear(16, 20)

    def forward(self, tokens):
        return self.out(self.rnn(self.embed(tokens))[0])


def count(batch):
    """Tokens that are predicted."""
    return float((batch["tokens"][:, 1:] != PAD).sum())


def total(model, batch):
    tokens = batch["tokens"]
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=PAD, reduction="sum")


def mean_over_tokens(model, batch):
    return total(model, batch) / count(batch)


def reader(**changes):
    given = {
        "model": Reader(),
        "train": sentences(),
        "collate": padded,
        "compute_loss": mean_over_tokens,
        "of": count,
        "optimizer": gentle_adamw,
    }
    return Parts(**{**given, **changes})


@pair("padded tokens, no weight", said("weight|loss"))
def bare():
    return reader()


@pair("padded tokens, Recipe.weight")
def weighed():
    return reader(given={"weight": count})


@pair("padded tokens, WeightedLoss")
def weighted_loss():
    def both(model, batch):
        return instep.WeightedLoss(total(model, batch), count(batch))

    return reader(given={"compute_loss": both})


@pair("padded tokens, WeightedLoss of a tensor")
def weighted_loss_of_tensor():
    def both(model, batch):
        return instep.WeightedLoss(total(model, batch), (batch["tokens"][:, 1:] != PAD).sum())

    return reader(given={"compute_loss": both})


@pair("padded tokens, weighed by samples (wrong)", said("weight|apart|gradient"))
def weighed_wrongly():
    return reader(given={"weight": samples_of})


@pair("padded tokens, weighed with the padding (wrong)", said("weight|apart|gradient"))
def weighed_with_padding():
    return reader(given={"weight": lambda batch: batch["tokens"][:, 1:].numel()})


@pair("a mean over each sequence, then over samples")
def mean_of_means():
    def loss(model, batch):
        tokens = batch["tokens"]
        logits = model(tokens[:, :-1]).transpose(1, 2)
        each = F.cross_entropy(logits, tokens[:, 1:], ignore_index=PAD, reduction="none")
        return (each.sum(1) / (tokens[:, 1:] != PAD).sum(1)).mean()

    return reader(compute_loss=loss, of=samples_of, given={"weight": samples_of})


@pair("token labels, CrossEntropyLoss over all of them")
def flat_tokens():
    """A loss of torch over flattened outputs counts targets, not samples."""

    class Flat(Reader):
        def forward(self, tokens):
            return super().forward(tokens).flatten(0, 1)

    def collate(samples):
        tokens = pad_sequence([x for (x,) in samples], batch_first=True)
        return tokens[:, :-1], tokens[:, 1:].flatten()

    return Parts(
        model=Flat(),
        train=sentences(),
        collate=collate,
        loss=nn.CrossEntropyLoss(ignore_index=PAD),
        optimizer=gentle_adamw,
    )


class LastState(nn.Module):
    """An LSTM over packed sequences; a class from its last state."""

    def __init__(self):
        super().__init__()
        self.embed, self.rnn = nn.Embedding(20, 8), nn.LSTM(8, 16, 2, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, given):
        tokens, sizes = given
        packed = pack_padded_sequence(
            self.embed(tokens), sizes.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.out(self.rnn(packed)[1][0][-1])


@pair("LSTM")
def lstm():
    def collate(samples):
        tokens = [x for (x,) in samples]
        sizes = torch.tensor([len(x) for x in tokens])
        target = torch.tensor([int(x.sum()) % 3 for x in tokens])
        return (pad_sequence(tokens, batch_first=True), sizes), target

    return Parts(
        model=LastState(),
        train=sentences(),
        collate=collate,
        loss=nn.CrossEntropyLoss(),
    )


class Pooled(nn.Module):
    """Mean over the sequence, with or without its padding."""

    def __init__(self, masked):
        super().__init__()
        self.embed, self.out, self.masked = nn.Embedding(20, 16), nn.Linear(16, 3), masked

    def forward(self, tokens):
        embedded = self.embed(tokens)
        if not self.masked:
            return self.out(embedded.mean(1))
        mask = (tokens != PAD).unsqueeze(2).to(embedded)
        return self.out((embedded * mask).sum(1) / mask.sum(1))


def pooled(masked):
    def collate(samples):
        target = torch.tensor([int(x.sum()) % 3 for (x,) in samples])
        return pad_sequence([x for (x,) in samples], batch_first=True), target

    return Parts(
        model=Pooled(masked),
        train=sentences(),
        collate=collate,
        loss=nn.CrossEntropyLoss(),
    )


@pair("mean pooling under a mask")
def under_mask():
    return pooled(True)


@pair("mean pooling over the padding", said("apart|micro-batch|gradient|samples"))
def over_padding():
    """What a sample is padded to depends on the longest of its batch."""
    return pooled(False)


class Encoder(nn.Module):
    """A transformer without dropout, masked where there is padding."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = nn.Embedding(20, 16), nn.Embedding(16, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.body, self.out = nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)

    def forward(self, tokens):
        mask = tokens == PAD
        x = self.embed(tokens) + self.place.weight[: tokens.shape[1]]
        x = self.body(x, src_key_padding_mask=mask)
        return self.out(x[:, 0])


@pair("transformer encoder with a padding mask")
def encoder():
    def collate(samples):
        target = torch.tensor([int(x[0]) % 3 for (x,) in samples])
        return pad_sequence([x for (x,) in samples], batch_first=True), target

    return Parts(
        model=Encoder(),
        train=sentences(),
        collate=collate,
        loss=nn.CrossEntropyLoss(),
        optimizer=gentle_adamw,
    )


def packed(samples):
    """All sequences in one row, and the number of each beside its tokens."""
    every = [x for (x,) in samples]
    numbers = [torch.full_like(x, number) for number, x in enumerate(every)]
    return {"tokens": torch.cat(every).unsqueeze(0), "documents": torch.cat(numbers).unsqueeze(0)}


class Within(nn.Module):
    """Predicts each token from the mean of those before it in its sequence."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, tokens, documents):
        seen = (documents.unsqueeze(2) == documents.unsqueeze(1)).tril(-1).to(self.embed.weight)
        return self.out(seen @ self.embed(tokens) / seen.sum(2, keepdim=True).clamp(min=1))


def mean_over_packed(model, batch):
    return F.cross_entropy(model(**batch).flatten(0, 1), batch["tokens"].flatten())


def packing(**changes):
    return Parts(
        model=Within(),
        train=sentences(),
        collate=packed,
        compute_loss=mean_over_packed,
        of=lambda batch: batch["tokens"].numel(),
        **changes,
    )


@pair("packed tokens, no weight", said("packs samples.*Recipe.weight can say"))
def packed_unweighed():
    return packing()


@pair("packed tokens, Recipe.weight")
def packed_weighed():
    return packing(given={"weight": lambda batch: batch["tokens"].numel()})
