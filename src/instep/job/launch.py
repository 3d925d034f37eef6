"""The tables `[launch]` and `[cluster]` of a job."""

from __future__ import annotations

import shlex
from typing import Any

from msgspec import field

from instep.job.base import Natural, Section
from instep.units import host_and_port


class LaunchSpec(Section, frozen=True, kw_only=True):
    """On which machines the workers are started, and by what."""

    on: str = ""
    """What starts the processes: a key of `launch.LAUNCHERS`; empty: `hosts` if `hosts` is given,
    `by_hand` if `[cluster]` is, otherwise `local`."""

    hosts: tuple[str, ...] = ()
    """For each host, the command that runs another command there, such as `"ssh node2"`; none:
    all workers start on this machine."""

    nodes: Natural = 0
    """Of a cluster: how many hosts to start, each on a node of its own if possible; 0: one on each
    node that it has, at most one for each worker."""

    cpus: Natural = 0
    """Of a cluster: cores that a host asks for; 0: one for each of its workers."""

    gpus: Natural = 0
    """Of a cluster: GPUs that a host asks for."""

    address: str = ""
    """Address of this machine that the hosts can reach; empty: look up this machine's name, or ask
    the cluster."""

    options: dict[str, Any] = field(default_factory=dict)
    """Options of the launcher, which has their names, defaults and checks."""

    @property
    def launcher(self) -> str:
        """The key of `launch.LAUNCHERS` that is meant."""
        return self.on or ("hosts" if self.hosts else "local")

    @property
    def count(self) -> int:
        """How many hosts there are, on machines that may lose each other; 0: one, on this one."""
        return len(self.hosts) or self.nodes

    def host(self, number: int) -> str:
        """A host in words, for messages."""
        return f"host {number} ({self.hosts[number] if self.hosts else self.on})"

    def __post_init__(self) -> None:
        for host in self.hosts:
            try:
                words = shlex.split(host)
            except ValueError as error:
                raise ValueError(f"hosts has {host!r}: {error}. Write it as in a shell.") from None
            if not words:
                raise ValueError(
                    f"hosts has {host!r}: needs a command that runs another one on a host, such "
                    "as 'ssh node2'."
                )
        if len(set(self.hosts)) < len(self.hosts):
            raise ValueError(f"hosts = {list(self.hosts)}: a host may be named once.")
        if self.hosts and self.launcher == "local":
            raise ValueError("hosts are given, and on = 'local'. Leave one of them out.")
        if self.launcher == "hosts" and not self.hosts:
            raise ValueError("on = 'hosts', but there are none. Give hosts, or leave on out.")
        if self.address and self.launcher == "local":
            raise ValueError(
                f"address = {self.address!r} is where hosts find this machine, but there are "
                "none. Give hosts, or leave address out."
            )
        for key in ("nodes", "cpus", "gpus", "options"):
            if getattr(self, key) and self.launcher in ("local", "hosts"):
                raise ValueError(
                    f"{key} = {getattr(self, key)!r} is for a cluster. Say which with on, or leave "
                    f"{key} out."
                )


class ClusterSpec(Section, frozen=True, kw_only=True):
    """Machines that join by hand: on each of them somebody starts `instep host`."""

    master: str = ""
    """Where the machine of `instep run` listens for the others, such as `"a:2220"`."""

    workers: tuple[str, ...] = ()
    """Machines for workers, `"b:2222"` each; the port tells hosts of one machine apart, and nothing
    listens on it. Every one gets an even part of `workers` at the top."""

    servers: tuple[str, ...] = ()
    """Machines for the parameter servers alone; none: they are where the workers are."""

    certificates: str = "certificates"
    """The folder of the certificates with which machines join, as `instep certificates` makes it.
    Relative to the job file. `instep run` makes it if it is not there, and writes a token file for
    each machine."""

    @property
    def places(self) -> tuple[str, ...]:
        """All machines; the number of one is that of its host."""
        return (*self.workers, *self.servers)

    def __post_init__(self) -> None:
        given = [("workers", place) for place in self.workers]
        given += [("servers", place) for place in self.servers]
        if not given and not self.master:
            return
        for key, place in [*given, ("master", self.master)]:
            try:
                host_and_port(place)
            except ValueError:
                raise ValueError(
                    f"{key} has {place!r}: needs a machine and a port from 1 to 65535, such as "
                    "'node1:2222'."
                ) from None
        if not self.workers:
            raise ValueError("workers is empty: name a machine for them, such as 'node1:2222'.")
        every = (self.master, *self.places)
        if len(set(every)) < len(every):
            twice = next(place for place in every if every.count(place) > 1)
            raise ValueError(f"{twice!r} is named twice. Give each its own port.")
