"""The launcher of a job, and the job as it is with that launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from instep.errors import SpecError
from instep.launch import LAUNCHERS
from instep.spec import JobSpec, LaunchSpec

if TYPE_CHECKING:
    from instep.launch.base import Launcher


@contextmanager
def launching(job: JobSpec) -> Iterator[tuple[JobSpec, Launcher]]:
    """A launcher, stopped at the end; and the job with what was left to it: nodes and address.

    The run's folder has the job as it was given, as another start may find others.

    Raises:
        SpecError: the job asks for what is not there, or for a network that may not be private.
    """
    launcher = LAUNCHERS[job.launch.launcher].of(job)
    try:
        launch = launcher.settled(job.launch)
        if launch.nodes:
            check_network(job.network, launch)
        yield msgspec.structs.replace(job, launch=launch), launcher
    finally:
        launcher.stop()


def check_network(network: str, launch: LaunchSpec) -> None:
    """Refuse hosts on a network that may not be private.

    Raises:
        SpecError: it was not declared so.
    """
    if network != "private" and not launch.address.startswith("127."):
        raise SpecError(
            f"launch.on = {launch.on!r} starts processes on other machines, and traffic "
            "between them is not encrypted. If only trusted machines reach that network, set "
            'network = "private".'
        )
