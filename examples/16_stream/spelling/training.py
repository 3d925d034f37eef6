"""The recipe: what is trained, and on what."""

import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import instep

from .model import Speller
from .stream import Windows


def recipe(width: int = 64, length: int = 64, lr: float = 3e-3) -> instep.Recipe:
    """Python's own source, but for some files that it is tested on."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = Windows(files[::20], length)
    return instep.Recipe(
        model=Speller(width),
        loss=lambda outputs, target: F.cross_entropy(outputs.flatten(0, 1), target.flatten()),
        weight=lambda batch: batch[1].numel(),  # a mean over bytes
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        train=Windows([file for n, file in enumerate(files) if n % 20], length),
        validate=list(held_out)[::10],  # a stream has no length, a list has
        metrics={"bits_per_byte": bits_per_byte},
    )


def bits_per_byte(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), target.flatten()) / math.log(2)
