"""A trace of chosen steps by torch's profiler, a file for each worker.

It only watches: what a step computes is the same with it and without it. A step that is repeated
because a worker was lost is traced again from its beginning. Way in: `StepProfiler`.
"""

from __future__ import annotations

from typing import Any

import torch

from instep.comm.protocol.messages import COMPILING
from instep.engine.member import Member
from instep.worker.passes.activity import Activity

FOLDER = "profile"


class StepProfiler:
    """Traces the steps that the job chooses with `report.profile`.

    Args:
        member: of this worker.
        activity: what the worker is doing.
    """

    def __init__(self, member: Member, activity: Activity) -> None:
        self._member, self._activity = member, activity
        self._first, self._last = member.job.report.profile or (0, -1)
        self._profiler: Any = None
        self._step: Any = None
        self._begun = 0

    def begin(self, step: int) -> None:
        """A step begins."""
        if not self._first <= step <= self._last:
            return
        if self._profiler is None:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                kinds.append(torch.profiler.ProfilerActivity.CUDA)
            with self._activity.during(COMPILING):  # it keeps the interpreter's lock
                self._profiler = torch.profiler.profile(activities=kinds)
                self._profiler.start()
            self._begun = step
        self._step = torch.profiler.record_function(f"step {step}")
        self._step.__enter__()

    def end(self, step: int, *, last: bool) -> None:
        """A step is committed; `last`: the run ends with it."""
        if self._profiler is None:
            return
        self._close_step()
        if step >= self._last or last:
            with self._activity.during(COMPILING):
                self._profiler.stop()
                self._write(step)
            self._profiler = None

    def drop(self) -> None:
        """Forget what is traced: the group came apart, and steps may be repeated."""
        if self._profiler is not None:
            self._close_step()
            self._profiler.stop()
            self._profiler = None

    def _close_step(self) -> None:
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._step = None

    def _write(self, step: int) -> None:
        """Write the trace into the run's folder; without it, if that fails, the run continues."""
        member = self._member
        if not member.sees_run:
            member.warn(
                f"worker {member.number} does not see the run's folder: its profile of steps "
                f"{self._begun} to {step} is not kept."
            )
            return
        path = member.run / FOLDER / f"worker-{member.number}.json"
        try:
            path.parent.mkdir(exist_ok=True)
            self._profiler.export_chrome_trace(str(path))
            size = path.stat().st_size
        except (OSError, RuntimeError) as error:
            member.warn(f"the profile of worker {member.number} was not written: {error}")
            return
        about = {"first": self._begun, "last": step, "size_bytes": size}
        name = f"{FOLDER}/{path.name}"
        member.emit("steps_profiled", worker=member.number, path=name, **about)
