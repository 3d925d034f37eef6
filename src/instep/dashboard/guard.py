"""Connections that send no request do not keep others out.

Each may take so long to send its first request, and of those that have sent none there are so many
at most: the oldest gives way. Way in: `GuardedProtocol`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_SILENT, MOST_OPEN, FIRST_REQUEST_S = 64, 256, 10.0

_silent = OrderedDict["GuardedProtocol", None]()
_open = OrderedDict["GuardedProtocol", None]()


class GuardedProtocol(H11Protocol):
    """uvicorn's protocol for HTTP/1.1, with limits."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count it, and close another one if there are too many."""
        super().connection_made(transport)
        _silent[self] = _open[self] = None
        self._late = self.loop.call_later(FIRST_REQUEST_S, self._close_if_silent)
        if len(_silent) > MOST_SILENT:
            oldest = next(iter(_silent))
            oldest._forget()  # now: of many that come at once, none may count until it is closed
            oldest.transport.abort()
        if len(_open) > MOST_OPEN:
            self.transport.abort()

    def handle_events(self) -> None:
        """Handle what has come; a whole request makes it no longer silent."""
        super().handle_events()
        if self.cycle is not None:
            _silent.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget it."""
        self._forget()
        super().connection_lost(exc)

    def _forget(self) -> None:
        self._late.cancel()
        _silent.pop(self, None)
        _open.pop(self, None)

    def _close_if_silent(self) -> None:
        if self in _silent:
            self.transport.abort()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: Any) -> bool:
        return self is other
