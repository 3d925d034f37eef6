"""Processes on several machines: a fork server on each, started through `ssh node2` or the like.

The command runs another command on the machine it leads to, and hands it our
standard input. That machine has the same interpreter and the same folders at
the same paths, and reaches this one; more is not asked of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from instep.comm.protocol.endpoint import Endpoint
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec
from instep.launch.local import LocalLauncher


class HostsLauncher:
    """Starts a fork server on each host.

    Args:
        hosts: of each, the command that runs another one there.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._each = [LocalLauncher(shlex.split(host)) for host in hosts]

    @classmethod
    def of(cls, job: JobSpec) -> HostsLauncher:
        """Of the commands in `launch.hosts`."""
        return cls(job.launch.hosts)

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """As it is: the job names the hosts."""
        return launch

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Start the fork server of one host."""
        self._each[endpoint.host].start(endpoint, logs)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the command that was run last for a host, or None while it runs."""
        return self._each[host].ended()

    def end_if_stopped(self, host: int = 0) -> None:
        """Kill the command that was run last for a host, if it was stopped here."""
        self._each[host].end_if_stopped()

    def stop(self) -> None:
        """End all; those that cannot be reached end once no master answers them."""
        for each in self._each:
            each.ask_to_stop()
        for each in self._each:
            each.stop()
