"""A sample that ends the process which reads it, one that never ends, or a model that dies."""

import ctypes
import os
import signal
from pathlib import Path
from typing import Any

import tiny
import torch
from first_come import first
from torch import Tensor, nn

import instep
from instep.data.order import Order, key

SAMPLES, BATCH, SEED = 1024, 16, 5  # so many that what is tried before training leaves out
MARKED = int(Order(SAMPLES, SEED).indices(0, 11 * BATCH + 5, 11 * BATCH + 6)[0])
"""In the middle of step 12."""

OF_STEP_8 = int(Order(SAMPLES, SEED).indices(0, 7 * BATCH, 7 * BATCH + 1)[0])
"""The first of step 8."""

KNOWN_BY = int(Order(SAMPLES, key(SEED, 5)).indices(0, 20, 21)[0])
"""Read when the run begins, as one of those by which the dataset is known again."""

FIRST = int(Order(SAMPLES, SEED).indices(0, 1, 2)[0])
"""In the first micro-batch of step 1: read where it is tried what cutting a batch changes."""


def recipe(how: str, at: str = "dataset", marked: int = MARKED) -> instep.Recipe:
    """Who meets the marked sample, or computes step 8, does as `how` says."""
    made = tiny.recipe()
    inputs, target = torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 3
    inputs[:, 0] = torch.arange(SAMPLES)
    model = Model(made.model, how) if at == "model" else made.model
    return instep.Recipe(
        model=model,
        loss=made.loss,
        optimizer=made.optimizer,
        train=Data(inputs, target, how if at == "dataset" else "", marked),
    )


class Data:
    def __init__(self, inputs: Tensor, target: Tensor, how: str, marked: int) -> None:
        self.inputs, self.target, self.how, self.marked = inputs, target, how, marked
        self.files = [f"pictures/img_{index}.png" for index in range(len(inputs))]

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        if index == self.marked and self.how:
            meet(self.how)
        return self.inputs[index], self.target[index]


class Model(nn.Module):
    def __init__(self, inner: nn.Module, how: str) -> None:
        super().__init__()
        self.inner, self.how = inner, how

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and (inputs[:, 0] == OF_STEP_8).any():
            meet(self.how)
        outputs: Tensor = self.inner(inputs / SAMPLES)
        return outputs


def meet(how: str) -> None:
    match how:
        case "segfault":
            ctypes.string_at(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
            signal.pause()  # it may come to another thread, a moment later
        case "exit":
            os._exit(3)  # as native code does that calls exit()
        case "loops":
            count = 0
            while True:
                count += 1
        case _:  # a file: loops, and only once
            if first(Path(how)):
                meet("loops")
