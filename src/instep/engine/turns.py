"""The updates of a step, where it has several.

Which is due, the engine knows; what their losses are, the recipe does.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from instep.data.order import key
from instep.engine.passes import OF_PASS
from instep.engine.skipping import scale_gradients
from instep.engine.slots import Split, give
from instep.engine.update import Update
from instep.job.spec import JobSpec
from instep.recipe.build import Built
from instep.sync.base import Strategy, strategy_of
from instep.sync.norm import squares


class TurnState:
    """What one update of a step needs on a worker, and how far it has got with a step.

    Args:
        name: empty where a step has one update.
        parameters: that it moves.
        update: moves them.
        strategy: how the workers agree on their gradients.
        number: among those of a step, from 0.
        split: how the parameters lie on the ranks of this replica; None where it is one rank.
    """

    def __init__(
        self,
        name: str,
        parameters: list[nn.Parameter],
        update: Update,
        strategy: Strategy,
        *,
        number: int = 0,
        split: Split | None = None,
    ) -> None:
        self.name, self.number, self.parameters = name, number, parameters
        self.update, self.strategy, self._split = update, strategy, split
        self.slots = parameters if split is None else split.slots(parameters)
        """What this rank has of each parameter; see `slots.py`."""
        self.holders = list[tuple[int, ...]](map(split.holders, parameters) if split else ())
        """Of each, on a mesh; see `Split`."""
        self._filled = self._handed_out = False

    def squares(self) -> float:
        """The sum of the squares of this rank's part of the gradient, as it lies in the slots."""
        assert self._split is not None, "a mesh"
        pairs = zip(self.slots, self.parameters, strict=True)
        gradients = [s.grad for s, p in pairs if s.grad is not None and self._split.counts(p)]
        return math.fsum(squares(gradients).tolist())

    def fill_slots(self) -> None:
        """Give each slot its agreed gradient, once."""
        if not self._filled:
            self.strategy.hand_out()
            self._filled = True

    def hand_out(self, scale: float, norm: float | None) -> None:
        """Give each parameter its agreed gradient, once.

        Args:
            scale: what it is multiplied by before.
            norm: of it, where other ranks have parts of it.
        """
        if self._handed_out:
            return
        self.fill_slots()
        if scale != 1.0:
            scale_gradients(self.slots, scale)
        self.give()
        self.update.known_norm = norm
        self._handed_out = True

    def give(self) -> None:
        """Give each parameter the gradient that its slot has."""
        if self._split is not None:
            give(self.slots, self.parameters)

    def forget(self) -> None:
        """Forget the gradients that were agreed on: they are used, or the step does not happen."""
        self._filled = self._handed_out = False


def make_turns(
    built: Built, job: JobSpec, scaler: torch.amp.GradScaler, split: Split | None
) -> list[TurnState]:
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
            number=number,
            split=split,
        )
        for number, turn in enumerate(built.turns)
    ]


def key_of_pass(seed: int, step: int, number: int, turn: int) -> int:
    """What the draws of a pass are keyed by; the first turn draws what a single update would."""
    return key(seed, OF_PASS, step, number, *((turn,) if turn else ()))
