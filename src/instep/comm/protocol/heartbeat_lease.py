"""A lease on membership in the run, which each acknowledged heartbeat renews.

It knows no connection. Way in: `connection.py:MasterConnection`, which has one.
"""

from __future__ import annotations

import time

import msgspec

from instep.comm.protocol.messages import Heartbeat

LEASE_S = 1.0
"""How long after an acknowledged heartbeat its sender is certainly still a member. It is less than
`limits.FLOOR_S`, after which the master may replace it. The difference allows for clocks that
differ, and for a pause between the check and the write."""


class HeartbeatLease:
    """The lease of a process between hosts; without `length_s` there is none."""

    def __init__(self) -> None:
        self.length_s: float | None = None
        self._answered_at = 0.0  # when the newest heartbeat that was answered was sent
        self._sent_at: dict[int, float] = {}  # of the heartbeats after that
        self._heartbeats = 0

    def begin(self, length_s: float) -> None:
        """From now on there is a lease, which is valid with the first acknowledgement."""
        self._answered_at, self.length_s = _now() - length_s, length_s

    @property
    def expired(self) -> bool:
        """Whether there is a lease, and no heartbeat of its last seconds was acknowledged."""
        return self.length_s is not None and _now() - self._answered_at > self.length_s

    def sent(self, heartbeat: Heartbeat) -> Heartbeat:
        """A heartbeat that is sent now, with its number if there is a lease."""
        if self.length_s is None:
            return heartbeat
        self._heartbeats += 1
        self._sent_at[self._heartbeats] = _now()
        return msgspec.structs.replace(heartbeat, number=self._heartbeats)

    def acknowledged(self, number: int) -> None:
        """Renew the lease: the master has the heartbeat of this number."""
        self._answered_at = self._sent_at.get(number, self._answered_at)
        self._sent_at = {n: at for n, at in self._sent_at.items() if n > number}

    def forget(self) -> None:
        """Forget heartbeats without an acknowledgement: their connection is lost."""
        self._sent_at.clear()


def _now() -> float:
    """Seconds of a clock that also runs while the machine sleeps, if there is one."""
    clock = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if clock is None else time.clock_gettime(clock)
