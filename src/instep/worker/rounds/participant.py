"""A participant while it takes its local steps, and what is left of it then: how far it came.

What it moved is put back. How many steps it takes, and what becomes of what it gives, `rounds.py`
knows.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.data.loader import Skipped, Slice
from instep.data.order import micro_batch
from instep.engine.passes import Pass
from instep.engine.state.buffers import Buffers
from instep.errors import RecipeError
from instep.worker.rounds.round_update import RoundUpdate


class Way(NamedTuple):
    """A participant that is computed: all that the round needs of it."""

    part: Pass
    participant: int
    """Its number, among all of the job."""
    total: float
    """Of its losses, as far as this rank computed them."""
    weight: float
    """What these are a mean of."""
    whole: float
    """What the losses of all ranks that compute it are a mean of."""
    size: float
    skipped: list[Skipped]
    moved: list[Tensor | None]
    """How far its parameters came, backwards; before the rounds, their gradients."""
    buffers: dict[int, Tensor]
    """That it moved, as `Buffers` numbers them."""
    predicted: Tensor | None
    """What it predicts where all do, if they do."""
    remembers: dict[str, Tensor]
    """What it does, as `LocalStates` packs it; empty where it begins each round anew."""


class Participant:
    """A participant while its local steps are taken.

    All participants of a worker have the same parameters, optimizer and scheduler, one after
    the other. What one has moved is put back when the context is left.

    Args:
        update: has them.
        part: what the participant computes.
        number: the participant's, among all of the job.
        early: whether it gives its gradient, as all take the step together.
    """

    def __init__(
        self, update: RoundUpdate, part: Pass, number: int, *, early: bool = False
    ) -> None:
        self._update, self.part, self.number, self.early = update, part, number, early
        self.total = self.weight = self.whole = self.size = 0.0
        self.skipped: list[Skipped] = []
        optimizer, scheduler = update.optimizer, update.scheduler
        self.begin = update.begin = [slot.detach().clone() for slot in update.slots]
        self._groups = [
            {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        self._schedule = copy.deepcopy(scheduler.state_dict()) if scheduler is not None else None
        self._state = optimizer.state
        self._over = False
        optimizer.state = defaultdict(
            dict, {of: copy.deepcopy(kept) for of, kept in self._state.items()}
        )
        if update.local is not None and not early:
            update.local.resume(number)

    def count(self, total: float, weight: float, samples: int = 0) -> None:
        """Count a local step: the total of its loss, and how much that is a mean of."""
        self.total += total
        self.weight += weight
        self.whole += weight
        self.size += samples

    def way(self, buffers: Buffers) -> Way:
        """How far it has come, before what it moved is put back.

        Args:
            buffers: of the model. What it did to them is left for the engine to see.
        """
        local, slots = self._update.local, self._update.slots
        counted = self.total, self.weight, self.whole, self.size, self.skipped
        if self.early:
            gradients = [slot.grad for slot in slots]
            moved_by_pass = buffers.moved_by_pass()
            return Way(self.part, self.number, *counted, gradients, moved_by_pass, None, {})
        moved: list[Tensor | None] = [
            torch.sub(before, slot.detach()) for before, slot in zip(self.begin, slots, strict=True)
        ]
        remembers = local.pack() if local is not None else {}
        predicted = self._update.probe()
        return Way(
            self.part, self.number, *counted, moved, buffers.moved_by_pass(), predicted, remembers
        )

    def put_back(self) -> None:
        """All but the buffers is as at the round's beginning; a second call does nothing."""
        if self._over:
            return
        self._over, optimizer = True, self._update.optimizer
        with torch.no_grad():
            for slot, value in zip(self._update.slots, self.begin, strict=True):
                slot.copy_(value)
        self._update.drop_gradients()
        self._update.begin = []
        optimizer.state = self._state
        for group, kept in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(kept)
        if self._schedule is not None:
            self._update.scheduler.load_state_dict(self._schedule)

    def __enter__(self) -> Participant:
        return self

    def __exit__(self, *_: object) -> None:
        self.put_back()


def refuse_buffers(ways: Sequence[Way], setting: str) -> None:
    """Refuse buffers that participants moved, which would be told as they are.

    Raises:
        RecipeError: one did.
    """
    if any(way.buffers for way in ways):
        raise RecipeError(
            f"{setting}: a buffer of the model changes in a forward pass (running statistics of "
            "BatchNorm), and is averaged in the open. Use GroupNorm or LayerNorm."
        )


def local_steps_of(part: Pass, local_steps: int, least: int = 0) -> Iterator[tuple[int, Slice]]:
    """Number and samples of a participant's local steps; those without samples are left out.

    Where it has less than in a whole round, there are fewer steps than ones with `least` samples.
    """
    epoch, first, stop = part.samples
    if least:
        local_steps = min(local_steps, -(-part.size // least))
    for number in range(local_steps):
        low, high = micro_batch(first, stop, number, local_steps)
        if high > low:
            yield number, Slice(epoch, low, high)
