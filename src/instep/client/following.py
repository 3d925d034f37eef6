"""Starts the process that feeds a run's loggers, beside the run, and waits for it at the end.

What it does, `report/loggers/follow.py` knows. If it fails, the run goes on, and its own records
are complete; the client says so at the end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from instep.plain_file import plain
from instep.spec import JobSpec

LINGER_S = 60.0
"""How long loggers may take at the end, such as to upload the last points."""


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
        elif _end(process) < 0:  # it was killed: another one finds how far it has come
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
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "instep.report.loggers.follow", run, *job.report.loggers],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            start_new_session=True,  # Ctrl-C reaches only us
        )


def _end(process: subprocess.Popen[bytes]) -> int:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        return process.wait(LINGER_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return 1
