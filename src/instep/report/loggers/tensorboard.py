"""TensorBoard event files, in `tensorboard/` of the run's folder.

It uses the `tensorboard` package's own record format and messages, and needs neither torch nor
tensorflow. It reads no clock: every point carries its time.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from instep.job.spec import JobSpec
from instep.report.loggers.base import Point


class TensorBoardLogger:
    """A process that continues a run adds a file of its own."""

    package: ClassVar[str] = "tensorboard"

    def __init__(self, run: Path, job: JobSpec) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._summary, self._new_writer = Event, Summary, RecordWriter
        self._folder = run / "tensorboard"
        self._writer: Any = None

    def write(self, points: Sequence[Point]) -> None:
        """Append each as a scalar."""
        for point in points:
            if self._writer is None:
                self._open(point.time)
            scalar = self._summary.Value(tag=point.name, simple_value=point.value)
            self._append(step=point.step, time=point.time, summary=self._summary(value=[scalar]))

    def _open(self, time: float) -> None:
        self._folder.mkdir(exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time):010d}.instep.{os.getpid()}"
        self._writer = self._new_writer((self._folder / name).open("ab"))
        self._append(time=time, file_version="brain.Event:2")

    def _append(self, *, time: float, **what: Any) -> None:
        self._writer.write(self._event(wall_time=time, **what).SerializeToString())

    def flush(self) -> None:
        """Flush the file."""
        if self._writer is not None:
            self._writer.flush()

    def close(self, outcome: str) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
