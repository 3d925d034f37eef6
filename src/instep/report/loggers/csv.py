"""A CSV file, `metrics.csv` in the run's folder: a line for each point.

If a step is there twice, the run went back behind it, and the later line counts.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from instep.plain_file import plain
from instep.report.loggers.base import Point
from instep.spec import JobSpec


class CsvLogger:
    """Appends to the file; the first line has the columns' names."""

    package: ClassVar[str] = ""

    def __init__(self, run: Path, job: JobSpec) -> None:
        self._file = open(  # noqa: SIM115 closed by close
            run / "metrics.csv", "a", newline="", encoding="utf-8", opener=plain
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
