"""What a launcher is: it brings up one host process, and ends whatever it brought up.

Beside it what the processes are told: where their master is, and the token
by which it knows them.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from instep.comm.channel import Address, Hub

INSIDE = "INSTEP_INSIDE"
"""Set in every process that a launcher starts: a recipe that starts another run is refused."""


@dataclass(frozen=True)
class Seat:
    """All that a new process needs to find its master and be believed."""

    address: Address
    token: str


class Switchboard:
    """A master's connections, listening before the master itself is there.

    Args:
        host: address to listen on.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        self.hub = Hub(host)
        self.seat = Seat(self.hub.address, secrets.token_hex(16))

    def close(self) -> None:
        """Hang up on everyone; a second call does nothing."""
        self.hub.close()


class Launcher(Protocol):
    """Starts a host on a machine; the host starts the workers there, at the master's word."""

    def start(self, seat: Seat, logs: Path) -> None:
        """Bring the host up. Returns at once; the host calls the master when it is ready.

        Args:
            seat: where the master is.
            logs: existing folder for what the processes print.
        """

    def ended(self) -> int | None:
        """The host's exit code, negative for a signal, or None while it runs."""

    def stop(self) -> None:
        """End the host and all it has started, now, and wait until they are gone.

        A second call does nothing.
        """
