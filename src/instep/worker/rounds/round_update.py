"""How parameters move where there are rounds: in a participant's local steps, and at a round's end.

Who takes which steps, `rounds.py` knows.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor

from instep.data.order import key
from instep.engine.update import OF_UPDATE, Update, options_of
from instep.errors import RecipeError
from instep.job.spec import JobSpec
from instep.recipe.build import set_generators
from instep.sync.rounds.averaging import Averaging
from instep.sync.rounds.streaming import Streaming
from instep.worker.rounds.local_states import OPTIMIZER, LocalStates


def averaging(strategy: object) -> Averaging | Streaming:
    """The strategy of a run with rounds."""
    assert isinstance(strategy, Averaging | Streaming), "participants are averaged"
    return strategy


class RoundUpdate(Update):
    """Moves parameters in local steps, and at the end of a round by the mean of all of them.

    Args:
        job: says what a round is, and after which step they begin.
        advances: whether the scheduler takes a step with each local step; else nobody but the
            user's code advances it.
        given: what `Update` takes.
    """

    def __init__(self, *given: Any, job: JobSpec, advances: bool = True, **named: Any) -> None:
        super().__init__(*given, **named)
        self._job, self._advances = job, advances
        self.slots = self.parameters
        """What this rank has of the parameters."""
        self.local: LocalStates | None = None
        """What participants remember; None where they begin each round anew."""
        self.begin: list[Tensor] = []
        """The parameters of the round's beginning, while a participant takes its steps."""
        self.probe: Callable[[], Tensor | None] = lambda: None
        """What the model predicts where all participants do; None for nothing."""
        self.apart: Collection[int] = ()
        """Which of the slots stay with their participant."""
        self.mu = 0.0
        """How strongly participants are drawn back to these."""

    def keep(self, slot: int, gradient: Tensor) -> None:
        """Leave a gradient where the backward pass left it, for the local step."""
        self.slots[slot].grad = gradient

    @torch.no_grad()
    def apply(self, step: int) -> float | None:
        """End a round: take the agreed mean off the parameters of its beginning.

        The scheduler advances by the local steps of the round, as it did for each participant.
        Before the rounds, move by the agreed gradient, as where no participant has steps of its
        own; the state that the optimizer has then is what the first round begins with, if kept.
        """
        if step <= self._job.start_after:
            norm = super().apply(step)
            if step == self._job.start_after and not self._job.keeps_optimizers:
                self.optimizer.state = defaultdict(dict)
            return norm
        for slot in self.slots:
            if slot.grad is not None:
                slot.sub_(slot.grad)
        for _ in range(self._job.local_steps):
            self.advance()
        return None

    @torch.no_grad()
    def pull(self) -> bool:
        """Add the gradient of the proximal term to those that there are; whether there is one."""
        pairs = zip(self.slots, self.begin, strict=True) if self.mu else ()
        for slot, begin in (each for n, each in enumerate(pairs) if n not in self.apart):
            grad, apart = slot.grad, slot - begin
            if grad is not None and grad.is_sparse:  # of the rows that it has
                grad = grad.coalesce()
                slot.grad = grad + self.mu * apart.sparse_mask(grad)
            elif grad is not None:
                grad.add_(apart, alpha=self.mu)
        return bool(self.mu)

    def take_step(self, *number: int) -> None:
        """A local step, by the `.grad` of this participant alone; `number` is what is keyed by.

        Raises:
            RecipeError: the optimizer keeps in its groups what it has learnt, and is to be kept.
        """
        set_generators(key(self._seed, OF_UPDATE, *number))
        self.clip()
        groups = self.optimizer.param_groups
        kept = self.local is not None and OPTIMIZER in self.local.parts
        before = [options_of(group) for group in groups] if kept else []
        self.optimizer.step()
        self.drop_gradients()
        if before and before != [options_of(group) for group in groups]:
            raise RecipeError(
                f"the optimizer {type(self.optimizer).__name__} changes values of its param_groups "
                "in its step. They belong to all participants, so sync.options.local_optimizers = "
                "'kept' cannot keep them for one. Use 'reset', or another optimizer."
            )
        self.advance()

    def drop_gradients(self) -> None:
        """Of the local step."""
        for parameter in (*self.parameters, *self.slots):
            parameter.grad = None

    def advance(self) -> None:
        """The scheduler takes a local step; nothing else, if no sample counts in it."""
        if not self._advances:
            return
        with warnings.catch_warnings():  # of a worker that no participant has, or of its first
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step\\(\\)")
            super().advance()
