"""The same work for every rival: a recipe's model, optimizer, loss, and shares of its batches.

Written as cheaply as can be: a worker's samples are rows of tensors in memory,
so that no data loader stands between a rival and its next step.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BENCHMARKS = Path(__file__).resolve().parent.parent
SEED = 7


class Work:
    """The MLP of `recipes/mlp.py`, or another recipe there, equal in every process.

    Args:
        global_batch: a multiple of `workers`.
        recipe: the name of its file.
        seed: of the parameters and of the order.
        arguments: of its function.
    """

    def __init__(
        self,
        global_batch: int,
        workers: int,
        rank: int,
        recipe: str = "mlp",
        seed: int = SEED,
        **arguments: Any,
    ) -> None:
        sys.path.append(str(BENCHMARKS / "recipes"))
        torch.set_num_threads(1)
        torch.manual_seed(seed)
        self._seed = seed
        self.recipe = importlib.import_module(recipe).recipe(**arguments)
        self.model, self.loss = self.recipe.model, self.recipe.loss
        self._tensors = self.recipe.train.tensors
        self._global_batch, self._share, self._rank = global_batch, global_batch // workers, rank
        self._epoch, self._order = -1, torch.empty(0)

    def batch(self, step: int) -> tuple[Tensor, ...]:
        """This worker's samples of a step, which counts from 1."""
        samples = len(self._tensors[0])
        first = (step - 1) * self._global_batch + self._rank * self._share
        if self._epoch != (epoch := first // samples):
            generator = torch.Generator().manual_seed(self._seed + epoch)
            self._epoch, self._order = epoch, torch.randperm(samples, generator=generator)
        rows = self._order[torch.arange(first, first + self._share) % samples]
        return tuple(tensor[rows] for tensor in self._tensors)


def arguments(description: str) -> argparse.ArgumentParser:
    """What every rival's program takes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, required=True, help="for records")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--global-batch", type=int, default=126)
    return parser
