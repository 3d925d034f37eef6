"""Submits a job: makes the run folder, starts the processes, and waits for the end.

`instep run` and `instep.train` call it. What is refused before is in `job_checks.py`, what is
written about the run in `results.py`. Nothing here imports torch: a client waits. What is not
needed to start the processes is imported after their start. Ways in: `run_job`, `resume_run`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from instep.client.copying import copy_missing, folder_of, followed
from instep.client.job_checks import check_job, open_switchboard
from instep.client.keywords import tables
from instep.client.launching import launching
from instep.client.preparing import as_run, prepare_data
from instep.client.references import places_of, reference_to
from instep.client.results import about, failure, finish, recipe_sha256, refused
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.messages import Over
from instep.errors import InstepError, RunError, SpecError
from instep.job import file as spec_file
from instep.job.spec import JobSpec
from instep.store.folder import (
    BEGINNING,
    StartPoint,
    held,
    make_run_folder,
    remove_run_folder,
    resume_hint,
)
from instep.system.output import open_standard_streams

if TYPE_CHECKING:
    from instep.client.notebook import Table
    from instep.launch.base import Launcher


TRAIN = ("workers", "name", "runs", "arguments", "seed", "quiet", "on", "network")
RESUME = ("workers", "quiet", "to")
"""Keywords beside the tables of a job."""


@dataclass(frozen=True)
class Run:
    """The result of a run."""

    path: Path
    """Its folder."""
    summary: dict[str, Any]
    """As in `summary.json`."""
    exit_code: int = 0
    """0; `DIVERGED` or `INTERRUPTED` of `errors.py` if it ended so."""

    def _repr_html_(self) -> str:
        """In a notebook: how it ended, and the report."""
        from instep.client.notebook import page
        from instep.report.terminal.closing import closing_lines
        from instep.store.run_folder import RunFolder

        return page(self.path, closing_lines(self.summary, RunFolder(self.path)))


def train(
    recipe: Callable[..., Any] | str,
    *,
    workers: int = 2,
    name: str | None = None,
    runs: str | Path = "runs",
    arguments: Mapping[str, Any] | None = None,
    seed: int = 0,
    quiet: bool = False,
    on: str = "",
    network: str = "loopback",
    **sections: Mapping[str, Any],
) -> Run:
    """Train a recipe on `workers` processes of this machine or a cluster, and return the result.

    Args:
        recipe: a function that returns an `instep.Recipe`, defined at the top
            level of a file (each process imports it from there), or its name
            as `"file.py:function"`; or defined in a notebook (processes are forked
            from its kernel).
        workers: processes that compute gradients.
        name: of the run and its folder; the function's name otherwise.
        runs: folder of run folders.
        arguments: handed to the recipe function by name.
        seed: decides the order of the data, first parameters, every draw.
        quiet: print nothing.
        on: what starts the processes, as `on` of `[launch]`: such as `"ray"`.
        network: `"private"` declares that only trusted machines can reach the one between hosts.
        sections: tables of the job file: `train={"epochs": 3}`, `sync={...}`.

    Raises:
        InstepError: the job is wrong or a worker failed; the text says why.
    """
    more = tables("instep.train", TRAIN, sections)
    if on:
        more["launch"] = {**more.get("launch", {}), "on": on}
    reference = recipe if isinstance(recipe, str) else reference_to(recipe)
    places = [*more.pop("python_path", ()), *([] if isinstance(recipe, str) else places_of(recipe))]
    job_table = {
        "name": name or reference.rpartition(":")[2],
        "recipe": reference,
        "workers": workers,
        "seed": seed,
        "network": network,
        "arguments": dict(arguments or {}),
        "python_path": places,
        **more,
    }
    job = spec_file.absolute(spec_file.build(job_table, source="instep.train"), Path.cwd())
    table = _table(quiet)
    run = run_job(
        job, Path(runs), named=name is not None, quiet=quiet or table is not None, watch=table
    )
    return _told(run, quiet, table)


def _table(quiet: bool) -> Table | None:
    """What shows a run in a notebook, where there is one."""
    if quiet or "IPython" not in sys.modules:
        return None
    from instep.client import notebook

    return notebook.Table() if notebook.in_kernel() else None


def _told(run: Run, quiet: bool, table: Table | None) -> Run:
    """Show how a run ended."""
    from instep.report.terminal.closing import closing_lines, show_ending
    from instep.store.run_folder import RunFolder

    if table is not None:
        table.end(closing_lines(run.summary, RunFolder(run.path)))
    elif not quiet:
        show_ending(run.summary, run.path)
    return run


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
    open_standard_streams()
    check_job(job, resumed=start_point.checkpoint is not None)
    job = as_run(job)
    prepare_data(job, quiet=quiet)
    there, view = runs.exists(), {"quiet": quiet, "json": json_output}
    try:
        with launching(job) as (settled, launcher):
            folder = make_run_folder(runs, job, named=named)
            with held(folder):
                try:
                    return _conduct(settled, folder, launcher, start_point, started, view, watch)
                except KeyboardInterrupt:
                    if not (folder / "events.jsonl").exists():  # nothing has begun
                        remove_run_folder(folder)
                    raise
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
    watch: Callable[[Path], None] | None = None,
    say: Callable[[str], object] | None = None,
) -> Run:
    """Resume a run of this machine, from its newest checkpoint to its end.

    Args:
        path: its folder.
        overrides: `section.key=value`, changes of the job as run.
        changes: nested tables of values, applied after those.
        quiet, started, json_output, watch: as for `run_job`.
        say: told of each value of the job that went away with a change.

    Raises:
        InstepError: it cannot be resumed, or a worker failed; the text says why.
    """
    from instep.control.changed_job import changed
    from instep.control.resume import prepare
    from instep.store.run_folder import RunFolder

    open_standard_streams()
    before = RunFolder(path)
    if before.joined:
        raise SpecError(
            f"the processes of {before.path} called instep.join, and instep resume cannot start "
            f"them. To resume: {before.to_resume}"
        )
    check_job(job := changed(before, overrides, changes, say), resumed=True)
    job = as_run(job, before.spec)
    folder, view = path.resolve(), {"quiet": quiet, "json": json_output}
    with launching(job) as (settled, launcher), held(folder):
        try:
            start_point = prepare(folder, job, recipe_sha256=recipe_sha256(job))
        except SpecError:  # as a rule the run is complete
            copy_missing(folder, job, quiet)
            raise
        return _conduct(settled, folder, launcher, start_point, started, view, watch)


def resume(
    run: str | Path,
    *,
    workers: int | None = None,
    quiet: bool = False,
    to: str | Path | None = None,
    **changes: Any,
) -> Run:
    """Resume a run on this machine from its newest checkpoint, and return the result.

    Args:
        run: its folder; or the URL or folder of the copies of its checkpoints.
        to: the folder that copies are restored into; by default `runs/NAME`.
        workers: processes that compute gradients; by default as many as it had last.
        quiet: print nothing.
        changes: of the job: `train={"epochs": 20}`, `recipe="moved.py:recipe"`. None
            resets a key to its default: `stop={"target": None}`. A recipe that was defined in
            a notebook is given again, after its cell was run: `recipe=recipe`.

    Raises:
        InstepError: it cannot be resumed, or a worker failed; the text says why.
    """
    changes = tables("instep.resume", RESUME, changes)
    if "recipe" in changes and not isinstance(changes["recipe"], str | os.PathLike):
        changes["python_path"] = places_of(changes["recipe"])
        changes["recipe"] = reference_to(changes["recipe"])
    if workers is not None:
        changes["workers"] = workers
    table = _table(quiet)
    folder = folder_of(run, to, lambda text: None if quiet else print(text, file=sys.stderr))
    done = resume_run(folder, changes=changes, quiet=quiet or table is not None, watch=table)
    return _told(done, quiet, table)


def _conduct(
    job: JobSpec,
    folder: Path,
    launcher: Launcher,
    start_point: StartPoint,
    started: float | None,
    view: Mapping[str, bool],
    watch: Callable[[Path], None] | None = None,
) -> Run:
    """Run a job in its folder, from `start_point` to its end; `view` says what is printed."""
    switchboard = open_switchboard(job)
    try:
        _start_hosts(job, folder, launcher, switchboard)
        began = started or time.time()
        over = _follow(job, folder, start_point, switchboard, launcher, began, view, watch)
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


def _start_hosts(job: JobSpec, folder: Path, launcher: Launcher, switchboard: Switchboard) -> None:
    """Start all; where one cannot be, a folder in which nothing has happened is removed."""
    try:
        for number in range(job.launch.count or 1):
            launcher.start(switchboard.for_host(number), folder / "logs")
    except SpecError:
        launcher.stop()
        if not (folder / "events.jsonl").exists():
            remove_run_folder(folder)
        raise


def _follow(
    job: JobSpec,
    folder: Path,
    start_point: StartPoint,
    switchboard: Switchboard,
    launcher: Launcher,
    began: float,
    view: Mapping[str, bool],
    watch: Callable[[Path], None] | None,
) -> Over:
    from instep.client.running import published
    from instep.client.watchdog import MasterWatchdog
    from instep.control.journal import Begin, Journal

    Journal(folder, Begin(began, start_point)).close()
    note = {"about": about(job), "nodes": job.launch.nodes, **view}
    more: dict[str, Any] = {"watch": watch, "hosts": job.launch.count or 1}
    with published(folder, switchboard.for_client()), followed(folder, job, view["quiet"]) as new:
        return MasterWatchdog(folder, switchboard, launcher, note, events=new, **more).serve()


def _servers(folder: Path) -> Collection[int]:
    """The parameter servers of a run; none if its files cannot be read."""
    from instep.store.run_folder import RunFolder

    with suppress(InstepError):
        return RunFolder(folder).members.servers
    return ()
