"""A CSV file, `metrics.csv` in the run's folder: a line for each point.

If a step is there twice, the run went back behind it, and the later line counts.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from instep.job.spec import JobSpec
from instep.plain_file import plain
from instep.report.loggers.base import Point

_READ = 4096
"""Bytes that are looked through at a time."""


def _drop_torn(path: Path) -> None:
    """Cut off the line that a killed process was writing: its point is written again."""
    if path.exists():
        with open(path, "r+b", opener=plain) as file:
            end = file.seek(0, os.SEEK_END)
            while end:
                begin = file.seek(max(0, end - _READ))
                if ended := file.read(end - begin).rfind(b"\n") + 1:
                    end = begin + ended
                    break
                end = begin
            file.truncate(end)


class CsvLogger:
    """Appends to the file; the first line has the columns' names."""

    package: ClassVar[str] = ""

    def __init__(self, run: Path, job: JobSpec) -> None:
        file = run / "metrics.csv"
        _drop_torn(file)
        self._file = open(  # noqa: SIM115 closed by close
            file, "a", newline="", encoding="utf-8", opener=plain
        )
        self._lines = csv.writer(self._file)
        if not self._file.tell():
            self._lines.writerow(["step", "time", "name", "value"])

    def write(self, points: Sequence[Point]) -> None:
        """A line for each."""
        for point in points:
            self._lines.writerow([point.step, f"{point.time:.3f}", point.name, repr(point.value)])

    def flush(self) -> None:
        """Flush the file."""
        self._file.flush()

    def close(self, outcome: str) -> None:
        """Close the file."""
        self._file.close()
