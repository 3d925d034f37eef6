"""Targets of which some do not count, and models that can be told from one machine or not."""

import dataclasses
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import instep


def texts() -> instep.Recipe:
    """A Hugging Face model, of whose targets some do not count, which hardly learns."""
    from transformers import GPT2Config, GPT2LMHeadModel

    tokens = torch.randint(0, 20, (64, 12), generator=torch.Generator().manual_seed(3))
    samples = []
    for number, row in enumerate(tokens):
        labels = row.clone()
        labels[2 + number // 7 :] = -100
        samples.append({"input_ids": row, "labels": labels})
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=20, n_embd=8, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0)
    )
    return instep.Recipe(
        model=model,
        compute_loss=own_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-9),
        train=samples,
        validate=samples,
    )


def own_loss(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def recipe(ignored: int = 0, layer: str = "none") -> instep.Recipe:
    """The targets of the first `ignored` samples do not count."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(64, 6, generator=generator)
    labels = (inputs @ torch.randn(6, 3, generator=generator)).argmax(dim=1)
    labels[:ignored] = -100
    between = {"none": nn.Tanh(), "batch norm": nn.BatchNorm1d(16)}[layer]
    return instep.Recipe(
        model=nn.Sequential(nn.Linear(6, 16), between, nn.Linear(16, 3)),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=TensorDataset(inputs, labels),
        validate=TensorDataset(inputs, labels),
    )


class FirstTwice(Sampler[int]):
    """The first half of the samples, twice: no sampler of torch."""

    def __init__(self, samples: int) -> None:
        self._samples = samples

    def __len__(self) -> int:
        return self._samples // 2 * 2

    def __iter__(self) -> Iterator[int]:
        return chain(*(range(self._samples // 2) for _ in range(2)))


def sampled() -> instep.Recipe:
    """Some samples should be trained twice, and others never."""
    plain = recipe()
    sampler = FirstTwice(len(plain.train))
    return dataclasses.replace(plain, train=DataLoader(plain.train, 16, sampler=sampler))
