"""Gives a flow to a pool, or once more what has failed of it.

Ways in: `submit_flow`, `run_again`.
"""

from __future__ import annotations

import getpass
import hashlib
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from instep.client.job_checks import check_job
from instep.errors import (
    InstepError,
    RunError,
    SpecError,
    WorkerError,
    near_miss,
    one_line,
    own_line,
)
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.plain_file import PRIVATE, create_plain, read_plain, replace_plain
from instep.pool.flow_file import METRICS, FlowJob, FlowSpec, flow_of, memory_of, when_of
from instep.pool.jobs import (
    COMMAND,
    ENDED,
    AgainAsked,
    FlowNeeds,
    FlowSubmitted,
    PoolJob,
    ResultTest,
)
from instep.pool.pool_file import PoolFolder
from instep.pool.requests import ask, check_key
from instep.pool.submit import (
    bounds_of,
    check_machine,
    check_memory,
    check_share,
    chosen_every,
    is_for_one_machine,
    like_of,
    loaded,
)
from instep.store.folder import numbered


class FlowSent(NamedTuple):
    """A flow that a pool has."""

    name: str
    jobs: tuple[str, ...]
    """The ids of its jobs."""
    new: bool


def submit_flow(
    pool: PoolFolder, path: Path, *, priority: int = 0, share: str = "", key: str = ""
) -> FlowSent:
    """Leave all jobs of a flow for the pool's scheduler, in one request.

    Args:
        pool: which has a folder.
        path: of the flow's file.
        priority, share, key: as for a job; what the file says of a job comes first.

    Raises:
        SpecError: the flow or one of its jobs is wrong, or can never run here.
    """
    check_key(key)
    spec = flow_of(path)
    share = share or getpass.getuser()
    check_share("--share", share)
    jobs = _jobs(path, spec)
    _check_metrics(path, spec, jobs)
    if pool.spec.hosts and len(jobs) < len(spec.job):
        check_machine(pool, "a command", where=str(path))
    for each, job in jobs.items():  # refused ones take no name
        asked = spec.job[each]
        where = f"{path}: [job.{each}]"
        least, _ = bounds_of(pool, job, asked.at_least, asked.at_most, asked.share or share, where)
        local = is_for_one_machine(job)
        check_memory(pool, least, memory_of(asked), f"{where} memory", local=local)
    known = pool.state().jobs
    name, new = _claimed(pool, spec, path, key, known)
    wanted = [
        _pool_job(pool, path, spec, jobs, name, each, priority=priority, share=share)
        for each in spec.job
    ]
    ids = tuple(job.id for job in wanted)
    if new or not any(id in known for id in ids):  # else one was killed in between
        for each, job in jobs.items():
            text = spec_file.dump(msgspec.structs.replace(job, name=f"{name}-{each}"))
            replace_plain(pool.jobs / f"{name}-{each}.toml", text, durable=True)
        ask(pool.folder, FlowSubmitted(name, tuple(wanted)))
    return FlowSent(name, ids, new)


def run_again(pool: PoolFolder, path: Path, *, key: str = "") -> FlowSent:
    """Run once more what has not completed of the newest flow of a file.

    Returns:
        The flow, with the jobs that run again.

    Raises:
        RunError: there is no such flow, or nothing of it has failed.
        SpecError: a job of it is another one now.
    """
    spec = flow_of(path)
    known = pool.state().jobs.values()
    base = f"{spec.name}-{key}" if key else spec.name
    flows = {
        job.flow: job.submitted
        for job in known
        if job.flow and (job.flow == base or (not key and _is_numbered(job.flow, base)))
    }
    if not flows:
        raise RunError(f"the pool has no flow {base!r} yet. Submit it without --again.")
    flow = max(flows, key=lambda name: flows[name])
    mine = [job for job in known if job.flow == flow]
    ids = tuple(job.id for job in mine if job.status == ENDED and not job.succeeded)
    if not ids:
        raise RunError(f"nothing of {flow} has failed: all that has ended of it is completed.")
    _check_same(pool, path, spec, flow, [job.id for job in mine])
    ask(pool.folder, AgainAsked(ids))
    return FlowSent(flow, ids, False)


def _jobs(path: Path, spec: FlowSpec) -> dict[str, JobSpec]:
    """The jobs of a flow that are no commands."""
    found = {}
    for name, each in spec.job.items():
        if each.file:
            job = loaded(path.parent / each.file, each.set)
            if job.search.space:
                raise SpecError(
                    f"{path}: [job.{name}] file has [search.space], and a search is no part of a "
                    "flow. Submit it alone, or write command = ['instep', 'search', ...]."
                )
            check_job(job)
            found[name] = job
    return found


def _check_metrics(path: Path, spec: FlowSpec, jobs: Mapping[str, JobSpec]) -> None:
    """Refuse a test of a metric that nobody reports; imports recipes only if there is such a test.

    Raises:
        SpecError: names it.
        RecipeError: a recipe cannot be called.
        WorkerError: it raised an exception.
    """
    known: dict[str, list[str]] = {}
    for name, each in spec.job.items():
        for test in when_of(f"{path}: [job.{name}]", each).tests:
            if not test.figure.startswith(METRICS):
                continue
            if test.job not in known:
                known[test.job] = _metrics_of(jobs[test.job], f"{path}: [job.{test.job}]")
            metric = test.figure.removeprefix(METRICS)
            if metric not in known[test.job]:
                raise SpecError(
                    f"{path}: [job.{name}] when: no validation of {test.job} reports {metric!r}. "
                    f"{near_miss(metric, known[test.job])}"
                )


