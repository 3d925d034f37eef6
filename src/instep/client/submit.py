"""Submits a job: makes the run folder, starts the processes, waits, writes the report.

`instep run` and `instep.train` both call it. Nothing here imports torch: a client only
waits. What is not needed to start the processes is imported after their start, while they
import torch. Ways in: `run_job`, `resume_run`.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import os
import platform
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from instep import __version__, spec_file
from instep.comm.codecs import CODECS
from instep.comm.endpoint import Switchboard
from instep.comm.messages import Failed, Over
from instep.errors import InstepError, RecipeError, RunError, SpecError, WorkerError, near_miss
from instep.launch import LAUNCHERS
from instep.plain_file import write_plain
from instep.recipe.start_file import start_file
from instep.spec import JobSpec
from instep.state.model_file import check_hash
from instep.store.folder import (
    BEGINNING,
    StartPoint,
    held,
    make_run_folder,
    remove_run_folder,
    resume_hint,
)
from instep.sync import ROUNDS, SERVERS, STRATEGIES
from instep.system.environment import ASKED, INSIDE
from instep.words import member

WILDCARDS = ("::", "::0", "[::]", "*")
"""Besides 0.0.0.0, what means every address of a machine."""

if TYPE_CHECKING:
    from instep.launch.base import Launcher


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    path: Path
    """Its folder."""
    summary: dict[str, Any]
    """As in `summary.json`."""
    exit_code: int = 0
    """0; `DIVERGED` or `INTERRUPTED` of `errors.py` if it ended so."""


_ON_THE_HOST = "servers and workers compute on the CPU"
_NO_BITS = "what a codec drops depends on how many workers there are"


def train(
    recipe: Callable[..., Any] | str,
    *,
    workers: int = 2,
    name: str | None = None,
    runs: str | Path = "runs",
    arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    quiet: bool = False,
    **sections: Mapping[str, Any],
) -> Run:
    """Train a recipe on this machine, on `workers` processes, and return the result.

    Args:
        recipe: a function that returns an `instep.Recipe`, defined at the top
            level of a file (each process imports it from there), or its name
            as `"file.py:function"`.
        workers: processes that compute gradients.
        name: of the run and its folder; the function's name otherwise.
        runs: folder of run folders.
        arguments: handed to the recipe function by name.
        seed: decides the order of the data, first parameters, every draw.
        quiet: print nothing.
        sections: tables of the job file: `train={"epochs": 3}`, `sync={...}`.

    Raises:
        InstepError: the job is wrong or a worker failed; the text says why.
    """
    reference = recipe if isinstance(recipe, str) else reference_to(recipe)
    table = {
        "name": name or reference.rpartition(":")[2],
        "recipe": reference,
        "workers": workers,
        "seed": seed,
        "arguments": dict(arguments or {}),
        **{section: dict(values) for section, values in sections.items()},
    }
    job = spec_file.absolute(spec_file.build(table, source="instep.train"), Path.cwd())
    return run_job(job, Path(runs), named=name is not None, quiet=quiet)


def reference_to(function: Callable[..., Any]) -> str:
    """`/path/file.py:function` for a function that other processes can import.

    Raises:
        RecipeError: it has no file, or is not at the top level of it.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    try:
        file = Path(inspect.getsourcefile(function) or "")
    except TypeError:
        file = Path()
    if not file.is_file() or not name.isidentifier():
        raise RecipeError(
            f"the recipe {name!r} cannot be imported by other processes: define it as a function "
            "at the top level of a .py file."
        )
    return f"{file.resolve()}:{name}"


def run_job(
    job: JobSpec,
    runs: Path,
    *,
    named: bool,
    quiet: bool = False,
    started: float | None = None,
    json_output: bool = False,
    start_point: StartPoint = BEGINNING,
    watch: Callable[[Path], None] | None = None,
) -> Run:
    """Run a job on this machine to its end.

    Args:
        job: what to run.
        runs: folder of run folders.
        named: refuse a name that is taken, rather than number it.
        quiet: print nothing; by default a live table or lines go to standard error.
        started: Unix seconds at which the command began; now, if not given.
        json_output: progress as lines, as a program reads the output.
        start_point: the checkpoint to start from, of another run, which is only read.
        watch: called with the run folder several times a second; must not block.

    Raises:
        InstepError: nothing was started, or a worker failed (its cause is the text).
    """
    check_job(job, resumed=start_point.checkpoint is not None)
    there = runs.exists()
    folder = make_run_folder(runs, job, named=named)
    try:
        with held(folder):
            return _conduct(job, folder, start_point, started, _Audience(quiet, json_output, watch))
    finally:
        if not there:
            with suppress(OSError):  # as a rule there is a run in it
                runs.rmdir()


