"""What a launcher is: it starts host processes, and ends what it started."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol, Self, TypeVar, runtime_checkable

import msgspec

from instep.comm.protocol.endpoint import Endpoint
from instep.errors import SpecError, near_miss
from instep.job.base import Section
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec

OptionsT = TypeVar("OptionsT", bound=Section)


class Launcher(Protocol):
    """Starts a host on each machine; it starts the workers there, as the master asks."""

    @classmethod
    def of(cls, job: JobSpec) -> Self:
        """A launcher for a job. It may reserve what a cluster has; it starts no host yet.

        Raises:
            SpecError: what the job asks for is not there.
        """

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """The job's `[launch]` with the `nodes` and the `address` of this start, if it leaves them
        to the launcher."""

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Bring up the host of number `endpoint.host`. Returns at once; it calls the master itself.

        Args:
            endpoint: where the master is.
            logs: existing folder for what the processes print; it is in the run's folder.

        Raises:
            SpecError: at the first call, some machine does not have what the run needs.
        """

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the host that was started last under this number, negative for a
        signal; None while it runs. Another that it has brought up may have taken its place."""

    def end_if_stopped(self, host: int = 0) -> None:
        """Kill the host that was started last under this number, and nothing of what it has
        started, if it was stopped (SIGSTOP), as far as that can be seen from here."""

    def stop(self) -> None:
        """End the host and all it has started, now, and wait until they are gone.

        A second call does nothing.
        """


@runtime_checkable
class Elastic(Launcher, Protocol):
    """One whose machines come and go during a run."""

    def leaving(self) -> Collection[int]:
        """Hosts whose machine is about to go; asked about twice a second."""

    def give_back(self, host: int) -> None:
        """End a host that has no workers, so that others can use its machine. Returns at once;
        `start` brings it up again."""


@runtime_checkable
class Placing(Launcher, Protocol):
    """One that is told how many workers each host has room for."""

    def places(self) -> list[int]:
        """Workers by host, as it is now. Who changes that tells the master too."""


def check_no_hosts(launch: LaunchSpec, cluster: str) -> None:
    """Refuse `launch.hosts` beside a cluster; in its launcher's `of`.

    Args:
        launch: of the job.
        cluster: what people call it.

    Raises:
        SpecError: hosts are given.
    """
    if launch.hosts:
        who = f"launch.hosts with launch.on = {launch.launcher!r}"
        raise SpecError(f"{who}: {cluster} has the hosts. Give nodes.")


def options_of(launch: LaunchSpec, known: type[OptionsT]) -> OptionsT:
    """The options of a launcher, checked; in a launcher's `of`.

    Args:
        launch: has them as a table.
        known: their names, types and defaults.

    Raises:
        SpecError: there is no such option, or its value is refused.
    """
    names = known.__struct_fields__
    for name in launch.options:
        if name not in names:
            who = f"launch.options: {launch.launcher} has no option {name!r}."
            raise SpecError(f"{who} {near_miss(name, names)}")
    try:
        return msgspec.convert(launch.options, known)
    except msgspec.ValidationError as error:
        raise SpecError(f"launch.options of {launch.launcher}: {error}.") from None
