"""As slow_tiny.py; each forward pass writes on how many threads it is computed, by process."""

import os
from pathlib import Path
from typing import Any

import slow_tiny
import torch
from torch import Tensor, nn

import instep


class Telling(nn.Module):
    def __init__(self, model: nn.Module, folder: Path) -> None:
        super().__init__()
        self.model, self.folder, self.told = model, folder, 0

    def forward(self, inputs: Tensor) -> Any:
        if torch.get_num_threads() != self.told:
            self.told = torch.get_num_threads()
            with (self.folder / str(os.getpid())).open("a") as file:
                file.write(f"{self.told}\n")
        return self.model(inputs)


def recipe(folder: str) -> instep.Recipe:
    made = slow_tiny.recipe()
    return instep.Recipe(
        model=Telling(made.model, Path(folder)),
        loss=made.loss,
        optimizer=made.optimizer,
        train=made.train,
    )
