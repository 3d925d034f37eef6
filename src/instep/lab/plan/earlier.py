"""Earlier runs of a recipe, beside what a plan would have said of them.

Only runs of this machine with the same recipe, batch and threads count. Way in: `learned`.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from instep.client.results import recipe_sha256
from instep.errors import InstepError
from instep.job.spec import JobSpec
from instep.plan.machine import Machines
from instep.plan.pricing import Measurements, price
from instep.plan.ways import TrainingWay
from instep.report.figures.summary import step_seconds
from instep.store.run_folder import RunFolder

MOST_RUNS, LEAST_STEPS = 10, 10
"""The newest runs that are read, and the steps that one needs to count."""

BOUNDS = 0.67, 1.5
"""A ratio beyond these tells of another machine or a busy one, and is cut."""


_OF_A_STEP = (
    *("global_batch", "tokens_per_batch", "micro_batches", "merge", "batch_norm"),
    *("determinism", "precision", "threads", "device"),
)
"""Keys of `[train]` that a step's time depends on."""


class Learned(NamedTuple):
    """The correction that earlier runs give."""

    ratio: float = 1.0
    """How many times as long a step was as is planned."""
    runs: int = 0


def learned(job: JobSpec, runs: Path, known: Measurements, cores: int) -> Learned:
    """Compare earlier runs with what is planned for them now.

    Args:
        job: that is planned.
        runs: folder of run folders; it need not be there.
        known: what was measured now.
        cores: of this machine.
    """
    ratios = []
    for way, seconds in _steps_of(job, runs):
        priced = price(way, known, Machines(1, cores))
        if priced is not None and priced.seconds > 0:
            ratios.append(seconds / priced.seconds)
    if not ratios:
        return Learned()
    return Learned(min(max(statistics.median(ratios), BOUNDS[0]), BOUNDS[1]), len(ratios))


def _steps_of(job: JobSpec, runs: Path) -> Iterator[tuple[TrainingWay, float]]:
    """The way and the time of a step of each run that counts."""
    digest = recipe_sha256(job)
    folders = sorted(runs.glob("*/job.toml"), key=lambda path: -path.stat().st_mtime)
    for file in folders[:MOST_RUNS]:
        with suppress(InstepError, OSError):
            folder = RunFolder(file.parent)
            begun, spec = folder.last("run_started"), folder.spec
            alike = begun.get("recipe_sha256") == digest and _same(spec, job)
            here = (begun.get("host") or {}).get("name") == platform.node()
            if not (alike and here) or folder.last_step < LEAST_STEPS:
                continue
            if (seconds := step_seconds(folder)) is not None:
                sync = spec.sync
                servers = sync.server_count
                yield TrainingWay(spec.workers, sync.name, sync.codec, servers), seconds


def _same(spec: JobSpec, job: JobSpec) -> bool:
    """Whether a step of both is as much work, in one group of this machine."""
    alike = all(getattr(spec.train, key) == getattr(job.train, key) for key in _OF_A_STEP)
    alike = alike and spec.arguments == job.arguments
    return alike and spec.sync.rounds is None and spec.mesh.ranks == 1 and not spec.launch.count
