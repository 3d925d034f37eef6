"""What a server takes for known before all workers have told it.

It knows no parameters and no messages: what is compared are lists and numbers. Way in:
`Guess.counts` before a step, `Guess.compare` after it.
"""

from __future__ import annotations

from collections.abc import Sequence


class Guess:
    """That a step is like the one before it, as far as it matters to who moves parameters early.

    The same parameters have a gradient, it is finite, and it needs the same scale. After a wrong
    guess twice as many steps as the last time have none: moving in vain costs time.
    """

    def __init__(self) -> None:
        self.there: Sequence[bool] = ()
        """Which parameters have a gradient; empty where nothing is guessed."""
        self.scale = 1.0
        self._wrong = 0
        self._next = 0

    def counts(self, step: int) -> bool:
        """Whether there is a guess for a step."""
        return bool(self.there) and step >= self._next

    def compare(self, step: int, there: Sequence[bool], scale: float, *, used: bool) -> bool:
        """Whether the guess was right; the next one is that all is as in this step.

        Args:
            step: its number.
            there: as it was; empty where it is not to be guessed from.
            scale: as it was.
            used: whether parameters were moved by the guess.
        """
        right = bool(there) and (there, scale) == (self.there, self.scale)
        if used and not right:
            self._wrong += 1
            self._next = step + 2**self._wrong
        self.there, self.scale = there, scale
        return right
