"""Groups of workers and their exchanges, as gloo's behave when members die, leave or are cut off.

An exchange is over for a member some time after all have contributed, for
each at its own time. A death in between breaks it for those who do not have
the result yet, so every prefix of members may have it.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from instep.errors import PeerError

from .engine import TIME, Process, Violation

Wait = Generator[float | None, None, Any]


class End:
    """One process's end of a group."""

    def __init__(self, process: Process, ends: dict[int, End]) -> None:
        self.process, self._ends = process, ends
        self.number = len(ends)
        ends[self.number] = self
        self._group: tuple[End, ...] = ()
        self._ops: dict[int, dict[End, Any]] = {}
        self._count = 0
        self._over = -1
        self._closed = self._broken = self._late = False
        process.at_death.append(self._dies)

    def connect(self, numbers: list[int], timeout_s: float) -> Wait:
        """Be in a group with these; PeerError where it takes too long."""
        self._group = tuple(self._ends[number] for number in numbers)
        engine = self.process.engine
        engine.after(timeout_s, self._give_up)
        for end in self._group:
            engine.after(engine.delay(), end.process.wake)
        while not all(self in end._group and self._reaches(end) for end in self._group):
            if self._late or self._broken:
                raise PeerError("the group did not form.")
            yield None
        first = self._group[0]
        self._ops = first._ops  # one for all
        if any(set(end._group) != set(self._group) for end in self._group):
            raise Violation("a group formed of members that see different groups")
        if any(end._closed for end in self._group):
            self._breaks()

    def _reaches(self, end: End) -> bool:
        engine = self.process.engine
        until = engine.cut_until(self.process, end.process)
        if until > TIME.now:
            engine.after(until - TIME.now, self.process.wake)
        return until <= TIME.now

    def _give_up(self) -> None:
        self._late = True
        self.process.wake()

    @property
    def processes(self) -> list[Process]:
        """Its members."""
        return [end.process for end in self._group]

    def exchange(self, tag: Any, value: Any = None) -> Wait:
        """Give something, get what each member has given, in rank order.

        Args:
            tag: what the exchange is about; all must agree.
            value: this member's.
        """
        if self._broken or self._closed:
            raise PeerError("another worker went away in the middle of a collective.")
        number, self._count = self._count, self._count + 1
        op = self._ops.setdefault(number, {})
        op[self] = tag, value
        if len(op) == len(self._group):
            if len({each for each, _ in op.values()}) > 1:
                said = {str(end.process): each for end, (each, _) in op.items()}
                raise Violation(f"members exchange different things: {said}")
            for end in self._group:
                end._complete_later(number)
        while self._over < number:
            if self._broken:
                raise PeerError("another worker went away in the middle of a collective.")
            yield None
        return [op[end][1] for end in self._group]

    def _complete_later(self, number: int) -> None:
        engine = self.process.engine
        heals = max(engine.cut_until(self.process, end.process) for end in self._group)
        engine.after(max(0.0, heals - TIME.now) + engine.delay(), self._complete, number)

    def _complete(self, number: int) -> None:
        if not self._broken and not self._closed and self.process.alive:
            self._over = max(self._over, number)
            self.process.wake()

    def interrupt(self) -> None:
        """End the sockets, from another thread."""
        if self._group and not self._closed:
            self._breaks()
            self._tell()

    def close(self) -> None:
        """Leave; who has all that it needs for the exchange under way still gets its result."""
        if not self._closed:
            self._closed = True
            for end in self._group:
                if end._count and len(self._ops.get(end._count - 1, ())) == len(self._group):
                    end._complete(end._count - 1)
            self._tell()

    def _dies(self) -> None:
        if not self._closed:
            self._closed = True
            self._tell()

    def _tell(self) -> None:
        engine = self.process.engine
        for end in self._group:
            if end is not self:
                heals = engine.cut_until(self.process, end.process)
                engine.after(max(0.0, heals - TIME.now) + engine.delay(), end._breaks)

    def _breaks(self) -> None:
        if self._group and not self._closed:
            self._broken = True
            self.process.wake()