def resume_run(
    path: Path,
    overrides: Iterable[str] = (),
    *,
    changes: Mapping[str, Any] = MappingProxyType({}),
    quiet: bool = False,
    started: float | None = None,
    json_output: bool = False,
) -> Run:
    """Resume a run of this machine, from its newest checkpoint to its end.

    Args:
        path: its folder.
        overrides: `section.key=value`, changes of the job as run.
        changes: nested tables of values, applied after those.
        quiet, started, json_output: as for `run_job`.

    Raises:
        InstepError: it cannot be resumed, or a worker failed; the text says why.
    """
    from instep.control.resume import changed, prepare
    from instep.store.run_folder import RunFolder

    before = RunFolder(path)
    if before.joined:
        raise SpecError(
            f"the processes of {before.path} called instep.join, and instep resume cannot start "
            f"them. To resume: {before.to_resume}"
        )
    job = changed(before, overrides, changes)
    check_job(job, resumed=True)
    folder = path.resolve()
    with held(folder):
        start_point = prepare(folder, job, recipe_sha256=recipe_sha256(job))
        return _conduct(job, folder, start_point, started, _Audience(quiet, json_output))


def resume(
    run: str | Path,
    *,
    workers: int | None = None,
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Resume a run on this machine from its newest checkpoint, and return the result.

    Args:
        run: its folder.
        workers: processes that compute gradients; by default as many as it had last.
        quiet: print nothing.
        changes: of the job: `train={"epochs": 20}`, `recipe="moved.py:recipe"`. None
            resets a key to its default: `stop={"target": None}`.

    Raises:
        InstepError: it cannot be resumed, or a worker failed; the text says why.
    """
    if workers is not None:
        changes["workers"] = workers
    return resume_run(Path(run), changes=changes, quiet=quiet)


@dataclass(frozen=True)
class _Audience:
    """Who follows a run."""

    quiet: bool = False
    json_output: bool = False
    watch: Callable[[Path], None] | None = None


def _conduct(
    job: JobSpec, folder: Path, start_point: StartPoint, started: float | None, audience: _Audience
) -> Run:
    """Run a job in its folder, from `start_point` to its end."""
    switchboard = open_switchboard(job)
    hosts = job.launch.hosts
    make = LAUNCHERS[job.launch.name or ("hosts" if hosts else "local")]
    launcher = make(hosts) if hosts else make()
    try:
        for number in range(len(hosts) or 1):
            launcher.start(replace(switchboard.endpoint, host=number), folder / "logs")
        began = started or time.time()
        over = _follow(job, folder, start_point, switchboard, launcher, began, audience)
    except RunError as error:  # the master is lost; what was committed is in the folder
        with suppress(InstepError):
            finish(folder)
        raise RunError(f"{error}{resume_hint(folder)}") from None
    finally:
        launcher.stop()
        switchboard.close()
    servers = _servers(folder) if over.failed is not None else ()
    if over.failed is not None and refused(over.failed, folder, start_point):
        remove_run_folder(folder)
        raise failure(over.worker, over.failed, folder, servers)
    try:
        summary = finish(folder, start_point)
    finally:  # the cause of a failure matters more than an error in its report
        if over.failed is not None:
            raise failure(over.worker, over.failed, folder, servers)
    return Run(folder, summary, over.exit_code)


def _follow(
    job: JobSpec,
    folder: Path,
    start_point: StartPoint,
    switchboard: Switchboard,
    launcher: Launcher,
    began: float,
    audience: _Audience,
) -> Over:
    """Keep the run's master and hosts alive until it is over."""
    from instep.client.running import published
    from instep.client.watchdog import MasterWatchdog
    from instep.control.journal import Begin, Journal

    Journal(folder, Begin(began, start_point)).close()
    note = {"about": about(job), "quiet": audience.quiet, "json": audience.json_output}
    hosts = len(job.launch.hosts) or 1
    watchdog = MasterWatchdog(
        folder, switchboard, launcher, note, watch=audience.watch, hosts=hosts
    )
    with published(folder, switchboard.endpoint):
        return watchdog.serve()


def open_switchboard(job: JobSpec) -> Switchboard:
    """Where the run's masters listen: on loopback, or where the hosts reach this machine.

    Raises:
        SpecError: it is not an address of this machine, or other hosts cannot reach it.
    """
    if not job.launch.hosts:
        return Switchboard()
    address = job.launch.address
    try:
        wild = address in WILDCARDS  # some are not IPv4
        found = "0.0.0.0" if wild else socket.gethostbyname(address or socket.gethostname())
        if found == "0.0.0.0":
            what = f"launch.address = {address!r}" if address else f"this machine's name, {found},"
            raise SpecError(
                f"{what} means every address of this machine: the run would listen on all its "
                "networks, and the hosts need one address to connect to. Give the address that "
                "they reach, such as 10.0.0.1."
            )
        if not address and found.startswith("127."):
            raise SpecError(
                f"this machine's name leads to {found}, which other hosts cannot reach. Say "
                "launch.address, the address of this machine on the network of the hosts."
            )
        return Switchboard(found)
    except OSError as error:
        raise SpecError(
            f"launch.address = {address!r}: nothing can listen there ({error.strerror}). Give an "
            "address of this machine."
        ) from None


def _check_rounds(job: JobSpec) -> None:
    sync = job.sync
    if sync.name in ROUNDS:
        if not sync.participants:
            raise SpecError(
                f"sync.name = {sync.name!r} needs sync.participants: how many take local steps "
                f"side by side in a round. Set it to {job.workers} or more."
            )
        for clash, given in (
            ("sync.codec", job.sync.codec != "none"),
            ("train.batch_norm = 'global'", job.train.batch_norm == "global"),
            ("train.precision = 'float16'", job.train.precision == "float16"),
            ("check.corruption", job.check.corruption),
            ("stop.gradient_norm", job.stop.by_norm),
        ):
            if given:
                raise SpecError(
                    f"sync.name = {sync.name!r} does not go with {clash}: participants take steps "
                    "of their own, and the workers never have a common gradient. Leave one of the "
                    "two out."
                )
        return
    for key, given in (
        ("participants", sync.participants != 0),
        ("local_steps", sync.local_steps != 1),
        ("local_optimizers", sync.local_optimizers != "reset"),
    ):
        if given:
            raise SpecError(
                f"sync.{key} = {getattr(sync, key)!r}: {sync.name} agrees on every step. Leave the "
                "key out, or use sync.name = 'averaging'."
            )


def _check_servers(job: JobSpec) -> None:
    sync = job.sync
    if sync.name not in SERVERS:
        if sync.servers != 1:
            raise SpecError(
                f"sync.servers = {sync.servers}: {sync.name} has no servers. Leave the key out, or "
                "use sync.name = 'server_sync'."
            )
        return
    if job.recipe.endswith(":__main__"):
        raise SpecError(
            f"sync.name = {sync.name!r} needs a recipe: your own loop calls the optimizer, which "
            "is on the servers. Write a recipe, or use sync.name = 'all_reduce'."
        )
    for clash, given, why in (
        ("sync.codec", sync.codec != "none", "servers are sent plain numbers"),
        ("train.device = 'cuda'", job.train.device == "cuda", _ON_THE_HOST),
        ("train.precision = 'float16'", job.train.precision == "float16", _ON_THE_HOST),
        ("check.corruption", job.check.corruption, "it compares states that every worker has"),
    ):
        if given:
            raise SpecError(
                f"sync.name = {sync.name!r} does not go with {clash}: {why}. Leave one of the two "
                "out."
            )


def check_job(job: JobSpec, *, resumed: bool = False) -> None:
    """Refuse a job before any process starts.

    Args:
        job: to be run.
        resumed: its model is in a checkpoint; the file it started from may be gone.

    Raises:
        SpecError: a part by that name does not exist, or not in this version; or this is a
            process of another run.
        CheckpointError: the model to start from is damaged, or not a safetensors file.
    """
    if ASKED in os.environ:
        raise SpecError(
            "the script calls instep.train, which starts its workers itself: run it as a program "
            "of its own, with python."
        )
    if INSIDE in os.environ:
        raise SpecError(
            "a run was started while the recipe's file was being imported. Put the call under "
            "`if __name__ == '__main__':`."
        )
    STRATEGIES.check(job.sync.name)
    LAUNCHERS.check(job.launch.name or "local")
    _check_rounds(job)
    _check_servers(job)
    CODECS.check(job.sync.codec)
    if job.sync.codec != "none":
        for key, clashes, why in (
            ("train.determinism", job.train.determinism == "bits", _NO_BITS),
            ("check.corruption", job.check.corruption, "gradients are not compared to the bit"),
            ("train.precision", job.train.precision == "float16", "the scale of the loss changes"),
        ):
            if clashes:
                raise SpecError(
                    f"sync.codec = {job.sync.codec!r} does not go with the job's {key}: {why}. "
                    "Leave one of the two out."
                )
    if job.mesh.ranks > 1:
        raise SpecError(
            f"[mesh] asks for {job.mesh.ranks} ranks in a replica: this version keeps a replica "
            "in one process. Leave the section out."
        )
    file = Path(job.recipe.rpartition(":")[0])
    if not file.is_file():
        beside = [path.name for path in file.parent.glob("*.py")]
        raise RecipeError(f"there is no recipe file {str(file)!r}. {near_miss(file.name, beside)}")
    if job.launch.hosts:
        open_switchboard(job).close()
    model = None if resumed else start_file(job.start)
    if model is not None:
        check_hash(model)


def about(job: JobSpec) -> dict[str, Any]:
    """Fields of `run_started`: the command, the machine, the versions."""
    import psutil

    names = ("torch", "numpy", "safetensors")
    versions = {"python": platform.python_version(), "instep": __version__}
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "recipe_sha256": recipe_sha256(job),
        "started_by": "instep",
        "versions": versions | {n: _version(n) for n in names},
    }


