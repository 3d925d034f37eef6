"""Gives a job to a pool. Ways in: `submit`, `cancel`."""

from __future__ import annotations

import getpass
import hashlib
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from instep.client.job_checks import check_job
from instep.errors import RunError, SpecError, near_miss
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import PRIVATE, create_plain
from instep.pool.hosts.free_places import local_cores
from instep.pool.hosts.placement import refusal
from instep.pool.jobs import RUN, SEARCH, CancelAsked, JobSubmitted, PoolJob
from instep.pool.pool_file import PoolFolder
from instep.pool.requests import ask, check_key, claim_key
from instep.store.folder import numbered
from instep.units import readable_bytes

LONGEST_SHARE = 80

EVERY = "30s"
"""Between checkpoints of a job that does not say `checkpoint.every`: so much is computed again if
its client is killed."""


class JobSent(NamedTuple):
    """A job that a pool has."""

    id: str
    """Also the name of its run."""
    new: bool
    saves: str
    """Between its checkpoints, where the pool has chosen that; else empty."""


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
    memory: int = 0,
) -> JobSent:
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
        memory: bytes that a worker needs on a host of the pool; 0: nobody counts them.

    Raises:
        SpecError: the job is wrong, or can never run here.
    """
    job, saves = loaded(path, overrides), chosen_every(path, overrides)
    kind = SEARCH if job.search.space else RUN
    if kind == SEARCH:
        from instep.search.plan import base_of, check_space  # with all of numpy

        job = settled(base_of(path, overrides))
        check_space(job)
    check_job(job)
    share = share or getpass.getuser()
    check_share("--share", share)
    least, most = bounds_of(pool, job, at_least, at_most, share)
    check_key(key)
    check_memory(pool, least, memory, local=is_for_one_machine(job))
    name, new = _written(pool, job, key, known := pool.state().jobs)
    if new or name not in known:  # one that was killed in between has left a file
        wanted = PoolJob(
            id=name,
            share=share,
            at_least=least,
            at_most=most,
            unit=unit_of(job),
            kind=kind,
            priority=priority,
            submitted=time.time(),
            key=key,
            saves=saves,
            memory=memory,
            local=is_for_one_machine(job),
            like=like_of(job),
        )
        ask(pool.folder, JobSubmitted(wanted))
    return JobSent(name, new, saves)


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


def check_share(where: str, share: str) -> None:
    """Refuse the name of a share that no line can show.

    Args:
        where: it is given.
        share: the name.

    Raises:
        SpecError: it says what a name can have.
    """
    if not share.isprintable() or len(share) > LONGEST_SHARE:
        raise SpecError(
            f"{where} {share!r}: a share's name has at most {LONGEST_SHARE} characters, and no "
            "line breaks or other control characters."
        )


def check_memory(
    pool: PoolFolder, least: int, memory: int, where: str = "--memory", *, local: bool = False
) -> None:
    """Refuse a job whose workers can never have their memory, not even if it were alone.

    Args:
        pool: whose hosts they have to fit.
        least: workers without which it does not run.
        memory: bytes of each.
        where: that is asked for.
        local: whether it runs on the scheduler's machine alone.

    Raises:
        SpecError: it says how many could.
    """
    job = PoolJob(id="", share="", at_least=least, at_most=least, memory=memory, local=local)
    if memory and not pool.spec.hosts:
        raise SpecError(f"{where}: this pool has no hosts, and counts cores alone. Leave it out.")
    if memory and (why := refusal(pool.empty, job)):
        raise SpecError(f"{where} {readable_bytes(memory)}: {why}.")


def bounds_of(
    pool: PoolFolder,
    job: JobSpec,
    at_least: int | None,
    at_most: int | None,
    share: str,
    where: str = "",
) -> tuple[int, int]:
    """The least and the most workers of a job.

    Args:
        pool: whose cores and limits they have to fit.
        job: of which they are.
        at_least, at_most: as they are asked for.
        share: of the job.
        where: they are asked for, in a file of which the sentences are to speak.

    Raises:
        SpecError: it can never have them.
    """
    unit, cores, usable = unit_of(job), pool.empty.cores, job.most_workers
    if job.search.space:
        most = unit if _has_fixed_trials(job) else job.most_workers
        usable = min(job.search.count, job.search.width) * most
    if is_for_one_machine(job) and pool.spec.hosts:
        what = f"a mesh of {job.mesh.ranks} ranks" if job.mesh.ranks > 1 else "a search"
        cores = check_machine(pool, what, unit)
        at_most = None if at_most is None else max(unit, min(at_most, cores // unit * unit))
        usable = min(usable, cores // unit * unit)
    least = at_least if at_least is not None else unit
    most = at_most if at_most is not None else usable
    names = [f"{where} at_{each} =" if where else f"--at-{each}" for each in ("least", "most")]
    for name, value in zip(names, (least, most), strict=True):
        if value < 1 or value % unit or value > usable:
            raise SpecError(
                f"{name} {value}: this job can have 1 to {usable} workers"
                + (f", in multiples of {unit}." if unit > 1 else ".")
            )
    if least > most:
        raise SpecError(f"{names[0]} {least} is more than {names[1]} {most}.")
    room = min(cores, pool.empty.limits.get(share, cores))
    if least > room:
        raise SpecError(
            f"{names[0]} {least}: share {share} of this pool has at most {room} workers. Ask for "
            "fewer, or start the pool with more."
        )
    return least, most


def unit_of(job: JobSpec) -> int:
    """The workers of which a job has a multiple: of a replica, or of a trial that has as many as
    its job says."""
    return job.workers if _has_fixed_trials(job) else job.mesh.ranks


def _has_fixed_trials(job: JobSpec) -> bool:
    return bool(job.search.space) and job.train.determinism != "bits"


def is_for_one_machine(job: JobSpec) -> bool:
    """Whether a pool runs all processes of a job on its scheduler's machine."""
    return bool(job.search.space) or job.mesh.ranks > 1


