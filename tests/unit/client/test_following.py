"""The process that feeds loggers is started, also where a system is short of processes."""

import errno
import subprocess
from pathlib import Path

import pytest

from instep.client.following import logged
from instep.job.file import build
from instep.system import processes

pytestmark = pytest.mark.process


@pytest.mark.parametrize("failures", [1, 99])
def test_a_system_that_is_short_of_processes_ends_no_run_that_is_done(
    tmp_path, monkeypatch, capsys, failures
):
    """The first process of loggers is killed; another is to find how far it has come."""
    monkeypatch.setattr(processes, "PAUSES_S", (0.0,) * 3)
    job = build({"recipe": "a.py:a", "report": {"loggers": ["csv"]}}, source="a test")
    popen, started = subprocess.Popen, []

    def scarce(*args, **options):
        if len(started) == 1 and failures > len(failed):
            failed.append(1)
            raise OSError(errno.EAGAIN, "no more processes")
        started.append(popen(["sleep", "600"] if not started else ["true"], **options))
        return started[-1]

    failed = []
    monkeypatch.setattr(processes.subprocess, "Popen", scarce)
    with logged(Path(tmp_path), job):
        started[0].kill()
    said = capsys.readouterr().err
    assert len(started) == (2 if failures == 1 else 1)
    assert ("a logger failed; the run's own records are complete" in said) == (failures == 99)
