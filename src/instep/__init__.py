"""Train any PyTorch model across whatever machines there are, with the result of one machine.

The names below are all there is for a program to import. Each is loaded when
it is first used, so `import instep` alone does not import torch.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from instep.formats import INSTEP

if TYPE_CHECKING:
    from instep.client.join.joining import join
    from instep.client.join.session import Session
    from instep.client.submit import Run, resume, train
    from instep.errors import InstepError
    from instep.job.spec import JobSpec
    from instep.recipe.callbacks import Callback, CallbackContext
    from instep.recipe.optimizers.rowwise_adagrad import RowwiseAdagrad
    from instep.recipe.recipe import Recipe, Turn
    from instep.recipe.weights import WeightedLoss
    from instep.state.load import load_model

__version__ = INSTEP

# torch.cuda.is_available() asks NVML then, and not CUDA, which no fork could use afterwards
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

_HOME = {
    "Callback": "instep.recipe.callbacks",
    "CallbackContext": "instep.recipe.callbacks",
    "InstepError": "instep.errors",
    "JobSpec": "instep.job.spec",
    "Recipe": "instep.recipe.recipe",
    "RowwiseAdagrad": "instep.recipe.optimizers.rowwise_adagrad",
    "Run": "instep.client.submit",
    "Session": "instep.client.join.session",
    "Turn": "instep.recipe.recipe",
    "WeightedLoss": "instep.recipe.weights",
    "join": "instep.client.join.joining",
    "load_model": "instep.state.load",
    "resume": "instep.client.submit",
    "train": "instep.client.submit",
}

__all__ = [
    "Callback",
    "CallbackContext",
    "InstepError",
    "JobSpec",
    "Recipe",
    "RowwiseAdagrad",
    "Run",
    "Session",
    "Turn",
    "WeightedLoss",
    "join",
    "load_model",
    "resume",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'instep' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
