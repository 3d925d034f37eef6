"""Who watches the steps of a worker from beside them: the moments at which observers are called.

The engine gives each gradient to observers before the strategy has it, lets their
numbers travel with the notes, and commits only what none of them objects to. What they
look for, it does not know. Which there are stands in `observed.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from torch import Tensor, nn

from instep.comm.base import Comm
from instep.data.order import Position
from instep.engine.dealing import Speeds
from instep.engine.passes import Pass, Share
from instep.errors import Unrepeatable


class Observer(Protocol):
    """One worker's part in watching. The moments, in the order of a generation and of its steps.

    Raises:
        PeerError: from `judge` and `unrepeatable`: the step does not happen.
        WorkerError: from there and `passes_done`: this worker cannot continue.
    """

    @property
    def size(self) -> int:
        """How many numbers `notes` has in this generation."""

    def generation(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        """A group has formed. All that talks comes later."""

    def formed(self, *, anew: bool) -> None:
        """The generation stands, and all hold the same state.

        Args:
            anew: it is that of a beginning or of a checkpoint.

        Raises:
            PeerError: a member went away meanwhile.
        """

    def plan(
        self, planned: Iterator[tuple[Position, Share]], first: int, speeds: Speeds | None
    ) -> Iterator[tuple[Position, Share]]:
        """The steps from `first` on; passes that count nothing may be added."""

    def begin_step(self, step: int, where: Position) -> None:
        """A step begins, or begins once more."""

    def begin_pass(self, part: Pass) -> None:
        """The backward pass of `part` is about to run; none does where nothing in it counts."""

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """A gradient is complete, of this parameter; it is only to be read."""

    def end_pass(self, part: Pass) -> None:
        """The backward pass of `part` is over."""

    def passes_done(self) -> None:
        """This worker's passes of the step are over."""

    def notes(self) -> list[float]:
        """[size]: told to the others with the step, and summed."""

    def judge(self, notes: list[float]) -> None:
        """All have been told; parameters have not moved. Every worker comes to the same.

        Args:
            notes: of all, summed.
        """

    def unrepeatable(self, error: Unrepeatable) -> None:
        """All ran their passes again, and not all came to the same; every worker calls it."""

    def committed(self) -> None:
        """Parameters have moved, and stay as they are until the next step has its gradients."""

    def over(self) -> None:
        """The generation is over; a second call does nothing."""

    def go_back(self) -> bool:
        """Between generations: put this worker back at an earlier commit, if that is due.

        Returns:
            Whether it was.
        """
