"""What a launcher is: it brings up one host process, and ends whatever it brought up.

Beside it what the processes are told: where their master is, and the token
by which it knows them.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from instep.comm.channel import Address, Hub, listen

INSIDE = "INSTEP_INSIDE"
"""Set in every process that a launcher starts: a recipe that starts another run is refused."""


@dataclass(frozen=True)
class Seat:
    """All that a new process needs to find its master and be believed."""

    address: Address
    token: str


class Switchboard:
    """Where a run's masters listen, one after the other, before the first is there.

    Args:
        host: address to listen on.
        listener: that listens already, and was made by another process.
        token: that the other process chose.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        listener: socket.socket | None = None,
        token: str | None = None,
    ) -> None:
        self.listener = listener or listen(host)
        name = self.listener.getsockname()
        self.seat = Seat(Address(name[0], name[1]), token or secrets.token_hex(16))

    @cached_property
    def hub(self) -> Hub:
        """The connections, for the one process that takes them in."""
        return Hub(self.listener)

    def close(self) -> None:
        """Hang up on everyone; a second call does nothing."""
        if "hub" in self.__dict__:
            self.hub.close()
        self.listener.close()


class Launcher(Protocol):
    """Starts a host on a machine; the host starts the workers there, at the master's word."""

    def start(self, seat: Seat, logs: Path) -> None:
        """Bring the host up. Returns at once; the host calls the master when it is ready.

        Args:
            seat: where the master is.
            logs: existing folder for what the processes print.
        """

    def ended(self) -> int | None:
        """The exit code of the host that was started last, negative for a signal; None while
        it runs. Another that it has brought up itself may have taken its place."""

    def stop(self) -> None:
        """End the host and all it has started, now, and wait until they are gone.

        A second call does nothing.
        """
