"""Partitions of the network of a run that is to be broken, which is on emulated hosts.

Each worker has a host; the master stays on this machine, with the hosts that are not cut
off. `emulated.py` makes the hosts, `breaker.py` says when the network is partitioned. Way in:
`on_emulated_hosts`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from instep.job.spec import JobSpec
from instep.lab import netlab
from instep.lab.emulated import check_can_emulate, check_has_no_hosts, emulated_hosts, on_hosts

LEAST_HOSTS = 2
"""One host alone cannot be partitioned."""


def check_can_partition(job: JobSpec) -> None:
    """Refuse jobs and machines that cannot have emulated hosts.

    Raises:
        SpecError: the job names its hosts, or this user may not make networks.
    """
    check_has_no_hosts(job, "--partitions")
    check_can_emulate("--partitions")


@contextmanager
def on_emulated_hosts(job: JobSpec) -> Iterator[tuple[JobSpec, Partitions]]:
    """The job, changed so that each of its workers has an emulated host, and their network.

    Raises:
        SpecError: this machine cannot have such a network.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came in the context.
    """
    with emulated_hosts(max(LEAST_HOSTS, job.workers)) as network:
        yield on_hosts(job, network), Partitions(network)


def chosen(pick: float, count: int) -> list[int]:
    """Some of `count` things, at least one and not all; `pick`, from 0 to 1, says which."""
    ways = (1 << count) - 2  # a bit for each; neither none nor all
    bits = 1 + min(ways - 1, int(pick * ways))
    return [number for number in range(count) if bits >> number & 1]


class Partitions:
    """Partitions of a network, each for some time.

    Args:
        network: of the hosts of one run.
    """

    def __init__(self, network: netlab.Network) -> None:
        self._network, self._until = network, 0.0

    def begin(self, pick: float, hold_s: float) -> list[int]:
        """Cut some hosts off from the others and from the master; ends a former partition.

        Args:
            pick: which hosts; see `chosen`.
            hold_s: seconds until `serve` heals the network.

        Returns:
            The numbers of the hosts that are cut off, from 0.
        """
        away = chosen(pick, len(self._network.hosts))
        self._network.partition([self._network.hosts[number] for number in away])
        self._until = time.monotonic() + hold_s
        return away

    def serve(self) -> None:
        """Heal the network once the time is over."""
        if self._until and time.monotonic() >= self._until:
            self.heal()

    def heal(self) -> None:
        """Heal the network, if it is partitioned."""
        if self._until:
            self._network.heal()
            self._until = 0.0
