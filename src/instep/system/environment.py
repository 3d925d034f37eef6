"""The environment of every process of a run, and the signals that they know."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

SCHEDULERS = (signal.SIGUSR1, signal.SIGUSR2)
"""What a cluster may be told to send before a time limit, besides SIGTERM."""

END = signal.SIGALRM
"""Ends a fork server. It ignores SIGTERM and `SCHEDULERS`: a service manager or a cluster sends
those to every process of a run, and the client decides what follows. `srun` has to pass it on,
and passes on no real-time signal."""

INSIDE = "INSTEP_INSIDE"
"""Set in every process that a launcher starts: a recipe that starts another run is refused."""

FORKED = "INSTEP_FORKED"
"""Set in a fork server that is a fork of the user's process, and in its workers: these compute on
one thread, as a pool of threads does not survive a fork."""

ASKED = "INSTEP_ASKED"
"""Set in a script that is only asked what it gives to `instep.join`: where it is to say so."""

RECIPE = "INSTEP_RECIPE"
"""Set on a host where the recipe's file lies elsewhere than the job says: its path there."""

POOLS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")

THREADS = "INSTEP_THREADS"
"""What the user has set `OMP_NUM_THREADS` to: the threads of each worker, if the job says none."""

SETTINGS = {INSIDE: "1", **dict.fromkeys(POOLS, "1")}
"""Environment of a host: one thread for libraries that would start a pool before the fork."""


def settings() -> dict[str, str]:
    """What a host is given beside this environment; the user's number of threads is kept."""
    asked = os.environ.get(POOLS[0], "")
    # an actor of Ray has a number that Ray has set
    if INSIDE in os.environ or "ray" in sys.modules or not asked.isdecimal() or int(asked) < 1:
        return SETTINGS
    return {**SETTINGS, THREADS: asked}


def recipe_here(reference: str) -> str:
    """`file:function` of a job, with the path that the file has on this host."""
    file = os.environ.get(RECIPE)
    return f"{file}:{reference.rpartition(':')[2]}" if file else reference


def places_here(reference: str, places: Sequence[str]) -> tuple[str, ...]:
    """The folders of a job's `python_path` on this host: where the recipe's file is in a copy of a
    folder, those below this folder are in the copy too.

    Args:
        reference: `file:function` of the job, as it is where the run was started.
        places: absolute paths there.
    """
    here, there = (Path(each.rpartition(":")[0]) for each in (recipe_here(reference), reference))
    if here == there:
        return tuple(places)
    same = 0
    for mine, its in zip(reversed(here.parts), reversed(there.parts), strict=False):
        if mine != its:
            break
        same += 1
    copy, original = (Path(*each.parts[: len(each.parts) - same]) for each in (here, there))
    copied = (
        copy / Path(place).relative_to(original) if Path(place).is_relative_to(original) else None
        for place in places
    )
    return tuple(
        str(mine) if mine is not None and mine.is_dir() else place
        for mine, place in zip(copied, places, strict=True)
    )
