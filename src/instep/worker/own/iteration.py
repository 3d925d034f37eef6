"""The present step of a user's own loop: the iterations that it has, and what became of it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from instep.data.loader import Skipped
from instep.engine.passes import Pass, Share
from instep.engine.state.committed import Commit
from instep.engine.step.agreement import Agreement, Weighed
from instep.errors import PeerError, SpecError

_ITERATIONS = itertools.count(1)


class Batch(NamedTuple):
    """A batch of the user's loader."""

    value: Any


class Iteration:
    """The present iteration of the user's loop."""

    def __init__(self, part: Pass, samples: int, *, last: bool) -> None:
        self.number = next(_ITERATIONS)
        self.part, self.samples, self.last = part, samples, last
        self.weight = 0.0 if part.repeats else float(samples)
        self.total = 0.0
        """Of the losses of its backward passes, each times the weight."""
        self.held = 0.0
        """Of those inside `no_sync`."""
        self.begun = self.computed = self.stepped = False


class OwnStep:
    """The step that the user's code is in.

    Args:
        each: whether the optimizer moves in each of its iterations, not in the last alone.
    """

    now: Iteration | None = None
    """The iteration that the user's code is in."""
    direct = False
    """Whether the optimizer is to move now, whichever code calls it."""
    held_back = False
    """Whether backward passes add to the gradient of the iteration, and do not end it."""

    def __init__(self, *, each: bool = False) -> None:
        self._each = each
        self.begin(Share([], 0, 0))

    def begin(self, share: Share) -> None:
        """Forget the step before; the iterations of this share are about to come."""
        self.share = share
        self.losses = dict[int, Weighed]()
        self.skipped = list[Skipped]()
        self.exchanged = False
        """Whether the workers were asked to agree on it."""
        self.agreed: Agreement | None = None
        self.committed: Commit | None = None
        self.apart: PeerError | None = None
        """Why the group came apart within an iteration."""

    def enter(self, iteration: Iteration) -> Iteration:
        """Hand this iteration to the user's code."""
        self.now = iteration
        return iteration

    def leave(self) -> None:
        """Take back the iteration.

        Raises:
            PeerError: the group came apart in it.
        """
        self.now = None
        if self.apart is not None:
            raise self.apart

    def iteration(self, what: str) -> Iteration:
        """Return the iteration in which the user's code calls `what`.

        Raises:
            SpecError: it is in none.
        """
        if self.now is None:
            raise SpecError(
                f"{what} was called outside an iteration of the session's loader, where no "
                "sample's gradient counts. Call it within the loop over the loader."
            )
        return self.now

    @property
    def users(self) -> int | None:
        """Number of the iteration, while it is the user's code that runs in it."""
        return None if self.now is None or self.direct else self.now.number

    @property
    def begun(self) -> bool:
        """Whether some of it has been computed, and it has not been committed."""
        begun = self.now is not None and (self.now.begun or bool(self.losses))
        return begun and self.committed is None

    @property
    def comes_again(self) -> bool:
        """Whether the gradients did not fit, and its passes will be run once more."""
        return self.exchanged and self.agreed is None

    @property
    def sync_gradients(self) -> bool:
        """Whether the gradient of this iteration is or will be agreed on, so that it may move."""
        if self._each:
            return self.now is not None
        return self.now is not None and self.now.last and not self.comes_again

    @property
    def moves(self) -> bool:
        """Whether the step's gradient is agreed on, so that the optimizer is to move."""
        return self.sync_gradients and self.agreed is not None

    # ---- what becomes of it

    def agree(self, ask: Callable[[], Agreement | None]) -> None:
        """Ask the workers to agree on it; nothing comes of that where it comes again.

        Raises:
            PeerError: a worker was lost.
        """
        self.exchanged = True
        self.agreed = ask()

    def commit(self, done: Commit) -> None:
        """Note that it counts."""
        self.committed = done

    def breaks(self, error: PeerError) -> None:
        """Note that the group came apart; the rest of the iteration does nothing."""
        self.apart, self.agreed = error, None

    @contextmanager
    def directly(self) -> Iterator[None]:
        """Let optimizer and scheduler do in this context what they did before they were taken."""
        self.direct = True
        try:
            yield
        finally:
            self.direct = False

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes in this context add to the iteration's gradient, and not end it."""
        self.held_back = True
        try:
            yield
        finally:
            self.held_back = False
