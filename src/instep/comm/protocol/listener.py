"""A port where strangers may call: each caller gets a thread, and has to prove what it is.

Who has not proved it yet makes room for the next one, and a process that can open no more files, or
start no more threads, continues once it can. What callers show, and what they are told, is not
known here. Way in: `Listener`.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from instep.comm import metered
from instep.comm.callers import NO_MORE_FILES, Unproven
from instep.comm.protocol.channel import Address

MOST_UNPROVEN = 64
"""Callers that have not; the oldest is dropped. Who expects more at once allows more."""

FULL_S = 0.1
"""How long nobody is accepted after the process could open no more files."""


class Listener:
    """Accepts callers until it is closed.

    Args:
        host: the address to listen on.
        serve: called in the thread of each caller, whose connection is closed after it.
        name: of these threads.
        most: how many may come at once.
    """

    def __init__(
        self, host: str, serve: Callable[[socket.socket], None], name: str, *, most: int = 0
    ) -> None:
        self._serve, self._name, self.closed = serve, name, False
        self._unproven = Unproven[socket.socket](max(MOST_UNPROVEN, most))
        self._socket = socket.create_server((host, 0), backlog=1024)
        self.address = Address(*self._socket.getsockname()[:2])
        self._start(self._accept)

    def proved(self, connection: socket.socket) -> bool:
        """Tell that a caller has proved what it is; whether it was not dropped meanwhile."""
        return self._unproven.remove(connection)

    def close(self) -> None:
        """Let nobody in; a second call does nothing."""
        self.closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self.closed:
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                if error.errno in NO_MORE_FILES:
                    _hang_up(self._unproven.clear())
                if not self.closed:
                    time.sleep(FULL_S)
                continue
            _hang_up(self._unproven.add(connection))
            try:
                self._start(self._admit, connection)
            except RuntimeError:  # no more threads
                self._unproven.remove(connection)
                connection.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            self._serve(connection)
        finally:
            self._unproven.remove(connection)
            metered.close(connection)

    def _start(self, run: Callable[..., None], *args: socket.socket) -> None:
        threading.Thread(target=run, args=args, name=self._name, daemon=True).start()


def _hang_up(connections: Iterable[socket.socket]) -> None:
    for each in connections:
        with suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)  # its thread closes it
