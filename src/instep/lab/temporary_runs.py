"""Runs in a temporary folder, for commands that compute only to compare.

`determinism.py` and `replay.py` say what is run and compared. Nothing here imports torch.
Ways in: `folder_for_runs`, `run_quietly`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec

from instep.client.submit import run_job
from instep.errors import INTERRUPTED, InstepError
from instep.events import LEDGER, read_records
from instep.job.spec import JobSpec
from instep.store.run_folder import RunFolder
from instep.system.processes import interrupt, on_signals
from instep.system.temporary import temporary_folder

SAID_S = 2.0
"""Seconds between two lines of progress."""

_SHOWN = 60
"""Lines of a failed worker's output that are shown: its log is deleted with the folder."""


def unlogged(job: JobSpec) -> JobSpec:
    """The job without loggers and copies: what a run of the lab gives is no result."""
    replace = msgspec.structs.replace
    checkpoint = replace(job.checkpoint, copy_to="")
    return replace(job, report=replace(job.report, loggers=()), checkpoint=checkpoint)


def run_quietly(job: JobSpec, runs: Path, **options: Any) -> RunFolder:
    """Run a job in a temporary folder of runs to its end.

    Args:
        job: what to run.
        runs: folder of run folders, which will be deleted.
        options: of `run_job`.

    Raises:
        InstepError: the run failed; the text names no file that will be deleted.
        KeyboardInterrupt: Ctrl-C or SIGTERM came: it reached the run, and is meant for the
            whole command.
    """
    try:
        done = run_job(unlogged(job), runs, named=False, quiet=True, **options)
    except InstepError as error:
        error.args = (_without_folder(str(error), runs),)
        raise
    if done.exit_code == INTERRUPTED:
        raise KeyboardInterrupt
    return RunFolder(done.path)


def _without_folder(text: str, runs: Path) -> str:
    """An error's text with the end of the log instead of paths in the folder, which is deleted."""
    cause, *lines = text.splitlines()
    shown = [cause, *(line for line in lines if str(runs) not in line)]
    for log in runs.glob("*/logs/*.log"):
        if str(log) in text:
            said = log.read_text(errors="replace").splitlines()[-_SHOWN:]
            shown += [f"  the end of {log.name}:", *(f"    {line}" for line in said)]
    return "\n".join(shown)


@contextmanager
def folder_for_runs(prefix: str) -> Iterator[Path]:
    """A folder that is deleted afterwards, even if a signal ends the command at any moment; what a
    killed command has left goes with it.

    Args:
        prefix: its name begins so.

    Raises:
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP came in the context.
    """

    with on_signals(interrupt), ExitStack() as stack:
        folder = stack.enter_context(temporary_folder(prefix))
        try:
            yield folder
        finally:
            with on_signals(signal.SIG_IGN):  # a second Ctrl-C would leave half of it
                stack.close()


class Progress:
    """Prints now and then which step of a run has been committed.

    Args:
        say: prints a line.
        last: the last step of the run; 0 if it is not known.
    """

    def __init__(self, say: Callable[[str], None], last: int = 0) -> None:
        self._say, self._of = say, f" of {last}" if last else ""
        self._due = time.monotonic() + SAID_S

    def __call__(self, run: Path) -> None:
        """Look at a run folder, and print a line if it is time to."""
        now = time.monotonic()
        if now < self._due:
            return
        self._due = now + SAID_S
        if step := int(read_records(run / "ledger.bin", LEDGER)["step"].max(initial=0)):
            self._say(f"step {step}{self._of}")
