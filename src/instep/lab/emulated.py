"""Emulated hosts for the workers of a job, for as long as a context lasts.

The master stays on this machine, which the hosts reach. `netlab.py` makes the network; here it is
given to a job. Ways in: `emulated_hosts`, `on_hosts`, and two checks before them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from instep.errors import SpecError
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec
from instep.lab import netlab
from instep.system.processes import interrupt, on_signals


def check_has_no_hosts(job: JobSpec, option: str) -> None:
    """Refuse a job that has hosts already.

    Args:
        job: that is to have emulated ones.
        option: the one that asks for them.

    Raises:
        SpecError: says what has them.
    """
    if job.launch.launcher != "local":
        where = "launch.hosts" if job.launch.hosts else f"launch.on = {job.launch.on!r}"
        raise SpecError(
            f"{where} and {option}: the job has hosts of its own, and emulated ones would take "
            f"their place. Give --set 'launch.hosts=[]', or leave {option} out."
        )


def check_can_emulate(option: str) -> None:
    """Refuse a machine that cannot have emulated hosts, or a user who may not make them.

    Raises:
        SpecError: says why not.
    """
    if why := netlab.why_not():
        raise SpecError(f"{option}: {why.rstrip('.')}. Leave it out, or ask as root.")


@contextmanager
def emulated_hosts(count: int, rate: str | None = None) -> Iterator[netlab.Network]:
    """A network of so many hosts; it and every process on them end with the context.

    Networks that a killed process left behind are removed first.

    Raises:
        SpecError: this machine cannot have such a network.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came in the context.
    """
    with on_signals(interrupt):
        netlab.clean()
        network = netlab.Network(count, rate=rate)
        try:
            yield network
        finally:
            with on_signals(signal.SIG_IGN):  # a second Ctrl-C would leave half of it
                network.remove()


def on_hosts(job: JobSpec, network: netlab.Network) -> JobSpec:
    """The job on the hosts of a network, or on the first of them if it has fewer workers."""
    names = network.hosts[: job.workers]
    hosts = tuple(f"ip netns exec {network.name}-{host}" for host in names)
    launch = LaunchSpec(hosts=hosts, address=network.address(netlab.OUTSIDE))
    return msgspec.structs.replace(job, launch=launch, network="private")
