"""Where the master of a run listens, and all that a process needs to connect.

Every process that is started gets address and token. The listening socket outlives a master:
the next one uses it too.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from instep.comm.encryption.certificates import Authority, Credentials, Identity
from instep.comm.protocol.channel import Address, listen
from instep.comm.protocol.hub import Hub

if TYPE_CHECKING:
    import ssl


@dataclass(frozen=True)
class Endpoint:
    """All that a new process needs to reach its master and be trusted."""

    address: Address
    token: str
    host: int = 0
    """The number of the host that the process is on."""
    credentials: Credentials | None = None
    """What the process shows; None where connections are not encrypted."""
    program: str = ""
    """The module that a launcher runs on the host; empty: the fork server."""

    @cached_property
    def context(self) -> ssl.SSLContext | None:
        """For connections to the master."""
        if self.credentials is None:
            return None
        from instep.comm.encryption.tls import context

        return context(self.credentials, server=False)

    def as_table(self) -> dict[str, Any]:
        """All of it, for JSON: a process that is started gets it on its standard input."""
        return {
            "host": self.address.host,
            "port": self.address.port,
            "token": self.token,
            "number": self.host,
            "credentials": None if self.credentials is None else asdict(self.credentials),
        }

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Endpoint:
        """What a table of `as_table` says; other keys of it are ignored."""
        shown = table["credentials"]
        return cls(
            Address(table["host"], table["port"]),
            table["token"],
            table["number"],
            Credentials(**shown) if shown else None,
        )


class Switchboard:
    """The listening socket of a run's masters; it exists before the first one.

    Args:
        host: address to listen on.
        listener: made by another process, and listening already.
        token: chosen by that process.
        authority: makes certificates of the run; without one, connections are not encrypted.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        *,
        listener: socket.socket | None = None,
        token: str | None = None,
        authority: Authority | None = None,
    ) -> None:
        self.listener, self.authority = listener or listen(host), authority
        name = self.listener.getsockname()
        self._anyone = Endpoint(Address(name[0], name[1]), token or secrets.token_hex(16))

    @cached_property
    def endpoint(self) -> Endpoint:
        """For the process that submitted the run."""
        return replace(self._anyone, credentials=self.issue(Identity("client")))

    def for_client(self) -> Endpoint:
        """For a program that changes the run."""
        return replace(self._anyone, credentials=self.issue(Identity("client", 1)))

    def for_host(self, number: int) -> Endpoint:
        """For the fork server of a host."""
        credentials = self.issue(Identity("host", number))
        return replace(self._anyone, host=number, credentials=credentials)

    def issue(self, identity: Identity) -> Credentials | None:
        """What a process of the run is to show; None where connections are not encrypted."""
        return None if self.authority is None else self.authority.issue(identity)

    @cached_property
    def hub(self) -> Hub:
        """The connections, for the one process that accepts them."""
        shown = self.issue(Identity("master"))
        if shown is None:
            return Hub(self.listener)
        from instep.comm.encryption.tls import context

        return Hub(self.listener, context=context(shown, server=True))

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        if "hub" in self.__dict__:
            self.hub.close()
        self.listener.close()
