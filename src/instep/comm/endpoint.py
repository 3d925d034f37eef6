"""Where the master of a run listens, and all that a process needs to connect.

Every process that is started gets address and token. The listening socket outlives a master:
the next one uses it too.
"""

from __future__ import annotations

import secrets
import socket
from dataclasses import dataclass
from functools import cached_property

from instep.comm.channel import Address, Hub, listen


@dataclass(frozen=True)
class Endpoint:
    """All that a new process needs to reach its master and be trusted."""

    address: Address
    token: str
    host: int = 0
    """The number of the host that the process is on."""


class Switchboard:
    """The listening socket of a run's masters; it exists before the first one.

    Args:
        host: address to listen on.
        listener: made by another process, and listening already.
        token: chosen by that process.
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
        """The connections, for the one process that accepts them."""
        return Hub(self.listener)

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        if "hub" in self.__dict__:
            self.hub.close()
        self.listener.close()