def _metrics_of(job: JobSpec, where: str) -> list[str]:
    from instep.recipe.build import call
    from instep.recipe.source_file import load_function

    try:
        recipe = call(load_function(job.recipe, places=job.python_path), job.arguments, job.seed)
    except InstepError:
        raise
    except (Exception, SystemExit) as error:
        place, _ = own_line(error)
        raise WorkerError(
            f"{where}: its recipe raised {type(error).__name__}: {one_line(error)} ({place})."
        ) from None
    if recipe.validate is None and job.data.validation is None and job.data.folds is None:
        return []
    return ["loss", *recipe.metrics]


def _pool_job(
    pool: PoolFolder,
    path: Path,
    spec: FlowSpec,
    jobs: Mapping[str, JobSpec],
    flow: str,
    name: str,
    *,
    priority: int,
    share: str,
) -> PoolJob:
    each, where = spec.job[name], f"{path}: [job.{name}]"
    share = each.share or share
    more: dict[str, object] = {}
    if each.command:
        least = most = unit = 1
        words = [_with_runs(pool, word, flow, jobs) for word in each.command]
        like = "\0".join((str(path.parent.resolve()), *each.command))
        more = {"command": tuple(words), "folder": str(path.parent.resolve()), "kind": COMMAND}
        more |= {"local": True}
        more |= {"like": hashlib.sha256(like.encode()).hexdigest()[:16]}
    else:
        unit = jobs[name].mesh.ranks
        least, most = bounds_of(pool, jobs[name], each.at_least, each.at_most, share, where)
        more = {"saves": chosen_every(path.parent / each.file, each.set)}
        more |= {"like": like_of(jobs[name]), "memory": memory_of(each)}
        more |= {"local": is_for_one_machine(jobs[name])}
    return PoolJob(
        id=f"{flow}-{name}",
        share=share,
        at_least=least,
        at_most=most,
        unit=unit,
        priority=priority if each.priority is None else each.priority,
        submitted=time.time(),
        flow=flow,
        needs=_needs(where, each, flow),
        **more,  # type: ignore[arg-type]
    )


def _needs(where: str, each: FlowJob, flow: str) -> FlowNeeds | None:
    if not each.after:
        return None
    when = when_of(where, each)
    tests = tuple(ResultTest(f"{flow}-{t.job}", t.figure, t.sign, t.value) for t in when.tests)
    return FlowNeeds(tuple(f"{flow}-{name}" for name in each.after), when.outcome, tests)


def _with_runs(pool: PoolFolder, word: str, flow: str, jobs: Mapping[str, JobSpec]) -> str:
    """A word of a command, with the run folder of a job where it has `{NAME}`."""
    for name in jobs:
        word = word.replace(f"{{{name}}}", str(pool.runs / f"{flow}-{name}"))
    return word


def _claimed(
    pool: PoolFolder, spec: FlowSpec, path: Path, key: str, known: Mapping[str, PoolJob]
) -> tuple[str, bool]:
    """A name for a flow that no other has, nor one of its jobs; with a key it always has the same.

    Raises:
        SpecError: a job that is none of this flow has the name of one.
    """
    for name in iter([f"{spec.name}-{key}"]) if key else numbered(spec.name):
        ids = [f"{name}-{each}" for each in spec.job]
        if not key and any(id in known or _has_files(pool, id) for id in ids):
            continue
        for id in ids:
            if id in known and known[id].flow != name:
                raise SpecError(
                    f"{path}: the pool has another job that is called {id}. Give another --key."
                )
        file = pool.jobs / f"{name}.flow"
        try:
            create_plain(file, str(path.resolve()), PRIVATE)
        except FileExistsError:
            continue
        except OSError as error:
            raise RunError(f"{file} cannot be written: {error.strerror}.") from None
        return name, True
    return f"{spec.name}-{key}", False


def _has_files(pool: PoolFolder, id: str) -> bool:
    return (pool.jobs / f"{id}.toml").exists() or (pool.runs / id).exists()


def _is_numbered(name: str, base: str) -> bool:
    return name.startswith(f"{base}-") and name.removeprefix(f"{base}-").isdecimal()


def _check_same(
    pool: PoolFolder, path: Path, spec: FlowSpec, flow: str, ids: Collection[str]
) -> None:
    """Refuse a flow whose jobs are others now than those that were submitted.

    Raises:
        SpecError: names one.
    """
    new = "Submit it without --again, as a new flow."
    if {*ids} != {f"{flow}-{name}" for name in spec.job}:
        raise SpecError(f"{path} has other jobs now than {flow}. {new}")
    for name, job in _jobs(path, spec).items():
        id = f"{flow}-{name}"
        text = spec_file.dump(msgspec.structs.replace(job, name=id))
        if text != read_plain(pool.jobs / f"{id}.toml").decode():
            raise SpecError(f"{path}: {name} is another job now than in {flow}. {new}")