def check_machine(pool: PoolFolder, what: str, cores: int = 1, where: str = "") -> int:
    """Refuse a job of one machine where that is no host of the pool, or too small.

    Args:
        pool: that has hosts.
        what: the job is.
        cores: that it needs.
        where: it is asked for, in a file.

    Returns:
        The cores that it can have.

    Raises:
        SpecError: it says what to do.
    """
    found = local_cores(pool.empty)
    if found < cores:
        has = f", which gives {found} cores" if found else ""
        raise SpecError(
            f"{where}{': ' if where else ''}this pool has hosts, and {what} runs on one machine "
            f"there, that of the scheduler{has}. Make that a host that is large enough, with start "
            "= 'env' in its [hosts.NAME], or submit to a pool without hosts."
        )
    return found


def chosen_every(path: Path, overrides: Collection[str] = ()) -> str:
    """The `checkpoint.every` that a pool chooses for a job; empty if the job has its own."""
    section = spec_file.read_table(path).get("checkpoint", {})
    told = any(each.partition("=")[0].strip() == "checkpoint.every" for each in overrides)
    return "" if told or not isinstance(section, dict) or "every" in section else EVERY


def loaded(path: Path, overrides: Collection[str] = ()) -> JobSpec:
    """Read a job as a pool runs it: also saved in between, whatever its length.

    Raises:
        SpecError: the job is wrong, or not for a pool.
    """
    every = chosen_every(path, overrides)
    more = [f'checkpoint.every="{every}"'] if every else []
    return settled(spec_file.load(path, [*more, *overrides]))


def like_of(job: JobSpec) -> str:
    """A text that jobs share which need the same time: they differ in name and seed at most."""
    same = msgspec.structs.replace(job, name=JobSpec(recipe=job.recipe).name, seed=0)
    return hashlib.sha256(spec_file.dump(same).encode()).hexdigest()[:16]


def settled(job: JobSpec) -> JobSpec:
    """The job as a pool runs it: where there is room, a thread for each worker."""
    if job.launch.launcher != "local":
        raise SpecError(
            f"a pool says where its jobs run, and the job has launch.on = "
            f"{job.launch.launcher!r}. Leave it out."
        )
    replace = msgspec.structs.replace
    if not job.train.threads:
        job = replace(job, train=replace(job.train, threads=1))
    return job


def _written(
    pool: PoolFolder, job: JobSpec, key: str, known: Mapping[str, PoolJob]
) -> tuple[str, bool]:
    """Write the job's file under a name that none of the known ones has; with a key it always has
    the same name."""
    if key:
        claim_key(pool.jobs, key, f"{job.name}-{key}", known)
    names = iter([f"{job.name}-{key}"]) if key else numbered(job.name)
    for name in names:
        if not key and (name in known or (pool.runs / name).exists()):
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
