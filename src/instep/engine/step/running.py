"""The passes of a step while they run: what each gives goes to observers, strategy and buffers.

What they compute is known to those that run them. Way in: `StepPasses`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import Tensor

from instep.engine.gradients import Gradients
from instep.engine.observers import Observer
from instep.engine.passes import Pass
from instep.engine.state.buffers import Buffers
from instep.engine.turns import TurnState
from instep.errors import WorkerError


class StepPasses:
    """Takes what a worker's passes give.

    Args:
        turns: the updates of a step.
        take: called with slot and gradient as each backward pass completes it; left out, all of
            them are the step's.
    """

    def __init__(
        self, turns: Sequence[TurnState], take: Callable[[int, Tensor], None] | None
    ) -> None:
        self._turns, self._turn, self._take = turns, turns[0], take or self.gradient
        self._gradients: list[Gradients] = []
        self._observers: Sequence[Observer] = ()
        self._to_strategy = True
        self._half_moved = False
        self._buffers: Buffers
        self.left_out = 0
        """Samples of this step that the user's collate left out."""

    @property
    def taken(self) -> int:
        """Gradients that the passes of this generation gave so far: a sign of life."""
        return sum(each.count for each in self._gradients)

    def start(self, buffers: Buffers, observers: Mapping[str, Observer]) -> None:
        """The steps of a generation are about to begin."""
        self._buffers, self._observers = buffers, list(observers.values())
        self._gradients = [Gradients(turn.slots, self._take) for turn in self._turns]

    def stop(self) -> None:
        """The generation is over."""
        gradients, self._gradients = self._gradients, []
        for each in gradients:
            each.close()

    def begin_step(self, turn: TurnState) -> None:
        """The passes of a turn are about to run, or to run once more."""
        self._turn, self.left_out = turn, 0
        self._buffers.begin_step()

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """A gradient is complete, of this parameter: observers see it, the strategy keeps it."""
        for observer in self._observers:
            observer.gradient(slot, gradient)
        if self._to_strategy:
            self._turn.strategy.gradient(slot, gradient)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Only observers see the gradients of passes that run meanwhile, and nothing of them stays.

        Nor does anything stay of what the step's own passes did to buffers: it is not to happen.
        """
        self._buffers.undo()
        self._to_strategy = False
        try:
            yield
        finally:
            self._to_strategy = True
            self._buffers.undo()

    def close(self) -> None:
        """No pass begins until `open`, nor ever again if that does not come: parameters move."""
        self._half_moved = True

    def open(self) -> None:
        """Parameters have moved."""
        self._half_moved = False

    def begin(self, part: Pass, weight: float, *, last: bool, unit: int | None = None) -> None:
        """A backward pass is about to run that counts `weight`, over the samples of the step.

        Raises:
            WorkerError: the last update raised, and the loop continues as if it had not.
        """
        if self._half_moved:
            raise WorkerError(
                "the optimizer or the scheduler raised in the middle of a step, and parameters may "
                "have moved in part: this process cannot go on. Let the error end the program; "
                "another takes up the last commit."
            )
        number = part.number if unit is None else unit
        self._turn.strategy.begin_pass(weight, last=last, unit=number)
        for observer in self._observers:
            observer.begin_pass(part)

    def end(self, part: Pass, share: float, *, beside: bool = False, left_out: int = 0) -> None:
        """It is over.

        Args:
            part: the pass.
            share: what it has of the samples; 0 where it was another's, repeated: then it
                leaves nothing.
            beside: whether it is one beside those that compute the samples.
            left_out: samples that it was dealt, and that the user's `collate` left out.
        """
        for observer in self._observers:
            observer.end_pass(part)
        self.left_out += left_out
        self._buffers.after_pass(share, part.number, beside=beside)

    def skip(self, part: Pass, share: float = 0.0, *, left_out: int = 0) -> None:
        """A forward pass was run in which no loss counts; buffers move by its samples too.

        Args:
            part, share, left_out: as for `end`; without a share it leaves nothing.
        """
        self.left_out += left_out
        self._buffers.after_pass(share, part.number)
