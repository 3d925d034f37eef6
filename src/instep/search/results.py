"""The result of a trial, read from the folder of its run. Nothing here starts or decides."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from instep.control.stop_rules import PRUNED
from instep.errors import SpecError, near_miss
from instep.job.search import Value
from instep.job.spec import JobSpec
from instep.report.figures.summary import summarise
from instep.store.run_folder import RunFolder

Values = Mapping[str, Value]
"""Values of the keys of a trial."""


class Result(NamedTuple):
    """A trial that is over."""

    state: str
    """`completed`, `pruned`, or `failed`."""
    value: float | None
    """The metric of its last validation; None for a trial that failed."""
    rungs: tuple[tuple[int, float], ...] = ()
    """The metric at each rung that it reached, in order."""
    steps: int = 0
    seconds: float = 0.0
    parameters_sha256: str = ""
    why: str = ""


class ToldTrial(NamedTuple):
    """A trial as the sampler and the pruning know it."""

    values: Values
    result: Result


def name_of(number: int) -> str:
    """The name of a trial, and of its folder."""
    return f"trial-{number:03d}"


def is_over(run: RunFolder) -> bool:
    """Whether a run has its result: at the end of its length, or by a rule."""
    by_rule = run.outcome == "stopped" and run.ending.get("rule") != "stop_after_steps"
    return run.outcome == "completed" or by_rule


def result_of(run: RunFolder, job: JobSpec) -> Result:
    """The result of a run that is over.

    Args:
        run: its folder.
        job: of the trial; its `[stop]` has the metric, its `[search]` the rungs.
    """
    metric, summary = job.stop.metric, summarise(run)
    of_step = {v["step"]: v["metrics"].get(metric) for v in run.validations}
    scheduled = sorted({v["step"] for v in run.validations if v.get("scheduled", True)})
    at_rungs = [
        (rung, of_step[scheduled[rung - 1]]) for rung in job.search.rungs if rung <= len(scheduled)
    ]
    value = of_step[max(of_step)] if of_step else None
    found = Result(
        "pruned" if summary["rule"] == PRUNED else "completed",
        value,
        tuple((rung, float(each)) for rung, each in at_rungs if _is_number(each)),
        summary["steps"],
        summary["seconds"],
        summary["parameters_sha256"] or "",
    )
    if summary["diverged"] or not _is_number(value):
        why = summary["rule_text"] or f"its last validation has no finite {metric}"
        return found._replace(state="failed", value=None, why=why)
    return found


def check_metric(run: RunFolder, metric: str) -> None:
    """Refuse a search for a metric that the validations of a run that is over do not have.

    Raises:
        SpecError: there are validations, and they have others.
    """
    known = {name for validation in run.validations for name in validation["metrics"]}
    if known and metric not in known:
        raise SpecError(
            f"search.metric = {metric!r}: no validation of {run.path} reports that. "
            f"{near_miss(metric, known)}"
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def best_of(told: Mapping[int, ToldTrial], upwards: bool, count: int = 1) -> list[int]:
    """Numbers of the best completed trials, the best first; of equal ones the first."""
    sign = -1.0 if upwards else 1.0
    done = [
        (sign * each.result.value, number)
        for number, each in told.items()
        if each.result.state == "completed" and each.result.value is not None
    ]
    return [number for _, number in sorted(done)[:count]]
