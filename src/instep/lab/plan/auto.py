"""`--workers auto`: the number of workers that a plan finds fastest, for the job as it is.

Only workers change, so the result of the run does not. Way in: `planned_workers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from instep.errors import SpecError
from instep.job.spec import JobSpec
from instep.lab.plan.plan import JobPlan, Question, plan_job
from instep.units import readable_seconds
from instep.words import plural


class Chosen(NamedTuple):
    """The workers, and what was planned for them."""

    workers: int
    planned: dict[str, Any]
    """Fields of `planned` of the run."""
    text: str
    """Says so."""


def planned_workers(job: JobSpec, question: Question, say: Callable[[str], None]) -> Chosen:
    """Plan a job, and choose.

    Args:
        job: with a number of workers that does not matter.
        question: what to look at.
        say: told what is being done.

    Raises:
        SpecError: the job's result depends on the workers, or it is not of this machine alone.
    """
    if job.launch.launcher != "local":
        raise SpecError(
            f"workers = 'auto' plans for this machine, and launch.on = {job.launch.launcher!r}. "
            "Ask instep plan --hosts, and give the number."
        )
    if job.sync.codec != "none" or job.sync.votes:
        raise SpecError(
            "workers = 'auto': with a codec the result depends on the number of workers. Give it."
        )
    one = msgspec.structs.replace(job, workers=job.mesh.ranks)
    plan = plan_job(one, question._replace(only_workers=True), say)
    own = job.sync.name
    rows = [each for each in plan.ranking.fits if each.way.strategy == own]
    if not rows:
        raise SpecError(
            f"workers = 'auto': sync.name = {job.sync.name!r} is not priced as it is. Give the "
            "number of workers."
        )
    best = rows[0]
    named = ("step_s", best.parts.seconds), ("low_s", best.low), ("high_s", best.high)
    planned = {**dict(named), "workers": best.way.workers}
    return Chosen(best.way.workers, planned, _words(plan, best.way.workers, best.seconds))


def _words(plan: JobPlan, workers: int, seconds: float) -> str:
    text = f"{plural(workers, 'worker')}: {readable_seconds(seconds)} a step"
    alone = plan.ranking.alone
    if workers > 1 and alone is not None:
        text += f", {alone.seconds / seconds:.2f} times as fast as one"
    busy = "; this machine is busy, so that may change" if plan.probed.machine.is_busy else ""
    return text + busy
