"""Private rounds: participants that are drawn, each clipped, and noise on their sum.

No loss of a participant or round is told to anybody: what a round publishes is its sum with noise.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from instep.engine.step.agreement import Weighed
from instep.privacy.secure.clipped import ClippedMean, Gift
from instep.worker.rounds.participant import Way, refuse_buffers
from instep.worker.rounds.rounds import Rounds


class PrivateRounds(Rounds):
    """How one worker computes the places of private rounds that it was dealt.

    Args:
        given, named: what `Rounds` takes; a `PrivateMean` among it.
        who: the participants at the places of a round, below 0 where there is none.
    """

    def __init__(self, *given: Any, who: Callable[[int], list[int]], **named: Any) -> None:
        super().__init__(*given, **named)
        self._who = who

    def _give(self, way: Way) -> dict[int, Weighed]:
        """Give the strategy how far a participant came; places all count the same."""
        passes, part = self._engine.passes, way.part
        passes.begin(part, 1.0, last=False, unit=way.participant)
        for slot, moved in enumerate(way.moved):
            if moved is not None and way.whole:
                passes.gradient(slot, moved)
        passes.end(part, part.size / self._engine.where.size)
        return {}

    def _of_all(self, clipped: ClippedMean, ways: Sequence[Way]) -> dict[int, Weighed]:
        """Tell whose parts are summed.

        Raises:
            RecipeError: a participant moved buffers, and these would be told.
        """
        since = time.perf_counter()
        self._activity.enter("exchange")
        refuse_buffers(ways, "[privacy]")
        here = {w.participant: Gift(w.whole, 0.0, w.size, w.moved) for w in ways if w.whole}
        clipped.figures(here)
        self._engine.clock.lap(since, "wire")
        return {way.part.number: Weighed(0.0, float(way.part.size)) for way in ways}
