"""Connections that show no session do not keep others out.

Each may take so long to send its first request, and of those that have shown no session there are
so many at most: the oldest gives way. Way in: `GuardedProtocol`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from instep.dashboard.access import KNOWN

MOST_UNKNOWN, MOST_OPEN, REQUEST_S = 64, 256, 10.0

_unknown = OrderedDict["GuardedProtocol", None]()
_open = OrderedDict["GuardedProtocol", None]()


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, with limits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and close another one if there are too many."""
        super().connection_made(transport)
        for each in [each for each in _unknown if each.has_shown_session]:
            del _unknown[each]
        _unknown[self] = _open[self] = None
        self._late = self.loop.call_later(REQUEST_S, self._close_if_silent)
        if len(_unknown) > MOST_UNKNOWN:
            oldest = next(iter(_unknown))
            oldest._forget()  # now: of many that come at once, none may count until it is closed
            oldest.transport.abort()
        if len(_open) > MOST_OPEN:
            self.transport.abort()

    @property
    def has_shown_session(self) -> bool:
        """Whether its latest request did."""
        return bool(self.scope and self.scope.get(KNOWN))

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        self._late.cancel()
        _unknown.pop(self, None)
        _open.pop(self, None)

    def _close_if_silent(self) -> None:
        if self.cycle is None or self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: Any) -> bool:
        return self is other
