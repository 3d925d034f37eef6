"""Where the time of a step goes."""

from __future__ import annotations

import time
from dataclasses import dataclass


@dataclass(slots=True)
class Clock:
    """Where the time of a step went so far, seconds; the fields of `events.STEPS`, in order."""

    begin: float = 0.0
    load: float = 0.0
    forward: float = 0.0
    backward: float = 0.0
    wait: float = 0.0
    wire: float = 0.0
    update: float = 0.0
    save: float = 0.0

    @property
    def parts(self) -> tuple[float, ...]:
        """All of them, in order; none is negative."""
        parts = (
            self.load, self.forward, self.backward, self.wait, self.wire, self.update, self.save
        )  # fmt: skip
        if min(parts) >= 0.0:
            return self.begin, *parts
        return self.begin, *(max(0.0, part) for part in parts)

    @property
    def computing(self) -> float:
        """What the passes took so far, without waiting for other workers."""
        return self.load + self.forward + self.backward

    def lap(self, since: float, part: str, waited: float = 0.0) -> float:
        """Add the time since `since` (of `perf_counter`) to a part, but to `wait` what was spent
        waiting for other workers meanwhile; returns the time now."""
        now = time.perf_counter()
        setattr(self, part, getattr(self, part) + now - since - waited)
        self.wait += waited
        return now

    def exchanged(self, took: float, waited: float) -> None:
        """Add seconds of an exchange, which waited for other workers for all of them at most."""
        waited = min(waited, took)
        self.wait += waited
        self.wire += took - waited
