"""The launcher of a job, and the job as it is with that launcher."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from instep.job.spec import JobSpec
from instep.launch import LAUNCHERS
from instep.launch.forked import ForkedLauncher
from instep.recipe.given import given

if TYPE_CHECKING:
    from instep.launch.base import Launcher


@contextmanager
def launching(job: JobSpec) -> Iterator[tuple[JobSpec, Launcher]]:
    """A launcher, stopped at the end; and the job with what was left to it: nodes and address.

    The run's folder has the job as it was given, as another start may find others.

    Raises:
        SpecError: the job asks for what is not there.
    """
    known = given(job.recipe) is None
    launcher = (LAUNCHERS[job.launch.launcher] if known else ForkedLauncher).of(job)
    try:
        settled = launcher.settled(job.launch)
        yield msgspec.structs.replace(job, launch=settled), launcher
    finally:
        launcher.stop()
