"""Messages that were sent and that no master has acknowledged: the next one gets them again.

It knows no connection. Way in: `connection.py:MasterConnection`, which has one and holds its lock.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import msgspec

from instep.comm.protocol.messages import AnyMessage, Emit, Hello, Records, StoreGet, decode, encode

_KEPT = (Emit, Records)
"""What is for the run's log. Nobody else could tell it again."""


class MessageStore(Protocol):
    """Keeps messages where the next process finds them; as `system.outbox.Outbox`."""

    left: list[bytes]

    def put(self, message: bytes) -> None:
        """Keep one more."""

    def drop(self) -> None:
        """The oldest has been acknowledged."""


class Unacknowledged:
    """Messages that a master may not have handled, in the order in which they were sent."""

    def __init__(self) -> None:
        self.messages: deque[AnyMessage] = deque()
        self.question: StoreGet | None = None
        """A request without a reply: it is sent again to the next master, which may not know it,
        even if it was acknowledged."""
        self._store: MessageStore | None = None
        self._dropped = 0  # messages of this connection that are no longer kept

    def add(self, message: AnyMessage) -> None:
        """Keep a message that is sent now."""
        self.messages.append(message)
        if self._store is not None and isinstance(message, _KEPT):
            self._store.put(encode(message))

    def keep_in(self, store: MessageStore) -> None:
        """From now on keep messages for the next process too; add those of the last one."""
        self._store = store
        for each in store.left:
            message = decode(each)
            assert isinstance(message, _KEPT), "nothing else is put there"
            self.messages.append(msgspec.structs.replace(message, again=True))

    def acknowledged(self, count: int) -> None:
        """Drop what was handled: so many messages of this connection in all."""
        for _ in range(min(count - self._dropped, len(self.messages))):
            handled = self.messages.popleft()
            if self._store is not None and isinstance(handled, _KEPT):
                self._store.drop()
        self._dropped = count

    def answered(self, key: str) -> bool:
        """Whether a reply is the first to `question`; both of two masters may have been asked."""
        if self.question is None or self.question.key != key:
            return False
        self.question = None
        return True

    def again(self, hello: Hello) -> list[AnyMessage]:
        """The first messages of a new connection: `hello`, and all that are here."""
        if self.question is not None and self.question not in self.messages:
            self.messages.append(self.question)
        self._dropped = 0
        return [msgspec.structs.replace(hello, resends=len(self.messages)), *self.messages]
