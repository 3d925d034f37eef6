"""How the master's time is divided between messages and looks at the processes.

Pure: the time is given, and what is looked at is not known here. Way in: `Pacing`.
"""

from __future__ import annotations

MANY = 50
"""Connections above which messages gather, and every other heartbeat is acknowledged; with fewer,
each is answered at once."""

TICK_S = 0.1
"""How often the master looks at the time when no message arrives."""

TICK_EACH_S, LONGEST_TICK_S = 2e-4, 0.2
"""`TICK_S` with more than 500 connections, for each, and at most: a look at 1,000 processes takes
1.6 ms. `limits.LOOK_S` is longer."""

HURRIED_TICK_S = 0.01
"""`TICK_S` while a process that hangs is asked for its stack, or few workers have no connection."""

LOOK_EACH_S = 0.001
"""For each connection, how long only messages are handled after a look at all processes. It is at
most the tick. A look takes the longer the more there are; so its share of the time is the same."""

GATHER_EACH_S = 1e-5
"""For each connection, how long messages gather before they are read: to be woken for each of 5,000
heartbeats a second costs more than to handle it. Not where the last round brought many."""


class Pacing:
    """Says how long to wait for messages, and when to look."""

    def __init__(self) -> None:
        self._connections, self._tick_s = 0, TICK_S
        self._looked_at, self._unseen = 0.0, False  # whether a message has come since then
        self._read = 0  # messages in the last round

    def begin(self, connections: int, *, hurried: bool) -> float:
        """Begin a round with so many connections; how long its messages may gather first."""
        self._connections = connections
        tick_s = max(TICK_S, min(TICK_EACH_S * connections, LONGEST_TICK_S))
        self._tick_s = HURRIED_TICK_S if hurried else tick_s
        gathers = connections > MANY and self._read < connections / 10
        self._read = 0
        return GATHER_EACH_S * connections if gathers else 0.0

    def timeout_s(self, now: float) -> float:
        """How long to wait for a message."""
        return max(0.0, self._looked_at + self._pause_s - now)

    def note_message(self) -> None:
        """A message has come."""
        self._unseen = True
        self._read += 1

    def is_due(self, now: float) -> bool:
        """Whether to look now; then the next look is later."""
        if now - self._looked_at < self._pause_s:
            return False
        self._looked_at, self._unseen = now, False
        return True

    @property
    def _pause_s(self) -> float:
        """How long after a look the next one is."""
        if self._unseen:
            return min(self._tick_s, LOOK_EACH_S * self._connections)
        return self._tick_s
