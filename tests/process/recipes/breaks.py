"""One sample is marked, and whoever meets it breaks, in the place that is asked for.

Only one worker meets a sample, and in the second step: so it is one that
breaks, while the other waits for it in the middle of a collective.
"""

import os
import signal

import torch
from torch import Tensor, nn

import instep
from instep.data.order import Order

SAMPLES, BATCH, SEED = 640, 8, 0  # so many that what is tried before training leaves step 2 out
MARKED = int(Order(SAMPLES, SEED).indices(0, 2 * BATCH - 1, 2 * BATCH)[0])
"""The last sample of the second step: worker 1's, of two."""


def recipe(at: str) -> instep.Recipe:
    return instep.Recipe(
        model=Model(at),
        loss=Loss(at),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        train=Data(at, SAMPLES),
        validate=Data("", SAMPLES),
        metrics={"error": Metric(at)},
    )


class Data:
    def __init__(self, at: str, samples: int) -> None:
        self.at, self.samples = at, samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.at == "dataset" and index == MARKED:
            raise OSError("the dataset met the marked sample")
        mark = 1e6 if index == MARKED else 0.0
        return torch.tensor([1.0, float(index)]), torch.tensor([mark])


class Model(nn.Module):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.at = at
        self.linear = nn.Linear(2, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and (inputs[:, 1] == MARKED).any():
            self.meet()
        return self.linear(inputs / 100)

    def meet(self) -> None:
        match self.at:
            case "forward":
                raise ValueError("the forward pass met the marked sample")
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "exit":
                os._exit(3)
            case "hang":
                print("waiting for ever", flush=True)
                signal.pause()


class Loss:
    def __init__(self, at: str) -> None:
        self.at = at

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        if self.at == "loss" and torch.is_grad_enabled() and (target > 1e5).any():
            raise KeyError("the loss met the marked sample")
        return (outputs - target.clamp(max=1)).square().mean()


class Metric:
    def __init__(self, at: str) -> None:
        self.at = at

    def __call__(self, outputs: Tensor, target: Tensor) -> float:
        if self.at == "metric" and (target > 1e5).any():
            raise ZeroDivisionError("the metric met the marked sample")
        return 0.0
