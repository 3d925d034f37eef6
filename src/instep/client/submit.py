"""Whoever submits a job: makes the run folder, has the run looked after, returns what came of it.

`instep run` and `instep.train` both end here. Nothing in it imports torch: a
client waits while others compute. What is not needed to start the processes
is imported after they were started, while they import torch.
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
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from instep import __version__, spec_file
from instep.comm.endpoint import Switchboard
from instep.comm.messages import Failed, Over
from instep.errors import InstepError, RecipeError, RunError, SpecError, WorkerError, near_miss
from instep.launch import LAUNCHERS
from instep.plain_file import write_plain
from instep.recipe.start_file import start_file
from instep.spec import JobSpec
from instep.state.recorded import check_recorded
from instep.store.folder import (
    BEGINNING,
    Origin,
    held,
    make_run_folder,
    remove_run_folder,
    way_on,
)
from instep.sync import STRATEGIES
from instep.system.environment import ASKED, INSIDE

WILDCARDS = ("::", "::0", "[::]", "*")
"""What else than 0.0.0.0 stands for every address of a machine."""

if TYPE_CHECKING:
    from instep.launch.base import Launcher


@dataclass(frozen=True)
class Run:
    """What came of a run."""

    path: Path
    """Its folder."""
    summary: dict[str, Any]
    """As in `summary.json`."""
    exit_code: int = 0
    """0; `DIVERGED` or `INTERRUPTED` of `errors.py` where it ended so."""


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
    """Train a recipe on this machine, on `workers` processes, and return how it went.

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
    origin: Origin = BEGINNING,
    watch: Callable[[Path], None] | None = None,
) -> Run:
    """Run a job on this machine to its end.

    Args:
        job: what to run.
        runs: folder of run folders.
        named: the name was asked for: refuse if it is taken, rather than number it.
        quiet: print nothing; by default a live table, or lines, go to standard error.
        started: Unix seconds at which the command began; now, if not given.
        json_output: progress as lines, since standard output is for a machine.
        origin: from where it goes on; of another run, which is only read.
        watch: called with the run folder several times a second; must not wait.

    Raises:
        InstepError: nothing was started, or a worker failed (its cause is the text).
    """
    check_job(job, resumed=origin.checkpoint is not None)
    there = runs.exists()
    folder = make_run_folder(runs, job, named=named)
    try:
        with held(folder):
            return _conduct(job, folder, origin, started, _Audience(quiet, json_output, watch))
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
    """Go on with a run of this machine, from its newest checkpoint to its end.

    Args:
        path: its folder.
        overrides: `section.key=value`, laid over the job as run.
        changes: nested tables of values, laid over it after those.
        quiet, started, json_output: as for `run_job`.

    Raises:
        InstepError: it cannot go on, or a worker failed; the text says why.
    """
    from instep.control.resume import changed, prepare
    from instep.store.run_folder import RunFolder

    before = RunFolder(path)
    if before.joined:
        raise SpecError(
            f"{before.path} is of processes that called instep.join, which instep resume cannot "
            f"start. To go on: {before.way_on}"
        )
    job = changed(before, overrides, changes)
    check_job(job, resumed=True)
    folder = path.resolve()
    with held(folder):
        origin = prepare(folder, job, recipe_sha256=recipe_sha256(job))
        return _conduct(job, folder, origin, started, _Audience(quiet, json_output))


def resume(
    run: str | Path,
    *,
    workers: int | None = None,
    quiet: bool = False,
    **changes: Any,
) -> Run:
    """Go on with a run on this machine, from its newest checkpoint, and return how it went.

    Args:
        run: its folder.
        workers: processes that compute gradients; as many as it had last, if not given.
        quiet: print nothing.
        changes: of the job: `train={"epochs": 20}`, `recipe="moved.py:recipe"`. None
            takes a key away, so that it has its default again: `stop={"target": None}`.

    Raises:
        InstepError: it cannot go on, or a worker failed; the text says why.
    """
    if workers is not None:
        changes["workers"] = workers
    return resume_run(Path(run), changes=changes, quiet=quiet)


@dataclass(frozen=True)
class _Audience:
    """Who watches a run."""

    quiet: bool = False
    json_output: bool = False
    watch: Callable[[Path], None] | None = None


def _conduct(
    job: JobSpec, folder: Path, origin: Origin, started: float | None, audience: _Audience
) -> Run:
    """Run a job in its folder, from wherever it stands to its end."""
    switchboard = open_switchboard(job)
    hosts = job.launch.hosts
    launcher = LAUNCHERS["hosts"](hosts) if hosts else LAUNCHERS["local"]()
    try:
        for number in range(len(hosts) or 1):
            launcher.start(replace(switchboard.endpoint, host=number), folder / "logs")
        began = started or time.time()
        over = _follow(job, folder, origin, switchboard, launcher, began, audience)
    except RunError as error:  # there is no master any more; what was committed is there
        with suppress(InstepError):
            finish(folder)
        raise RunError(f"{error}{way_on(folder)}") from None
    finally:
        launcher.stop()
        switchboard.close()
    if over.failed is not None and refused(over.failed, folder, origin):
        remove_run_folder(folder)
        raise failure(over.worker if over.worker is not None else -1, over.failed, folder)
    try:
        summary = finish(folder, origin)
    finally:  # what ended the run comes before what came of its report
        if over.failed is not None:
            raise failure(over.worker if over.worker is not None else -1, over.failed, folder)
    return Run(folder, summary, over.exit_code)


