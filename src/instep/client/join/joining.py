"""`instep.join`: makes this process a worker of a run.

Process 0 also starts the master, a process of its own, and watches it in a thread (`hosting.py`).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from instep.client.job_checks import check_job, with_options
from instep.client.join import placement, refusal
from instep.client.join.hosting import Host
from instep.client.join.meet import meet
from instep.client.join.meeting import Meeting
from instep.client.join.participation import Participation
from instep.client.join.rendezvous import meeting_at
from instep.client.join.script import print_job_if_asked
from instep.client.join.session import Session
from instep.client.keywords import tables
from instep.errors import SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.process import Script
from instep.recipe.quick_start import spare_dynamo
from instep.recipe.recipe import Recipe
from instep.system.kernels import per_machine

JOIN = ("name", "runs", "arguments", "seed", "quiet", "network", "resume", "token_file")
"""Keywords of `join` beside the tables of a job."""


def join(
    recipe: Callable[..., Any] | Recipe | None = None,
    *,
    name: str | None = None,
    runs: str | Path = "runs",
    arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    quiet: bool = False,
    network: str = "loopback",
    resume: bool = False,
    rendezvous: str | None = None,
    token_file: str | Path | None = None,
    **sections: Mapping[str, Any],
) -> Session:
    """Become a worker of a run, together with the other processes of this start.

    Their number, and the rank of this one, are read from the environment (torchrun, Slurm, Open
    MPI); a process that was started alone trains alone. In a script that `instep run` started,
    this process is a worker already, and its job is these arguments with the changes of the
    command line.

    All random generators are seeded from `seed` before this returns, so a model that is built next
    is the same in every process.

    Args:
        recipe: what to train, or the function that makes it; None for your own loop.
        name: of the run and its folder.
        runs: folder of run folders. That of process 0 counts; without `rendezvous` all
            processes must see it.
        arguments: handed to the recipe function by name.
        seed: decides the order of the data, first parameters, every draw.
        quiet: print no progress.
        network: `private` if only trusted machines reach the hosts' network: nothing is encrypted.
        resume: continue the run of this name from its newest checkpoint, if there is one;
            the number of processes may have changed. With a recipe, a complete run is no
            error: `steps()` yields nothing.
        rendezvous: `host:port` of the machine of process 0, where the others find it if the hosts
            share no folder. By default what INSTEP_RENDEZVOUS says.
        token_file: with what they prove that they belong together; process 0 makes it, and each
            other host has a copy. By default what INSTEP_TOKEN_FILE says.
        sections: tables of the job file: `train={"epochs": 3}`, `sync={...}`.

    Raises:
        InstepError: the job is wrong, the run cannot be resumed, or the processes cannot
            train together. Every process raises what process 0 finds.
    """
    spare_dynamo()
    sections = tables("instep.join", JOIN, sections)
    print_job_if_asked(name, seed, network, arguments, sections)
    if Script.started is not None:
        return _within_script(Script.started, recipe)
    place = placement.placement()
    meeting = meeting_at(place, Path(runs), rendezvous, token_file)
    with refusal.announced(place, meeting):
        meeting.enter()
        job = _job(recipe, name, arguments, seed, network, sections, place.size)
        _check_processes(job)
        check_job(job, resumed=resume)
    return _meet(place, meeting, job, recipe, runs=Path(runs), quiet=quiet, resume=resume)


def _meet(
    place: placement.Placement,
    meeting: Meeting,
    job: JobSpec,
    recipe: Callable[..., Any] | Recipe | None,
    *,
    runs: Path,
    quiet: bool,
    resume: bool,
) -> Session:
    """Begin the session of this process: process 0 starts the master, and the others find it."""
    host = None
    if place.rank == 0:
        own_loop = recipe is None
        host = Host(place, job, runs, meeting, quiet=quiet, resume=resume, own_loop=own_loop)
        member = host.member()
    else:
        member = meet(meeting, place.rank)
        meeting.close()
    member.show_itself()
    part = Participation(member, place, host)
    try:
        if not resume:  # a run that continues has the job that it had
            check_same(with_options(job), member.job, place.rank)
        part.begin(recipe)
    except BaseException as error:
        part.fail(error)
        raise
    return Session(part)


def _check_processes(job: JobSpec) -> None:
    """Refuse a job whose processes somebody would have to start."""
    hosts, launcher = job.launch.hosts, job.launch.on
    if hosts or launcher:
        given = f"hosts = {list(hosts)}" if hosts else f"on = {launcher!r}"
        raise SpecError(
            f"launch.{given}: instep.join starts no processes, on "
            "other hosts either. Leave it out and start the script on each, as torchrun and "
            "Slurm do; or use instep.train or instep run, which honour it."
        )
    if job.sync.served:
        raise SpecError(
            f"sync.name = {job.sync.name!r}: instep.join starts no processes, and servers are "
            "some. Use instep.train or instep run with a recipe; or sync.name = 'all_reduce'."
        )


def _within_script(script: Script, recipe: Callable[..., Any] | Recipe | None) -> Session:
    """The session of a worker that runs a script (`instep run script.py`)."""
    if script.part is not None:
        raise SpecError(
            "instep.join was called twice: under instep run a script trains one run. Start one "
            "for each."
        )
    workers = script.member.job.workers
    place = placement.Placement(
        rank=script.member.number,
        size=workers,
        local_rank=script.local_rank,
        local_size=per_machine(workers, script.member.job.launch.count),
        key="",
    )
    part = script.part = Participation(script.member, place, None, script)
    part.begin(recipe)
    return Session(part)


def _job(
    recipe: Any,
    name: str | None,
    arguments: Mapping[str, Any] | None,
    seed: int,
    network: str,
    sections: Mapping[str, Mapping[str, Any]],
    workers: int,
) -> JobSpec:
    script = Path(sys.argv[0]).resolve()
    function = getattr(recipe, "__name__", "main")
    table = {
        "name": name or (script.stem if script.is_file() else "session"),
        "recipe": f"{script}:{function if function.isidentifier() else 'main'}",
        "workers": workers,
        "seed": seed,
        "network": network,
        "arguments": dict(arguments or {}),
        **sections,
    }
    return spec_file.absolute(spec_file.build(table, source="instep.join"), Path.cwd())


def check_same(mine: JobSpec, first: JobSpec, rank: int) -> None:
    """Refuse to train another job than the process asked for.

    Args:
        mine: from the arguments of `join` in this process.
        first: from those in process 0.
        rank: of this process.

    Raises:
        SpecError: they differ. Paths and other settings that may depend on the host do not count.
    """
    here, there = (_settings(msgspec.to_builtins(job)) for job in (mine, first))
    for name, value in here.items():
        if there[name] != value:
            raise SpecError(
                f"instep.join was called with {name} = {value!r} in process {rank}, and with "
                f"{there[name]!r} in process 0: every process needs to call it with the same "
                "arguments, as often and in the same order."
            )


def _settings(job: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that must be equal, by their names in a job file."""
    settings = {key: job[key] for key in ("name", "seed")}
    for section in ("train", "sync", "stop", "check"):
        settings |= {f"{section}.{key}": value for key, value in job[section].items()}
    return settings
