"""How work is dealt to workers of different speeds: who is slow gets less, and stays.

Each worker tells, with every step, how long it computed. So all hold the same
figures, run this same policy on them, and deal alike without a master. Pure:
no clock, no messages. How so many micro-batches are dealt at given speeds is
`data/dealing.py`; what a micro-batch holds never depends on it.

Equal workers must keep the even deal however their times scatter. So another
deal is proposed by the steps of one window, and made only if every step
of the next would have been shorter with it, by enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

from instep.data.dealing import deal

WINDOW = 8
"""Steps from which speeds are taken."""

MARGIN = 0.05
"""What share of a window's time another deal must save."""

FEW, FEW_S, LARGE = 3, 0.5, 0.25
"""So few steps are enough where they took so long, and so large a share is saved."""

LEAST_S = 1e-3
"""And how much of a step; where that is all there is, the system's own hitches are what is seen."""

TRIAL = 2
"""Steps in which a worker that has no work is tried again."""

TRIAL_SHARE = 0.02
"""How much longer trials may make training."""

PAUSE = 4 * WINDOW
"""Steps between trials, at least."""

Speeds = tuple[float, ...]
"""Micro-batches per second of each rank."""


class Dealing:
    """Decides how the micro-batches of the next step are dealt.

    Args:
        workers: of this generation, by rank.
        by_speed: False deals evenly for ever.
        counts_of: how many of so many micro-batches each worker is dealt at such speeds, where not
            by `data.dealing.deal`; without speeds this is what counts as even.
    """

    speeds: Speeds | None
    """Given to `data.dealing.deal` for the next step; None for the even deal."""

    def __init__(
        self,
        workers: int,
        *,
        by_speed: bool = True,
        counts_of: Callable[[int, Speeds | None], list[int]] | None = None,
    ) -> None:
        self._workers = workers
        self.watches = by_speed and workers > 1
        """Whether `after_step` may ever deal otherwise."""
        self._counts_of = counts_of
        self._costs = [math.nan] * workers  # seconds of a micro-batch, as last known
        self._parts = 0  # micro-batches of the largest step so far
        self._trials = [0] * workers
        self._tried: int | None = None  # who is being tried again
        self._untried: Speeds | None = None
        self._deal(None)

    def _deal(self, speeds: Speeds | None) -> None:
        """Deal so from the next step on."""
        self.speeds = self._proposed = speeds
        self._before: list[list[float]] = []
        self._begin_window()
        self._first = True
        self._idle = 0

    def _begin_window(self) -> None:
        self._window: list[list[float]] = []
        self._window_s, self._looked = 0.0, False

    def after_step(self, seconds: Sequence[float], samples: Sequence[int], parts: int) -> str:
        """Take in a committed step; must be told the same on every rank.

        Args:
            seconds: [workers] that each computed, without waiting for others.
            samples: [workers] that each computed.
            parts: micro-batches of the step.

        Returns:
            Why another deal holds from now on, in a word; empty where none does.
        """
        if not self.watches:
            return ""
        if self._first:  # of a process, or with batches that nobody had read ahead
            self._first = False
            return ""
        size = sum(samples) / parts
        self._parts = max(self._parts, parts)
        self._idle += 1
        self._window.append(
            [_cost(each, n, size) for each, n in zip(seconds, samples, strict=True)]
        )
        if self._tried is not None:
            return self._judge_trial(self._tried)
        self._window_s += max(seconds)
        if self._is_time() and self._decide():
            return "speed"
        return "trial" if self._try_again() else ""

    def counts(self, speeds: Speeds | None) -> list[int]:
        """How many of the micro-batches of a whole step each rank gets at such speeds."""
        if self._counts_of is not None:
            return self._counts_of(self._parts, speeds)
        return [len(share) for share in deal(self._parts, self._workers, speeds)]

    # ---- by what was measured

    def _is_time(self) -> bool:
        """At the end of a window, and once before it, when its few steps say enough."""
        few = len(self._window) >= FEW and self._window_s >= FEW_S
        looks, self._looked = few and not self._looked, self._looked or few
        return looks or len(self._window) == WINDOW

    def _decide(self) -> bool:
        """Deal as the window before proposed, or propose."""
        before, window = self._before, self._window
        whole = len(window) == WINDOW
        costs, margin = self._costs, MARGIN if whole else LARGE
        self._costs = self._known(window)
        if self._saves(self._proposed, window, margin):
            present = self.counts(self.speeds)
            self._costs = self._known([*before, *window])
            self._deal(self._best())
            return self.counts(self.speeds) != present
        best = self._best()
        if whole or self._saves(best, window, margin):
            self._begin_window()
            self._before, self._proposed = window, best
        else:
            self._costs = costs  # the window continues
        return False

    def _known(self, steps: list[list[float]]) -> list[float]:
        """The usual cost of each rank in some steps."""
        return [_middle(of_one, old) for *of_one, old in zip(*steps, self._costs, strict=True)]

    def _saves(self, speeds: Speeds | None, window: list[list[float]], margin: float) -> bool:
        """Whether each step of the window would have been shorter if dealt so, and by enough."""
        now, then = self.counts(self.speeds), self.counts(speeds)
        costs = [list(map(_or, step, self._costs)) for step in window]
        whole = [_time(now, each) for each in costs]
        saved = [before - _time(then, each) for before, each in zip(whole, costs, strict=True)]
        enough = max(margin * sum(whole), LEAST_S * len(window))
        return min(saved) > 0 and sum(saved) >= enough

    def _best(self) -> Speeds | None:
        """The speeds as they are known; None where the even deal is as good."""
        if any(map(math.isnan, self._costs)):
            return self.speeds
        speeds = tuple(1 / cost for cost in self._costs)
        best, even = (_time(self.counts(each), self._costs) for each in (speeds, None))
        return None if even * (1 - MARGIN) <= best else speeds

    # ---- a worker without work may have recovered

    def _try_again(self) -> bool:
        """Where it is time, deal one micro-batch to a worker that has none."""
        if self.speeds is None or self._idle < PAUSE:
            return False
        counts = self.counts(self.speeds)
        idle = [rank for rank, count in enumerate(counts) if not count]
        if not idle:
            return False
        rank = min(idle, key=lambda each: (self._trials[each], each))
        step_s = _time(counts, self._costs)
        longer_s = (TRIAL + 1) * max(0.0, self._costs[rank] - step_s)
        if longer_s > TRIAL_SHARE * step_s * self._idle:
            return False
        self._untried, self._tried = self.speeds, rank
        self._trials[rank] += 1
        done = max(count / speed for count, speed in zip(counts, self.speeds, strict=True))
        enough = 1 / (0.9 * done)  # to be dealt one micro-batch, and not two
        self._deal((*self.speeds[:rank], enough, *self.speeds[rank + 1 :]))
        return True

    def _judge_trial(self, rank: int) -> str:
        measured = [step[rank] for step in self._window if not math.isnan(step[rank])]
        if len(measured) < TRIAL:
            return ""
        self._tried = None
        self._costs[rank] = min(measured)  # it may have had to wake up
        best = self._best()
        self._deal(best if self.counts(best)[rank] else self._untried)
        return "speed"


def _cost(seconds: float, samples: int, size: float) -> float:
    """Seconds of a micro-batch of `size` samples, by those of so many; NaN without any."""
    return seconds * size / samples if samples and seconds > 0 else math.nan


def _or(new: float, old: float) -> float:
    return old if math.isnan(new) else new


def _middle(measured: Sequence[float], old: float) -> float:
    known = [each for each in measured if not math.isnan(each)]
    return median(known) if known else old


def _time(counts: Sequence[int], costs: Sequence[float]) -> float:
    """Seconds until the last worker is done."""
    return max(n * cost if n else 0.0 for n, cost in zip(counts, costs, strict=True))
