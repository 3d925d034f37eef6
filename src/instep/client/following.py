"""Starts the process that feeds a run's loggers, beside the run, and waits for it at the end.

What it does, `report/loggers/follow.py` knows. If it fails, the run continues, and its own records
are complete; the client says so at the end.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from instep.job.spec import JobSpec
from instep.plain_file import plain
from instep.system.processes import is_stopped, start_with_retries

LINGER_S = 60.0
"""How long loggers may take at the end, such as to upload the last points."""

LOOK_S = 0.5
"""How often to look whether they were stopped, as by SIGSTOP, and would never end."""


@contextmanager
def logged(run: Path, job: JobSpec) -> Iterator[None]:
    """In this context the loggers of a job follow its run; nothing, if it has none."""
    if not job.report.loggers:
        yield
        return
    log = run / "logs" / "loggers.log"
    process = _start(run, job, log)
    try:
        yield
    finally:
        if not run.exists():
            process.kill()
            process.wait()
        elif _end(process) < 0:  # it was killed, or stopped: another one finds how far it has come
            with suppress(OSError):  # it is named below
                process = _start(run, job, log)
                _end(process)
        if process.returncode:
            print(
                f"instep: warning: a logger failed; the run's own records are complete. See {log}",
                file=sys.stderr,
            )


def _start(run: Path, job: JobSpec, log: Path) -> subprocess.Popen[bytes]:
    log.parent.mkdir(exist_ok=True)
    with open(log, "ab", opener=plain) as output:
        words = ["-m", "instep.report.loggers.follow", str(run), *job.report.loggers]
        return start_with_retries(
            [sys.executable, "-P", *words],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only us
        )


def _end(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    deadline = time.monotonic() + LINGER_S
    while not (stopped := is_stopped(process.pid)) and time.monotonic() < deadline:
        with suppress(subprocess.TimeoutExpired):
            return process.wait(LOOK_S)
    process.kill()
    return process.wait() if stopped else 1
