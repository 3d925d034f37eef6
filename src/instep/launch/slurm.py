"""Processes on the nodes of a Slurm allocation: a fork server on each, started with `srun`.

Each host is a job step of its own: a node that is lost takes no other with it, and a host that
ended is started again. The nodes have the same interpreter and folders at the same paths. How a
job gets an allocation is not known here; `client/batch.py` asks for one.
"""

from __future__ import annotations

import secrets
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from instep.comm.protocol.endpoint import Endpoint
from instep.errors import SpecError
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec
from instep.launch.base import check_no_hosts
from instep.launch.local import TIMEOUT_S, LocalLauncher
from instep.launch.node import Needs
from instep.launch.slurm_cluster import (
    SRUN,
    address_of_this,
    allocation,
    ask,
    check_nodes,
    nodes_of,
)
from instep.words import plural

KILLED = 128
"""Above it, an exit code of `srun` stands for the signal that ended the task."""


class SlurmLauncher:
    """Starts a fork server on each node.

    Args:
        allocation: the id of the Slurm job.
        nodes: names of those to use.
        needs: what they must have; None if that is known.
        first: number of the host on the first node.
    """

    def __init__(
        self, allocation: str, nodes: Sequence[str], needs: Needs | None = None, first: int = 0
    ) -> None:
        self._allocation, self._needs = allocation, needs
        self._nodes = dict(enumerate(nodes, first))
        self._name = f"instep-{secrets.token_hex(4)}"  # of our steps
        words = [
            *SRUN,
            "--nodes=1",
            "--ntasks=1",
            f"--jobid={allocation}",
            f"--job-name={self._name}",
        ]
        self._each = {
            number: LocalLauncher([*words, f"--nodelist={node}"])
            for number, node in self._nodes.items()
        }
        self._started: set[int] = set()
        self._lost: set[int] = set()  # hosts whose node has left the allocation

    @classmethod
    def of(cls, job: JobSpec) -> SlurmLauncher:
        """On the nodes of the allocation that this process is in.

        Raises:
            SpecError: it is in none, or there are too few nodes.
        """
        check_no_hosts(job.launch, "Slurm")
        number = allocation()
        if not number:
            raise SpecError(
                "launch.on = 'slurm' outside a Slurm allocation. `instep run JOB --on slurm` "
                "submits a job file; for anything else get nodes first, with salloc or sbatch."
            )
        nodes, wanted = nodes_of(number), job.launch.nodes
        if len(nodes) < wanted:
            raise SpecError(
                f"launch.nodes = {wanted}, and the allocation {number} has "
                f"{plural(len(nodes), 'node')}: {', '.join(nodes)}. Ask Slurm for more, or set "
                f"launch.nodes = {len(nodes)}."
            )
        return cls(number, nodes[: wanted or job.workers], Needs.of(job))

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """With the number of nodes, and the address of the one that this process is on."""
        address = launch.address or address_of_this()
        return msgspec.structs.replace(launch, nodes=len(self._nodes), address=address)

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Start the fork server of one node, unless that node is lost for good.

        Raises:
            SpecError: something is missing on a node.
        """
        if self._needs is not None:
            check_nodes(self._allocation, [*self._nodes.values()], self._needs, logs.parent)
            self._needs = None
        number = endpoint.host
        if number in self._started and number not in self._lost:
            with suppress(SpecError):  # the controller may be away for a moment
                if self._nodes[number] not in nodes_of(self._allocation):
                    self._lost.add(number)
        self._started.add(number)
        if number not in self._lost:
            self._each[number].start(endpoint, logs)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the fork server that was started last on a node; of one that was lost
        with its node, that of a killed process."""
        code = -signal.SIGKILL if host in self._lost else self._each[host].ended()
        return KILLED - code if code is not None and code > KILLED else code

    def end_if_stopped(self, host: int = 0) -> None:
        """Kill the `srun` of a host, if it was stopped here."""
        self._each[host].end_if_stopped()

    def stop(self) -> None:
        """End all; steps whose `srun` was killed are ended by Slurm."""
        started, self._started = self._started, set()
        deadline = time.monotonic() + TIMEOUT_S
        while any(self.ended(n) is None for n in started) and time.monotonic() < deadline:
            for number in started:
                self._each[number].ask_to_stop()  # again, as srun loses it before its task runs
            time.sleep(0.1)
        for number in started:
            self._each[number].stop()
        deadline = time.monotonic() + 2 * TIMEOUT_S  # Slurm tries to reach a lost `srun` for 5 s
        with suppress(SpecError):  # without a controller they end once no master answers them
            while started and (left := self._steps()) and time.monotonic() < deadline:
                ask("scancel", "--quiet", "--signal=KILL", *left)
                time.sleep(0.05)

    def _steps(self) -> list[str]:
        """Our steps that have not ended."""
        listed = ask("squeue", "--noheader", "--steps", f"--jobs={self._allocation}", "-o", "%i %j")
        steps = [line.split() for line in listed.splitlines()]
        return [step[0] for step in steps if step[1:] == [self._name]]
