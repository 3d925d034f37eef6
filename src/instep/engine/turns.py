"""The updates of a step, where it has several.

Which is due, the engine knows; what their losses are, the recipe does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from instep.data.order import key
from instep.engine.passes import OF_PASS
from instep.engine.update import Update
from instep.job.spec import JobSpec
from instep.recipe.build import Built
from instep.sync.base import Strategy, strategy_of


class TurnState(NamedTuple):
    """What one update of a step needs on a worker."""

    name: str
    """Empty where a step has one update."""
    parameters: list[nn.Parameter]
    update: Update
    strategy: Strategy


def make_turns(built: Built, job: JobSpec, scaler: torch.amp.GradScaler) -> list[TurnState]:
    """Those of a recipe, in their order; none where a step has one update."""
    return [
        TurnState(
            turn.name,
            turn.parameters,
            Update(
                turn.optimizer,
                turn.scheduler,
                turn.parameters,
                seed=job.seed,
                max_grad_norm=job.train.max_grad_norm,
                measure=job.measures_norm,
                scaler=scaler,
                turn=number,
            ),
            strategy_of(job.sync, job.seed),
        )
        for number, turn in enumerate(built.turns)
    ]


def key_of_pass(seed: int, step: int, number: int, turn: int) -> int:
    """What the draws of a pass are keyed by; the first turn draws what a single update would."""
    return key(seed, OF_PASS, step, number, *((turn,) if turn else ()))
