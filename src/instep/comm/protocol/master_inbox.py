"""Messages of the master that have arrived, until this process takes them.

It knows neither the connection nor what messages mean. Way in: `connection.py:MasterConnection`,
which has one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, overload

from instep.comm.protocol.messages import AnyMessage
from instep.errors import PeerError

One = TypeVar("One", bound=AnyMessage)
Other = TypeVar("Other", bound=AnyMessage)
Third = TypeVar("Third", bound=AnyMessage)


class MasterInbox:
    """Messages that have arrived, in their order; of those that are not wanted none is lost.

    `poll`, `look` and `wait_for` get classes of messages, or none for a message of any class. They
    raise PeerError if there is no such message, and no master any more.

    Args:
        take_in: reads the connection and calls `add`; waits so many seconds, or without end (None).
    """

    def __init__(self, take_in: Callable[[float | None], object]) -> None:
        self._take_in = take_in
        self._messages: deque[AnyMessage] = deque()
        self.arrived = threading.Condition()
        """Notified of what arrives, and if the lease or the master is lost or found."""
        self.gone: PeerError | None = None
        """Why there is no master any more; if there is none."""
        self.thread: threading.Thread | None = None
        """Takes in while the process is busy; without one, the caller that wants a message does."""

    def add(self, messages: Iterable[AnyMessage]) -> None:
        """Add messages that have arrived, and wake who waits."""
        with self.arrived:
            self._messages.extend(messages)
            self.arrived.notify_all()

    def put_back(self, message: AnyMessage) -> None:
        """Put a message back, before all others."""
        with self.arrived:
            self._messages.appendleft(message)
            self.arrived.notify_all()

    def poll(self, *wanted: type[Any]) -> Any:
        """The first wanted message that has arrived, without waiting; None if there is none."""
        if self.thread is None:
            self._take_in(0.0)
        with self.arrived:
            return self._first(wanted)

    def look(self, timeout_s: float, *wanted: type[Any]) -> Any:
        """The first wanted message, if it arrives within a time; only without `thread`."""
        if (message := self._found(wanted)) is None:
            self._take_in(timeout_s)
            message = self._first(wanted)
        return message

    @overload
    def wait_for(self) -> AnyMessage: ...
    @overload
    def wait_for(self, one: type[One], /) -> One: ...
    @overload
    def wait_for(self, one: type[One], other: type[Other], /) -> One | Other: ...
    @overload
    def wait_for(
        self, one: type[One], other: type[Other], third: type[Third], /
    ) -> One | Other | Third: ...
    def wait_for(self, *wanted: type[Any]) -> Any:
        """The first wanted message; waits for it."""
        with self.arrived:
            while (message := self._first(wanted)) is None:
                self.wait(None)
            return message

    def wait(self, timeout_s: float | None) -> None:
        """Wait until something arrives, at most for a time; called with the lock of `arrived`."""
        if self.thread is None:
            self._take_in(timeout_s)
        else:
            self.arrived.wait(timeout_s)

    def _first(self, wanted: tuple[type[Any], ...]) -> Any:
        message = self._found(wanted)
        if message is None and self.gone is not None:
            raise self.gone
        return message

    def _found(self, wanted: tuple[type[Any], ...]) -> Any:
        for place, message in enumerate(self._messages):
            if isinstance(message, wanted or object):
                del self._messages[place]
                return message
        return None
