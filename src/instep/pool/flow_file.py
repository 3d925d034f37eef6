"""The file of a flow: jobs and commands, and what each waits for. Way in: `flow_of`.

All that can be wrong with it is refused here, but for metrics, of which only a recipe knows
(`flow_submit.py`).
"""

from __future__ import annotations

import math
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import msgspec

from instep.errors import SpecError, near_miss
from instep.job.file import read_table
from instep.pool.flows import AFTER_END, COMPLETED, FAILED, SIGNS
from instep.units import bytes_in

OF_A_RUN = ("loss", "steps", "epochs", "samples", "seconds", "samples_per_second")
"""Figures of every run; those of its last validation are `metrics.NAME`."""

OF_A_COMMAND = ("seconds",)

METRICS = "metrics."

_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}", re.A)
_TEST = re.compile(r"([\w-]+)\.([\w./-]+)\s*(>=|<=|==|!=|>|<)\s*(\S+)")


class FlowJob(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One job of a flow, as its file has it."""

    file: str = ""
    """A job file, relative to that of the flow; or else `command`."""
    command: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    """Overrides of the job file, `section.key=value`."""
    after: tuple[str, ...] = ()
    """Names of jobs of the flow."""
    when: str = COMPLETED
    at_least: int | None = None
    at_most: int | None = None
    memory: str = ""
    """Memory of a worker on a host of the pool, such as `"4GB"`; empty: nobody counts it."""
    priority: int | None = None
    share: str = ""


class FlowSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file of a flow."""

    job: dict[str, FlowJob]
    name: str = ""
    """By default that of the file."""


class WhenTest(NamedTuple):
    """A figure of a job before, compared with a number."""

    job: str
    figure: str
    sign: str
    value: float


class When(NamedTuple):
    """Needs of a job, of those before it."""

    outcome: str
    tests: tuple[WhenTest, ...] = ()


def is_flow(path: Path) -> bool:
    """Whether a file is that of a flow; False also if it cannot be read."""
    try:
        table = read_table(path)
    except SpecError:
        return False
    return isinstance(table.get("job"), dict) and "recipe" not in table


def flow_of(path: Path) -> FlowSpec:
    """Read a flow's file.

    Raises:
        SpecError: it is not what a flow can be.
    """
    try:
        spec = msgspec.convert(read_table(path, "flow file"), FlowSpec)
    except msgspec.ValidationError as error:
        raise SpecError(f"{path} is not the file of a flow: {error}.") from None
    spec = msgspec.structs.replace(spec, name=spec.name or path.stem)
    for name in (spec.name, *spec.job):
        if not _NAME.fullmatch(name):
            raise SpecError(
                f"{path}: {name!r}: a name has letters, digits, '_' and '-' only, 80 at most."
            )
    if not spec.job:
        raise SpecError(f"{path} has no job: write a [job.NAME] for each.")
    for name, job in spec.job.items():
        _check(path, spec, name, job)
    try:
        order = TopologicalSorter(
            {name: job.after for name, job in spec.job.items()}
        ).static_order()
        jobs = {name: spec.job[name] for name in order}
    except CycleError as error:
        circle = " after ".join(reversed(error.args[1]))
        raise SpecError(f"{path} has a circle: {circle}. Leave one `after` out.") from None
    return msgspec.structs.replace(spec, job=jobs)


def memory_of(job: FlowJob) -> int:
    """Bytes that a worker of a job needs on a host; 0: nobody counts them.

    Raises:
        ValueError: its `memory` is no size.
    """
    return bytes_in(job.memory) if job.memory else 0


def when_of(where: str, job: FlowJob) -> When:
    """Needs of a job, of those before it.

    Raises:
        SpecError: its `when` is none.
    """
    if job.when in (COMPLETED, FAILED, AFTER_END):
        return When(job.when)
    tests = [_test(where, job, text.strip()) for text in job.when.split(" and ")]
    return When(COMPLETED, tuple(tests))


def _check(path: Path, spec: FlowSpec, name: str, job: FlowJob) -> None:
    where = f"{path}: [job.{name}]"
    if bool(job.file) == bool(job.command):
        raise SpecError(f"{where} needs a `file` or a `command`, one of them.")
    if not job.share.isprintable():
        raise SpecError(f"{where} share = {job.share!r}: has a line break or a control character.")
    if any("\0" in word for word in job.command):
        raise SpecError(f"{where} command: a word has a NUL character, which no program can get.")
    for key in ("set", "at_least", "at_most", "memory"):
        if job.command and getattr(job, key):
            raise SpecError(f"{where} {key}: a command has one worker, and no keys. Leave it out.")
    try:
        memory_of(job)
    except ValueError as error:
        raise SpecError(f"{where} memory: {error}.") from None
    for other in job.after:
        if other not in spec.job:
            raise SpecError(
                f"{where} after: no job is called {other!r}. {near_miss(other, spec.job)}"
            )
    if job.when != COMPLETED and not job.after:
        raise SpecError(f"{where} when = {job.when!r}: needs `after`, with the job that it means.")
    for test in when_of(where, job).tests:
        before = spec.job[test.job]
        known = OF_A_COMMAND if before.command else OF_A_RUN
        metric = not before.command and test.figure.startswith(METRICS)
        if test.figure not in known and not metric:
            more = "" if before.command else ", and metrics.NAME of its validations"
            raise SpecError(
                f"{where} when: {test.job} reports no {test.figure!r}; it reports "
                f"{', '.join(known)}{more}."
            )


def _test(where: str, job: FlowJob, text: str) -> WhenTest:
    found, wanted = _TEST.fullmatch(text), f"{COMPLETED!r}, {FAILED!r}, {AFTER_END!r}"
    try:
        if found is None or found[3] not in SIGNS:
            raise ValueError
        value = float(found[4])
        if not math.isfinite(value):
            raise ValueError
    except ValueError:
        raise SpecError(
            f"{where} when = {job.when!r}: needs {wanted}, or a test such as "
            "'train.metrics.accuracy >= 0.95'; several are joined by ' and '."
        ) from None
    if found[1] not in job.after:
        known = near_miss(found[1], job.after)
        raise SpecError(f"{where} when: {found[1]!r} is not one of its `after`. {known}")
    return WhenTest(found[1], found[2], found[3], value)