def recipe_sha256(job: JobSpec) -> str:
    """Of the recipe's file as it is now; empty if there is none."""
    file = Path(job.recipe.rpartition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def finish(folder: Path, start_point: StartPoint = BEGINNING) -> dict[str, Any]:
    """Write summary, report and trace of a run that has ended, and return the summary.

    Args:
        folder: of the run.
        start_point: where it started; if that is another run, its ledger does not begin at 1.

    Raises:
        RunError: a file cannot be written; or, once all are written: the ledger is not what
            the job says.
    """
    from instep.report.figures.proof import prove
    from instep.report.figures.summary import summarise
    from instep.report.page.page import write_report
    from instep.report.timeline import write_trace
    from instep.store.run_folder import RunFolder

    run = RunFolder(folder)
    summary = summarise(run)
    try:
        text = json.dumps(summary, indent=2) + "\n"
        write_plain(folder / "summary.json", text)
        write_report(run, folder / "report.html")
        write_trace(run, folder / "trace.json")
    except OSError as error:
        raise RunError(
            f"the run has ended, but its report cannot be written to {folder}: {error.strerror}. "
            f"Make room, then: instep report {folder}"
        ) from None
    if run.outcome == "unfinished":
        raise RunError(
            f"the run has ended, but its end could not be written to {folder / 'events.jsonl'}, "
            "and its report has gaps: the disk was full or read-only."
        )
    whole = start_point.checkpoint is None or start_point.checkpoint.is_relative_to(folder)
    if whole and run.outcome in ("completed", "stopped") and not run.audit.exact:
        raise RunError(f"the run has ended, but {prove(run).fault}")
    return summary


def refused(failed: Failed, folder: Path, start_point: StartPoint = BEGINNING) -> bool:
    """Whether a run was refused before it trained anything, so that its folder can be removed.

    Args:
        failed: why it failed.
        folder: of the run.
        start_point: where it started.
    """
    from instep.events import LEDGER, read_records

    kinds = [
        "SpecError",
        "RecipeError",
        "CheckpointError",
        *(() if failed.step else ("DataError",)),
    ]
    fresh = start_point == BEGINNING and failed.kind in kinds
    return fresh and not len(read_records(folder / "ledger.bin", LEDGER))


def _servers(folder: Path) -> Collection[int]:
    """The parameter servers of a run; none if its files cannot be read."""
    from instep.store.run_folder import RunFolder

    with suppress(InstepError):
        return RunFolder(folder).servers
    return ()


def failure(
    worker: int | None, failed: Failed, folder: Path, servers: Collection[int] = ()
) -> InstepError:
    """The one error that a failed run ends with: the cause first, then where to read more."""
    who, log = "the launcher", "host.log"
    if worker is not None and worker >= 0:
        who = member(worker, servers)
        log = f"{who.replace(' ', '-')}.log"
    at = f" at step {failed.step}" if failed.step else ""
    doing = f", in {failed.phase}" if failed.phase else ""
    lines = [f"{who} failed{at}{doing}: {failed.cause}"]
    if failed.where:
        lines.append(f"  {failed.where}: {failed.line}")
    if (folder / "logs" / log).exists():  # under torchrun the output is not in the folder
        lines.append(f"  full log: {folder / 'logs' / log}")
    # an error of the recipe is the same, whichever worker finds it first
    kind = RecipeError if failed.kind == RecipeError.__name__ else WorkerError
    error = kind("\n".join(lines) + resume_hint(folder))
    error.exit_code = failed.exit_code
    return error