def _follow(
    job: JobSpec,
    folder: Path,
    origin: Origin,
    switchboard: Switchboard,
    launcher: Launcher,
    began: float,
    audience: _Audience,
) -> Over:
    """See to it that the run has a master and a host until it is over."""
    from instep.client.live_run import seated
    from instep.client.watchdog import MasterWatchdog
    from instep.control.journal import Begin, Journal

    Journal(folder, Begin(began, origin)).close()
    note = {"about": about(job), "quiet": audience.quiet, "json": audience.json_output}
    hosts = len(job.launch.hosts) or 1
    watchdog = MasterWatchdog(
        folder, switchboard, launcher, note, watch=audience.watch, hosts=hosts
    )
    try:
        with seated(folder, switchboard.endpoint):
            return watchdog.serve()
    finally:
        watchdog.close()


def open_switchboard(job: JobSpec) -> Switchboard:
    """Where the run's masters listen: on loopback, or where its hosts reach this machine.

    Raises:
        SpecError: that is no address of this machine, or other hosts cannot reach it.
    """
    if not job.launch.hosts:
        return Switchboard()
    address = job.launch.address
    try:
        wild = address in WILDCARDS  # of which some are no names of IPv4
        found = "0.0.0.0" if wild else socket.gethostbyname(address or socket.gethostname())
        if found == "0.0.0.0":
            what = f"launch.address = {address!r}" if address else f"this machine's name, {found},"
            raise SpecError(
                f"{what} means every address of this machine: the run would listen on all its "
                "networks, and no host could be told where to call. Give the one address that the "
                "hosts reach, such as 10.0.0.1."
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


def check_job(job: JobSpec, *, resumed: bool = False) -> None:
    """What can be refused before any process starts.

    Args:
        job: to be run.
        resumed: its model is in a checkpoint; what it once started from may be gone.

    Raises:
        SpecError: a part by that name does not exist, or is not built yet; or
            this is a process of another run.
        CheckpointError: the model to start from is no sound safetensors file, or not as
            it was saved.
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
    if job.sync.servers != 1:
        raise SpecError(
            f"sync.servers = {job.sync.servers}: {job.sync.name} has no servers. Leave the key out."
        )
    if job.sync.codec != "none":
        raise SpecError(
            f"sync.codec = {job.sync.codec!r}: this version sends tensors as they are. "
            "Leave the key out."
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
        check_recorded(model)


def about(job: JobSpec) -> dict[str, Any]:
    """Fields of `run_started` that say where and how a run was made."""
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
    """Of the recipe's file as it is now; empty where there is none."""
    file = Path(job.recipe.rpartition(":")[0])
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def finish(folder: Path, origin: Origin = BEGINNING) -> dict[str, Any]:
    """Write what a run leaves for people and machines, and return the summary.

    Args:
        folder: of the run.
        origin: from where it went on; where that is another run, its ledger is a part.

    Raises:
        RunError: some of it cannot be written; or its ledger does not hold what it was to
            train on, which is said once all of it is written.
    """
    from instep.report.page import write_report
    from instep.report.proof import prove
    from instep.report.summary import summarise
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
            f"the run has ended, but how could not be written to {folder / 'events.jsonl'}, and "
            "its report has gaps: the disk was full, or not to be written to."
        )
    whole = origin.checkpoint is None or origin.checkpoint.is_relative_to(folder)
    if whole and run.outcome in ("completed", "stopped") and not run.audit.exact:
        raise RunError(f"the run has ended, but {prove(run).fault}")
    return summary


def refused(word: Failed, folder: Path, origin: Origin = BEGINNING) -> bool:
    """Whether a run was refused before it had trained anything: its folder tells nothing more.

    Args:
        word: why it failed.
        folder: of the run.
        origin: from where it went on.
    """
    from instep.events import LEDGER, read_records

    kinds = ["SpecError", "RecipeError", "CheckpointError", *(() if word.step else ("DataError",))]
    fresh = origin == BEGINNING and word.kind in kinds
    return fresh and not len(read_records(folder / "ledger.bin", LEDGER))


def failure(worker: int, word: Failed, folder: Path) -> InstepError:
    """The one error that a failed run ends with: the cause first, and where to read on."""
    who = f"worker {worker}" if worker >= 0 else "the launcher"
    log = f"worker-{worker}.log" if worker >= 0 else "host.log"
    at = f" at step {word.step}" if word.step else ""
    doing = f", in {word.phase}" if word.phase else ""
    lines = [f"{who} failed{at}{doing}: {word.cause}"]
    if word.where:
        lines.append(f"  {word.where}: {word.line}")
    if (folder / "logs" / log).exists():  # under torchrun, others keep the output
        lines.append(f"  everything else: {folder / 'logs' / log}")
    # what is wrong with the recipe is one error, whichever worker has found it first
    kind = RecipeError if word.kind == RecipeError.__name__ else WorkerError
    error = kind("\n".join(lines) + way_on(folder))
    error.exit_code = word.exit_code
    return error
