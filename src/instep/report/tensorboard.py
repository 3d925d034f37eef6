"""The loss, the speed and the validations of a run as a TensorBoard event file.

A view like those of `live.py`, for people who watch curves in TensorBoard.
It uses the `tensorboard` package's own record format and messages, and needs
neither torch nor tensorflow. It reads no clock: every point carries the time
at which the run says it happened.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from instep.errors import SpecError
from instep.store.run_folder import Records, step_ends

FLUSH_S, SPEED_S = 2.0, 1.0
"""Seconds between flushes to disk, and between points of the throughput curve."""
OVERLAP = 10_000
"""A step that arrives this many steps behind the newest is treated as a repetition."""


class TensorBoardWriter:
    """Writes `train/loss`, `train/samples_per_second` and `validation/NAME` over the step.

    Args:
        folder: where the event file goes; created with it. A second writer
            in the same folder (a resumed run) adds a file of its own.

    Raises:
        SpecError: the `tensorboard` package is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.compat.proto.summary_pb2 import Summary
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise SpecError(
                "report.tensorboard = true, but the tensorboard package is not installed. "
                "Get it with: pip install 'instep[tensorboard]'"
            ) from None
        self._event, self._summary, self._new_writer = Event, Summary, RecordWriter
        self._folder = folder
        self._writer: Any = None
        self._steps_written: set[int] = set()
        self._flushed = -np.inf
        self._samples = 0  # since the last point of the throughput curve
        self._since: float | None = None  # Unix seconds of that point

    def event(self, event: dict[str, Any]) -> None:
        """Write the metrics of a validation; other events have no curve."""
        if event["event"] == "validated":
            for name, value in event["metrics"].items():
                if isinstance(value, int | float):
                    self._write(f"validation/{name}", value, event["step"], event["time"])

    def records(self, ledger: Records, steps: Records) -> None:
        """Write the loss of each new step once, and the speed about once a second.

        Args:
            ledger: [any] of `LEDGER`; not used.
            steps: [any] of `STEPS`, of any workers.
        """
        if not len(steps):
            return
        ends = step_ends(steps)
        numbers, where = np.unique(steps["step"], return_index=True)
        oldest = int(numbers[-1]) - OVERLAP
        for step, place in zip(numbers.tolist(), where.tolist(), strict=True):
            if step not in self._steps_written and step > oldest:
                self._write("train/loss", steps["loss"][place], step, ends[place])
                self._steps_written.add(step)
        if len(self._steps_written) > 2 * OVERLAP:
            self._steps_written = {step for step in self._steps_written if step > oldest}
        self._follow_speed(steps, float(ends.max()), int(numbers[-1]))

    def _follow_speed(self, steps: Records, end: float, step: int) -> None:
        self._samples += int(steps["samples"].sum())
        self._since = float(steps["begin"].min()) if self._since is None else self._since
        passed_s = end - self._since
        if passed_s >= SPEED_S:
            self._write("train/samples_per_second", self._samples / passed_s, step, end)
            self._samples, self._since = 0, end

    def _write(self, tag: str, value: float, step: int, time: float) -> None:
        if self._writer is None:
            self._open(time)
        point = self._summary.Value(tag=tag, simple_value=float(value))
        summary = self._summary(value=[point])
        event = self._event(wall_time=time, step=step, summary=summary)
        self._writer.write(event.SerializeToString())

    def _open(self, time: float) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        # TensorBoard reads the files of a folder in the order of their names.
        name = f"events.out.tfevents.{int(time):010d}.instep.{os.getpid()}"
        self._writer = self._new_writer((self._folder / name).open("ab"))
        first = self._event(wall_time=time, file_version="brain.Event:2")
        self._writer.write(first.SerializeToString())

    def tick(self, now: float) -> None:
        """Flush to disk, every two seconds (`now`: seconds, from any origin)."""
        if self._writer is not None and now - self._flushed >= FLUSH_S:
            self._flushed = now
            self._writer.flush()

    def close(self) -> None:
        """Finish the file; a second call does nothing."""
        if self._writer is not None and not self._writer.closed:
            self._writer.close()
