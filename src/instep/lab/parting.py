"""Emulated hosts for a run that is to be broken, and its network, which can be parted.

A worker is on each host; the master stays on this machine, beside the hosts that
are not cut off. What a network does is `netlab.py`'s, when it is parted is
`breaker.py`'s. Way in: `on_emulated_hosts`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from instep.errors import SpecError
from instep.lab import netlab
from instep.spec import JobSpec, LaunchSpec
from instep.system.processes import interrupt, on_signals

LEAST_HOSTS = 2
"""A network of one has no sides."""


def check_can_part(job: JobSpec) -> None:
    """Refuse jobs and machines that can have no emulated hosts.

    Raises:
        SpecError: the job says where it runs, or this user may not make networks.
    """
    if job.launch.hosts:
        raise SpecError(
            "launch.hosts and --partitions: to be parted, a run is put on emulated hosts, and this "
            "job has hosts of its own. Give --set 'launch.hosts=[]', or leave --partitions out."
        )
    if why := netlab.why_not():
        raise SpecError(f"--partitions: {why.rstrip('.')}. Leave it out, or ask as root.")


@contextmanager
def on_emulated_hosts(job: JobSpec) -> Iterator[tuple[JobSpec, Parting]]:
    """The job, changed so that each of its workers has an emulated host, and their network.

    Networks that a killed process has left are taken away first; this one goes
    with the context, and whatever still runs on its hosts.

    Raises:
        SpecError: there can be no such network here.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came in the context.
    """
    with on_signals(interrupt):
        netlab.clean()
        network = netlab.Network(max(LEAST_HOSTS, job.workers))
        try:
            hosts = tuple(f"ip netns exec {network.name}-{host}" for host in network.hosts)
            launch = LaunchSpec(hosts=hosts, address=network.address(netlab.OUTSIDE))
            yield msgspec.structs.replace(job, launch=launch, network="private"), Parting(network)
        finally:
            with on_signals(signal.SIG_IGN):  # a second Ctrl-C would leave half of it
                network.remove()


def chosen(pick: float, count: int) -> list[int]:
    """One or more of `count` things, but not all: `pick`, from 0 to 1, says which of the ways."""
    ways = (1 << count) - 2  # a bit for each; neither none nor all
    bits = 1 + min(ways - 1, int(pick * ways))
    return [number for number in range(count) if bits >> number & 1]


class Parting:
    """A network that is parted for some time, and then whole again.

    Args:
        network: of the hosts of one run.
    """

    def __init__(self, network: netlab.Network) -> None:
        self._network, self._until = network, 0.0

    def part(self, pick: float, hold_s: float) -> list[int]:
        """Cut some hosts off from the others and from the master; a former parting is over.

        Args:
            pick: which hosts; see `chosen`.
            hold_s: seconds until `serve` makes the network whole again.

        Returns:
            The numbers of the hosts that are cut off, from 0.
        """
        away = chosen(pick, len(self._network.hosts))
        self._network.partition([self._network.hosts[number] for number in away])
        self._until = time.monotonic() + hold_s
        return away

    def serve(self) -> None:
        """Make it whole again once its time has come."""
        if self._until and time.monotonic() >= self._until:
            self.heal()

    def heal(self) -> None:
        """Make it whole again, if it is parted."""
        if self._until:
            self._network.heal()
            self._until = 0.0
