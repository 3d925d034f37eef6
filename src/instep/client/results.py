"""What is written about a run by its client: facts at its start, files and one error at its end.

Way in: `about` before the run, `finish` or `failure` after it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.comm.protocol.messages import Failed
from instep.errors import CheckpointError, InstepError, RecipeError, RunError, WorkerError
from instep.formats import INSTEP
from instep.job.spec import JobSpec
from instep.plain_file import write_plain
from instep.store.folder import BEGINNING, StartPoint, resume_hint
from instep.words import member, shown_url

if TYPE_CHECKING:
    from instep.store.run_folder import RunFolder


_planned: ContextVar[dict[str, Any] | None] = ContextVar("planned", default=None)


@contextmanager
def as_planned(planned: dict[str, Any]) -> Iterator[None]:
    """Let runs that are started in this context say what was planned for them.

    Args:
        planned: `step_s`, `low_s`, `high_s` and `workers`.
    """
    token = _planned.set(planned)
    try:
        yield
    finally:
        _planned.reset(token)


def about(job: JobSpec) -> dict[str, Any]:
    """Fields of `run_started`: the command, the machine, the versions."""
    import psutil

    names = ("torch", "numpy", "safetensors")
    versions = {"python": platform.python_version(), "instep": INSTEP}
    return {
        "command": [Path(sys.argv[0]).name, *map(shown_url, sys.argv[1:])],
        "host": {
            "name": platform.node(),
            "system": platform.platform(),
            "cores": os.cpu_count(),
            "memory_bytes": psutil.virtual_memory().total,
        },
        "recipe_sha256": recipe_sha256(job),
        "started_by": "instep",
        "versions": versions | {n: _version(n) for n in names},
        **({"planned": planned} if (planned := _planned.get()) is not None else {}),
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

    They are for looking, and all that a run has computed is saved by now: what finds no room is
    left out, and said on standard error. The trace, which is the largest, comes last.

    Args:
        folder: of the run.
        start_point: where it started; if that is another run, its ledger does not begin at 1.

    Raises:
        RunError: the run's end could not be written, or the ledger is not what the job says.
    """
    from instep.report.figures.proof import prove
    from instep.report.figures.summary import summarise
    from instep.report.page.page import write_report
    from instep.report.timeline import write_trace
    from instep.store.run_folder import RunFolder

    run = RunFolder(folder)
    whole = start_point.checkpoint is None or start_point.checkpoint.is_relative_to(folder)
    fault = ""
    if whole and run.outcome in ("completed", "stopped") and not run.audit.exact:
        fault = prove(run).fault
        _has_failed(run, fault)
        run = RunFolder(folder)
    summary = summarise(run)
    text = json.dumps(summary, indent=2) + "\n"
    _write_or_say(folder / "summary.json", lambda path: write_plain(path, text))
    _write_or_say(folder / "report.html", lambda path: write_report(run, path))
    _write_or_say(folder / "trace.json", lambda path: write_trace(run, path))
    if run.outcome == "unfinished":
        raise RunError(
            f"the run has ended, but its end could not be written to {folder / 'events.jsonl'}, "
            "and its report has gaps: the disk was full or read-only."
        )
    if fault:
        raise RunError(f"the run has ended, but {fault}")
    return summary


def _has_failed(run: RunFolder, fault: str) -> None:
    """Have the log say so, for all that read it later: its master took the run for a good one."""
    from instep.events import EventLog

    with suppress(RunError):  # it is raised in any case
        log = EventLog(run.path / "events.jsonl")
        try:
            told = {
                key: run.ending[key] for key in ("rule", "step", "seconds") if key in run.ending
            }
            log.emit("run_finished", outcome="failed", why=fault, **told)
        finally:
            log.close()


def _write_or_say(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file for people to look at; if it cannot be written, say so and continue."""
    try:
        write(path)
    except OSError as error:
        again = f", then: instep report {path.parent}" if path.suffix == ".html" else ""
        text = f"{path} was not written: {error.strerror}. Make room, or get access{again}"
        print(f"note    {text if again else f'{text}.'}", file=sys.stderr, flush=True)


def refused(failed: Failed, folder: Path, start_point: StartPoint = BEGINNING) -> bool:
    """Whether a run was refused before it trained anything, so that its folder can be removed.

    Args:
        failed: why it failed.
        folder: of the run.
        start_point: where it started.
    """
    from instep.events import LEDGER, read_records

    kinds = ["SpecError", "RecipeError", "CheckpointError"]
    if not failed.step:
        kinds.append("DataError")
    fresh = start_point == BEGINNING and failed.kind in kinds
    return fresh and not len(read_records(folder / "ledger.bin", LEDGER))


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
    # the same program on the same checkpoint would end in the same way
    same = failed.kind == CheckpointError.__name__ and not failed.step
    hint = "" if same or "cannot be resumed" in failed.cause else resume_hint(folder)
    error = kind("\n".join(lines) + hint)
    error.exit_code = failed.exit_code
    return error
