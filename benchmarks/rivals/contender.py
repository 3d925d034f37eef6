"""What the recovery benchmark sees of a system that trains in a group: its committed steps.

A contender is started, its workers are killed by number, and it says which
steps were committed by a whole group of how many workers. Times are Unix
seconds of one machine. How workers are started, watched and replaced is the
contender's own affair.

The programs that rivals run write one record for each committed step
(`Recorder`); `steps_in` joins the records of all workers. Of torch nothing is
known here: the supervisors import this, and so do the workers.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import psutil

RECORD = np.dtype(
    [
        ("step", "<i8"),
        ("end", "<f8"),  # Unix seconds
        ("workers", "<i4"),  # that gave a gradient to it
        ("generation", "<i4"),  # another number whenever the members are others
    ]
)


class Step(NamedTuple):
    """A step that every worker of a group has committed."""

    number: int
    end: float
    """When the last of them had; Unix seconds."""

    workers: int
    """That gave a gradient to it."""

    generation: int


class Recovery(NamedTuple):
    """What one kill cost."""

    first_s: float
    """From the kill to the end of the next step that a group without the killed one committed."""

    full_s: float
    """The same, for a step of the full number of workers."""

    redone: int
    """Steps that had been committed and were computed again."""

    reduced: int
    """Steps committed by fewer workers meanwhile."""


class Contender(Protocol):
    """One system in one folder, started when made."""

    workers: int

    def alive(self) -> bool:
        """Whether it can still go on."""

    def pids(self) -> list[int]:
        """Of the workers."""

    def steps(self, newest: int | None = None) -> list[Step]:
        """Committed steps by their ends; with `newest`, those of the last so many records."""

    def end(self) -> None:
        """Stop it, every process."""


def recovery(steps: list[Step], kill: float, workers: int) -> Recovery | None:
    """What the kill at that moment cost; None while the full number has committed nothing since.

    A group counts from its first step on: one that committed before the kill had the killed
    worker in it.
    """
    began: dict[int, float] = {}
    for step in steps:
        began.setdefault(step.generation, step.end)
    after = [step for step in steps if began[step.generation] > kill]
    full = next((step for step in after if step.workers >= workers), None)
    if full is None:
        return None
    before = max((step.number for step in steps if step.end <= kill), default=0)
    reduced = sum(step.workers < workers for step in after if step.end < full.end)
    redone = max(0, before - after[0].number + 1)
    return Recovery(after[0].end - kill, full.end - kill, redone, reduced)


class Recorder:
    """Writes a worker's committed steps, each at once, to `folder`/RANK.PID."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"{rank}.{os.getpid()}").open("wb", buffering=0)

    def committed(self, step: int, workers: int, generation: int) -> None:
        self._file.write(np.array((step, time.time(), workers, generation), RECORD).tobytes())

    def close(self) -> None:
        self._file.close()


def newest_pid_of_each_rank(folder: Path) -> list[int]:
    """Of the workers whose `Recorder` wrote last."""
    files = sorted(folder.glob("*.*"), key=lambda file: file.stat().st_mtime)
    return list({file.stem: int(file.suffix[1:]) for file in files}.values())


def steps_in(folder: Path, newest: int | None = None) -> list[Step]:
    """The steps that as many workers recorded as gave a gradient to them, by their ends."""
    parts = [tail(file, RECORD, newest) for file in folder.glob("*.*")]
    records = np.concatenate([np.empty(0, RECORD), *parts])
    found: dict[tuple[int, int, int], list[float]] = {}
    for step, end, workers, generation in records.tolist():
        found.setdefault((generation, step, workers), []).append(end)
    whole = [
        Step(step, max(ends), workers, generation)
        for (generation, step, workers), ends in found.items()
        if len(ends) >= workers
    ]
    return sorted(whole, key=lambda step: step.end)


def tail(file: Path, dtype: np.dtype, newest: int | None) -> np.ndarray:
    """The last whole records of a file that somebody still writes; all with None."""
    if not file.exists():
        return np.empty(0, dtype)
    count = file.stat().st_size // dtype.itemsize
    first = 0 if newest is None else max(0, count - newest)
    return np.fromfile(file, dtype, count - first, offset=first * dtype.itemsize)


def end_tree(pid: int) -> None:
    """Kill a process and all that came of it, and wait until they are gone."""
    try:
        root = psutil.Process(pid)
        everyone = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in everyone:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(everyone, timeout=10)
