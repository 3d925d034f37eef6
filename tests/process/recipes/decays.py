"""As tiny.py, with a learning rate that comes down to nothing at the end of the run."""

from dataclasses import replace

import tiny
import torch

import instep


def recipe() -> instep.Recipe:
    return replace(
        tiny.recipe(),
        scheduler=lambda optimizer, steps: torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: 1 - step / steps
        ),
    )
