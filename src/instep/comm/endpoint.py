"""Where the master of a run listens, and all that a process needs to be let in.

The address and the token travel to every process that is started. The listener outlives any
one master: the next one goes on with it.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from functools import cached_property

from instep.comm.channel import Address, Hub, listen


@dataclass(frozen=True)
class Endpoint:
    """All that a new process needs to find its master and be believed."""

    address: Address
    token: str
    host: int = 0
    """The number of the host that the process is on."""


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
        self.endpoint = Endpoint(Address(name[0], name[1]), token or secrets.token_hex(16))

    @cached_property
    def hub(self) -> Hub:
        """The connections, for the one process that takes them in."""
        return Hub(self.listener)

    def close(self) -> None:
        """Hang up on everyone; a second call does nothing."""
        if "hub" in self.__dict__:
            self.hub.close()
        self.listener.close()
