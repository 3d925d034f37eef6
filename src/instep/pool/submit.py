"""Gives a job to a pool. Ways in: `submit`, `cancel`."""

from __future__ import annotations

import getpass
import re
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

from instep.client.job_checks import check_job
from instep.errors import RunError, SpecError, near_miss
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import PRIVATE, create_plain
from instep.pool.jobs import RUN, SEARCH, CancelAsked, JobSubmitted, PoolJob
from instep.pool.pool_file import PoolFolder
from instep.pool.requests import ask
from instep.search.plan import base_of, check_space
from instep.store.folder import numbered

_KEY = re.compile(r"[A-Za-z0-9._-]+")


def submit(
    pool: PoolFolder,
    path: Path,
    overrides: Collection[str] = (),
    *,
    priority: int = 0,
    at_least: int | None = None,
    at_most: int | None = None,
    share: str = "",
    key: str = "",
) -> tuple[str, bool]:
    """Leave a job for the pool's scheduler.

    Args:
        pool: which has a folder.
        path: of the job file.
        overrides: `section.key=value`.
        priority: within its share; larger comes first.
        at_least: workers without which it does not run; by default those of one replica.
        at_most: workers that it can use; by default as many as there is work for.
        share: of whom it uses the share; by default the user's name.
        key: the same key twice is one job.

    Returns:
        Its id, which is also the name of its run; and whether it is a new one.

    Raises:
        SpecError: the job is wrong, or can never run here.
    """
    job = spec_file.load(path, overrides)
    kind = SEARCH if job.search.space else RUN
    if kind == SEARCH:
        job = base_of(path, overrides)
        check_space(job)
    job = settled(job)
    check_job(job)
    share = share or getpass.getuser()
    least, most = bounds_of(pool, job, at_least, at_most, share)
    check_key(key)
    name, new = _written(pool, job, key)
    if new or name not in pool.state().jobs:  # one that was killed in between has left a file
        wanted = PoolJob(
            id=name,
            share=share,
            at_least=least,
            at_most=most,
            unit=job.mesh.ranks,
            kind=kind,
            priority=priority,
            submitted=time.time(),
            key=key,
        )
        ask(pool.folder, JobSubmitted(wanted))
    return name, new


def cancel(pool: PoolFolder, job: str) -> PoolJob:
    """Stop a job for good: at its next commit, saved, if it runs.

    Returns:
        The job as it was.

    Raises:
        RunError: there is no such job, or it has ended.
    """
    known = pool.state().jobs
    if job not in known:
        raise RunError(f"the pool has no job {job!r}. {near_miss(job, known)}")
    if known[job].outcome:
        raise RunError(f"{job} has ended: it is {known[job].outcome}.")
    ask(pool.folder, CancelAsked(job))
    return known[job]


def check_key(key: str) -> None:
    """Refuse a key that cannot be part of a file's name.

    Raises:
        SpecError: it says what a key can have.
    """
    if key and not _KEY.fullmatch(key):
        raise SpecError(f"--key {key!r}: letters, digits, '.', '_' and '-' only.")


def bounds_of(
    pool: PoolFolder, job: JobSpec, at_least: int | None, at_most: int | None, share: str
) -> tuple[int, int]:
    """The least and the most workers of a job.

    Raises:
        SpecError: it can never have them.
    """
    unit, cores, trials = job.mesh.ranks, pool.empty.cores, 1
    if job.search.space:
        trials = min(job.search.trials, job.search.width)
    usable = trials * job.most_workers
    least = at_least if at_least is not None else unit
    most = at_most if at_most is not None else usable
    for name, value in (("--at-least", least), ("--at-most", most)):
        if value < 1 or value % unit or value > usable:
            raise SpecError(
                f"{name} {value}: this job can have 1 to {usable} workers"
                + (f", in multiples of {unit}." if unit > 1 else ".")
            )
    if least > most:
        raise SpecError(f"--at-least {least} is more than --at-most {most}.")
    room = min(cores, pool.empty.limits.get(share, cores))
    if least > room:
        raise SpecError(
            f"--at-least {least}: share {share} of this pool has at most {room} workers. Ask for "
            "fewer, or start the pool with more."
        )
    return least, most


def settled(job: JobSpec) -> JobSpec:
    """The job as a pool runs it: on this machine, a thread for each worker."""
    if job.launch.launcher != "local":
        raise SpecError(
            f"a pool runs its jobs on this machine, and the job has launch.on = "
            f"{job.launch.launcher!r}. Leave it out."
        )
    replace = msgspec.structs.replace
    if not job.train.threads:
        job = replace(job, train=replace(job.train, threads=1))
    return job


def _written(pool: PoolFolder, job: JobSpec, key: str) -> tuple[str, bool]:
    """Write the job's file under a name of its own; with a key it always has the same name."""
    names = iter([f"{job.name}-{key}"]) if key else numbered(job.name)
    for name in names:
        if not key and (pool.runs / name).exists():
            continue
        text = spec_file.dump(msgspec.structs.replace(job, name=name))
        try:
            create_plain(pool.jobs / f"{name}.toml", text, PRIVATE)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{pool.jobs / name}.toml: {error.strerror}.") from None
        return name, True
    return f"{job.name}-{key}", False
