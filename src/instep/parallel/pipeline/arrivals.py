"""Values that come to a stage, and what it has passed on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from instep.parallel.pipeline.absent import (
    Absent,
)
from instep.parallel.pipeline.draws import Key


class Arrival(NamedTuple):
    """One tensor that a stage needs from the stage before."""

    place: int
    """Among the leaves of the arguments of the stage's first block."""
    like: Absent
    """Its shape, type and device."""


Receive = Callable[[list[Arrival]], Sequence[Tensor]]
"""Gets the tensors that a stage needs, as new objects; they may be part of a graph. Called again
with the same where a pass is repeated."""


class Passed(NamedTuple):
    """A forward pass through one stage."""

    leaves: list[Any]
    """The leaves of the arguments of the next stage's first block; empty for the last stage."""
    result: Any
    """What the call returned; None for others than the last stage."""
    empty: bool = False
    """Nothing in the batch counts, so that the call did not call the model."""


class StageDone(BaseException):
    """The next stage's first block was called. Not an Exception: user's code must not catch it."""


class StagePass:
    """A forward pass that is under way."""

    def __init__(self, first: int, stop: int, key: Key, receive: Receive) -> None:
        self.first, self.stop, self.key, self.receive = first, stop, key, receive
        self.next = 0
        """Index of the block that is called next."""
        self.arrived: dict[int, tuple[Tensor, int]] = {}
        """By id, the tensors that came from the stage before, each with its version then."""
        self.sent: list[Any] = []

    def changed(self) -> bool:
        """Whether something that came was changed in place."""
        return any(tensor._version != version for tensor, version in self.arrived.values())
