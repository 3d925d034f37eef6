"""Hosts and links that a plan is for.

A link carries as much in each direction. Way in: `Machines`.
"""

from __future__ import annotations

from typing import NamedTuple

PAYLOAD = 0.956
"""Share of a link's rate that is payload: the rest is headers of packets."""

ACKNOWLEDGED = 0.022
"""Share of a link's payload that acknowledgements take at most: one of 66 bytes for two packets of
1,514."""

BURST_S = 0.002
"""Seconds of its rate that an emulated link lets through at once (`lab/netlab.py`)."""


class HostLink(NamedTuple):
    """The link that joins a host to the others."""

    bits_per_s: float
    """Rate of a host's link, each way."""
    latency_s: float = 1e-4
    """Seconds until the first byte of a message is there."""

    @property
    def bytes_per_s(self) -> float:
        """Payload in a second."""
        return self.bits_per_s / 8 * PAYLOAD


class Machines(NamedTuple):
    """The hosts."""

    hosts: int = 1
    cores: int = 1
    """Cores of each host; of all together, where they are emulated."""
    link: HostLink | None = None
    """None: all processes are on one host, or nothing limits what is between them."""
    emulated: bool = False
    """Whether all hosts share the cores of one machine."""
    speeds: tuple[float, ...] = ()
    """How fast each host computes, beside the one that was measured; empty: as fast as it."""

    def host_of(self, process: int) -> int:
        """Host of a worker or server; they are dealt in turn."""
        return process % self.hosts

    def speed_of(self, process: int) -> float:
        """How fast the host of a worker computes."""
        return self.speeds[self.host_of(process)] if self.speeds else 1.0

    def beside(self, workers: int) -> int:
        """How many of so many workers share the cores of the fullest host."""
        return workers if self.emulated else -(-workers // self.hosts)

    def seconds_on_link(self, size: float) -> float:
        """How long so many bytes are on a link."""
        return size / self.link.bytes_per_s if self.link is not None else 0.0

    @property
    def latency_s(self) -> float:
        """Seconds that a message takes beside its bytes."""
        return self.link.latency_s if self.link is not None else 0.0
