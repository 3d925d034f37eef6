"""The hosts of a pool, of which a run has some: as many workers on each as the scheduler says.

The scheduler writes a file with the places of the run (`Placed`), and tells the machines where this
end listens for them. Each shows the certificate with which it has joined the pool. If this process
ends, so does all that it has started there. Way in: `PoolLauncher`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from instep.comm.protocol.endpoint import Endpoint
from instep.errors import SpecError
from instep.job.base import Section
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec
from instep.launch.base import check_no_hosts, options_of
from instep.launch.by_hand import JoinedMachines
from instep.launch.gate import Gate
from instep.launch.join_folder import JoinFolder
from instep.launch.node import Needs
from instep.plain_file import PRIVATE, read_plain, replace_plain


class PoolOptions(Section, frozen=True, kw_only=True):
    """`launch.options` of `pool`, which a pool writes."""

    certificates: str = ""
    """The folder of the certificates with which the hosts have joined the pool."""

    placed: str = ""
    """The file with the places of this run."""

    gate: str = ""
    """The file in which the run writes where it listens for its hosts."""


class Placed(msgspec.Struct, frozen=True):
    """The places of a run on the hosts of a pool."""

    hosts: list[str]
    """All hosts of the pool by name; the run calls them by number."""
    workers: list[int]
    """How many workers there is room for on each."""

    def write(self, path: Path) -> None:
        """Write it, whole and on disk when this returns."""
        replace_plain(path, msgspec.json.encode(self), PRIVATE, durable=True)

    @classmethod
    def read(cls, path: Path) -> Placed:
        """Read it.

        Raises:
            SpecError: it cannot be read.
        """
        try:
            return msgspec.json.decode(read_plain(path), type=cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise SpecError(
                f"the places of this run cannot be read from {path}: {error}. launch.on = 'pool' "
                "is for jobs of a pool: instep submit JOB"
            ) from None


class PoolLauncher:
    """Has hosts of a pool start fork servers, as they join.

    Args:
        options: say where the pool's files are.
        address: of this machine, to listen on.
        needs: what each machine must have.

    Raises:
        SpecError: this is no job of a pool, the pool has not started it, or nothing can listen
            there.
    """

    def __init__(self, options: PoolOptions, address: str, needs: Needs) -> None:
        self._path = Path(options.placed)
        hosts = Placed.read(self._path).hosts
        if Path(options.gate).exists():  # the scheduler removes that of the last client
            raise SpecError(
                "this run is a job of a pool with hosts, and only its scheduler starts it there. "
                "To go on with it on this machine, add --set launch.on=local "
                "--set launch.address= --set launch.options={}"
            )
        folder = JoinFolder(Path(options.certificates))
        gate = Gate((address, 0), hosts, folder, lambda text: print(text, file=sys.stderr))
        self._machines = JoinedMachines(gate, len(hosts), needs)
        self.count = len(hosts)
        try:
            where = f"{gate.address.host}:{gate.address.port}"
            replace_plain(Path(options.gate), where, PRIVATE)
        except OSError as error:
            self.stop()
            raise SpecError(f"{options.gate} cannot be written: {error.strerror}.") from None

    @classmethod
    def of(cls, job: JobSpec) -> PoolLauncher:
        """Listen for the hosts of a job's pool."""
        options = options_of(job.launch, PoolOptions)
        check_no_hosts(job.launch, "a pool")
        return cls(options, job.launch.address, Needs.of(job))

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """With all hosts of the pool, of which the run uses those that it has places on."""
        return msgspec.structs.replace(launch, nodes=self.count)

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Ask a machine for a fork server, at once or when it joins."""
        self._machines.start(endpoint, logs)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of a fork server; None while it runs, or until its machine joins."""
        return self._machines.ended(host)

    def end_if_stopped(self, host: int = 0) -> None:
        """Ask a machine to kill its fork server, if it was stopped."""
        self._machines.end_if_stopped(host)

    def places(self) -> list[int]:
        """Workers that there is room for on each host."""
        return Placed.read(self._path).workers

    def leaving(self) -> list[int]:
        """None: a host that is to go has no places."""
        return []

    def give_back(self, host: int) -> None:
        """Ask a machine to leave this run."""
        self._machines.give_back(host)

    def stop(self) -> None:
        """End what all machines have started; one that is cut off does so by itself."""
        self._machines.stop()
