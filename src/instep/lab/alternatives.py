"""The jobs that `instep compare` runs: the unchanged one, and one for each `--with`.

All of them take the same number of samples. Whatever can be refused is refused here, before
anything starts. Way in: `alternatives_of`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from instep.client.job_checks import check_job
from instep.errors import InstepError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.store.folder import numbered

UNCHANGED = "unchanged"
"""The name of the job as it is."""

_LENGTH = ("train.steps", "train.epochs", "train.stop_after_steps")
_TEXT_OR_BRACKET = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[\[\](){},]")


class Alternative(NamedTuple):
    """One of the jobs."""

    name: str
    """What was given with it, such as `sync.codec=int8`."""
    folder: str
    """The same, fit for the name of a run."""
    job: JobSpec
    left_out: Sequence[str] = ()
    """Which values of the job file it does not have, a sentence each."""


def alternatives_of(
    file: Path, overrides: Sequence[str], changes: Iterable[str]
) -> list[Alternative]:
    """The unchanged job, and each alternative with as many samples.

    Args:
        file: of the job.
        overrides: `section.key=value`, for all of them.
        changes: for each alternative what it changes: `section.key=value`, several with commas
            between them.

    Raises:
        InstepError: one of them cannot be run, or is not another job; the text says which and why.
    """
    base = spec_file.load(file, overrides)
    check_job(base)
    found = [Alternative(UNCHANGED, UNCHANGED, base)]
    for text in changes:
        try:
            job, left = _changed(file, overrides, text)
            job = same_samples(job, base)
            job = msgspec.structs.replace(job, name=base.name)  # another name is no other job
            check_job(job)
        except InstepError as error:
            raise type(error)(f"--with {text}: {error}") from None
        for other in found:
            if other.job == job:
                raise SpecError(f"--with {text}: the same job as {other.name}. Leave it out.")
        plain = re.sub(r"[^A-Za-z0-9.]+", "-", text)[:60].strip("-.")
        taken = [other.folder for other in found]
        folder = next(name for name in numbered(plain) if name not in taken)
        found.append(Alternative(text, folder, job, left))
    if len(found) == 1:
        raise SpecError("nothing to compare: give an alternative, such as --with sync.codec=int8.")
    return found


def _changed(file: Path, overrides: Sequence[str], text: str) -> tuple[JobSpec, list[str]]:
    """The job of an alternative, and what of the job file it leaves out."""
    parts = split(text)
    for part in parts:
        key, equals, _ = part.partition("=")
        if not equals:
            raise SpecError(
                f"{part!r} is not of the form section.key=value. A value that has commas is "
                "written in quotes, as in a job file."
            )
        if key.strip() in _LENGTH:
            raise SpecError(
                f"{key.strip()} is the same for all, so that they take the same samples. Change "
                f"it for all: --set {part}"
            )
    left: list[str] = []
    return spec_file.load(file, overrides, parts, left.append), left


def split(text: str) -> list[str]:
    """`a.b=1,c.d=[2,3]` to `a.b=1` and `c.d=[2,3]`: at commas outside of quotes and brackets."""
    parts, begin, depth = [], 0, 0
    for match in _TEXT_OR_BRACKET.finditer(text):
        depth += (match[0] in "[({") - (match[0] in "])}")
        if match[0] == "," and depth == 0:
            parts.append(text[begin : match.start()])
            begin = match.end()
    return [part.strip() for part in [*parts, text[begin:]]]


def same_samples(job: JobSpec, base: JobSpec) -> JobSpec:
    """The job, with its steps changed so that they take as many samples as those of `base`.

    What happens every so many steps happens after as many samples too, as nearly as it can.

    Raises:
        SpecError: they are not a whole number of its steps.
    """
    mine, theirs = job.per_commit.global_batch, base.per_commit.global_batch
    if (mine, job.start_after) == (theirs, base.start_after):
        return job
    lengths = {}
    for key in ("steps", "stop_after_steps"):
        lengths[key] = steps = getattr(base.train, key)
        if steps:
            lengths[key] = _as_long(job, base, steps)
        if lengths[key] is None and steps:
            fitting = (each for each in range(1, 2 * steps + mine) if _as_long(job, base, each))
            near = min(fitting, key=lambda each: abs(each - steps))
            raise SpecError(
                f"a step takes {mine} samples instead of {theirs}, and train.{key} = {steps} of "
                f"those are not a whole number of these. For all: --set train.{key}={near}"
            )
    every = _nearest(base.train.validate_every, theirs, mine)
    saved = job.checkpoint.every
    if isinstance(saved, int):
        saved = _nearest(saved, theirs, mine)
    return msgspec.structs.replace(
        job,
        train=msgspec.structs.replace(job.train, validate_every=every, **lengths),
        checkpoint=msgspec.structs.replace(job.checkpoint, every=saved),
    )


def _as_long(job: JobSpec, base: JobSpec, steps: int) -> int | None:
    """How many steps of a job take as many samples as so many of `base`; None if no number does."""
    early = min(steps, base.start_after)
    samples = early * base.train.global_batch
    samples += (steps - early) * base.per_commit.global_batch
    rounds, rest = divmod(
        samples - job.start_after * job.train.global_batch, job.per_commit.global_batch
    )
    return None if rest or rounds < 0 else job.start_after + rounds


def _nearest(steps: int, theirs: int, mine: int) -> int:
    return max(1, round(steps * theirs / mine)) if steps else 0
