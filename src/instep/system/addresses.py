"""Which address of this machine leads to another host."""

from __future__ import annotations

import socket


def address_towards(host: str) -> str:
    """The local address from which `host` is reached; loopback stays loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # a datagram socket sends nothing when it connects
        return str(probe.getsockname()[0])
