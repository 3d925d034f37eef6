"""Writes the run's events and step records, each once, and knows what is in them so far.

They come from workers. One that reconnects, because a master was lost, cannot know what
that master had written, and sends it again; `master.py` knows which messages those are.
Way in: `Recorder`.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from instep.events import LEDGER, STEPS, EventLog, read_records
from instep.report.terminal.live import View
from instep.store.ledger import last_step
from instep.store.run_folder import RunFolder
from instep.store.step_log import StepLog

_REMEMBERED = 500
"""Events among which one that is sent again is looked for."""

_GOES_BACK = ("went_back", "corruption_found")
"""Events after which steps may be computed again."""

_LATELY = 100
"""Step records from which a new master learns how long a step takes."""

Records: TypeAlias = np.ndarray[Any, Any]
"""[any] of `STEPS`."""


class Pace(NamedTuple):
    """How long steps took."""

    steps: int
    step_s: float
    """Each, in total."""
    load_s: float
    """Of that, waiting for data."""


class Recorder:
    """The run's log and step records, and the views that show them.

    Args:
        run: the run folder.
        views: shown everything that is written.
    """

    def __init__(self, run: Path, views: Sequence[View]) -> None:
        self._run, self._views = run, list(views)
        self._log = EventLog(run / "events.jsonl")
        self._steps = StepLog(run)
        self._recent: deque[str] = deque(maxlen=_REMEMBERED)
        self._epochs: set[str] = set()  # ends of epochs, as they were sent
        self._last_step: dict[int, int] = {}
        self._last_begin: dict[int, float] = {}
        self._logged: int | None = None  # the step of the last values that the user's code logged

    def take_up(self, folder: RunFolder, workers: Iterable[int]) -> Pace | None:
        """Continue where a master was lost.

        Args:
            folder: what it has written.
            workers: those that may send again what it has written.

        Returns:
            How long the last steps took; None if there is none.
        """
        for worker in workers:
            mine = folder.steps_of(worker)
            if len(mine):
                self._last_step[worker] = int(mine["step"][-1])
                self._last_begin[worker] = float(mine["begin"].max())
        logged = (each for each in reversed(folder.events) if each["event"] == "logged")
        self._logged = next(logged, {}).get("step")
        for event in folder.events[-_REMEMBERED:]:
            self._recent.append(_as_sent(event))
        return _pace(folder.steps[-_LATELY:]) if len(folder.steps) else None

    # ---- steps

    @property
    def committed(self) -> int:
        """The last step that a worker has recorded; 0 before the first."""
        return max(self._last_step.values(), default=0)

    @property
    def reached(self) -> int:
        """The last step that is committed, also if all workers that recorded it are lost."""
        return max(self.committed, last_step(self._run / "ledger.bin"))

    def in_flight(self, worker: int) -> int:
        """The step that a worker is computing, as far as is known; 0 if it is not."""
        return self._last_step[worker] + 1 if worker in self._last_step else 0

    def record(self, worker: int, ledger: bytes, steps: bytes, *, again: bool) -> Pace | None:
        """Steps that a worker has committed.

        Args:
            worker: who.
            ledger: [any] of `LEDGER`, written already; for the views.
            steps: [any] of `STEPS`, as bytes.
            again: whether another master may have written them.

        Returns:
            How many were new, and how long they took; None where none was.
        """
        done, timed = np.frombuffer(ledger, LEDGER), np.frombuffer(steps, STEPS)
        if again:
            timed = timed[timed["begin"] > self._last_begin.get(worker, 0.0)]
        self._steps.write(timed.tobytes())
        self.show(lambda view: view.records(done, timed))
        if not len(timed):
            return None
        self._last_begin[worker] = float(timed["begin"].max())
        self._last_step[worker] = int(timed["step"][-1])
        return _pace(timed)

    def go_back(self, step: int) -> None:
        """The run has gone back to this step."""
        self._last_step = dict.fromkeys(self._last_step, step)

    # ---- events

    def emit(self, name: str, fields: Mapping[str, Any]) -> None:
        """Write an event."""
        if name in _GOES_BACK:  # epochs may end again
            self._epochs.clear()
        if name == "logged":
            self._logged = fields["step"]
        event = self._log.emit(name, **fields)
        self.show(lambda view: view.event(event))

    def warn(self, *texts: str) -> None:
        """Write warnings."""
        for text in texts:
            self.emit("warning", {"text": text})

    def record_event(self, name: str, fields: Mapping[str, Any], *, again: bool) -> bool:
        """Write a worker's event, unless it is there already; whether it was new.

        The end of an epoch is told again by the next first worker if that one is lost just then.

        Args:
            name, fields: the event.
            again: whether another master may have written it.
        """
        sent = _as_sent({"event": name, **fields})
        if (again and sent in self._recent) or sent in self._epochs:
            return False
        if name == "epoch_finished":
            self._epochs.add(sent)
        self._recent.append(sent)
        self.emit(name, fields)
        return True

    def moved(self, worker: int, before: int, now: int) -> None:
        """Say what may be missing where a worker's new process is on another host: what its last
        one had sent, and no master had handled, is in the memory of the former host."""
        if worker == 0 and self._logged is not None:  # which logs for all
            text = (
                f"worker 0 starts anew on host {now}, without the memory that its last process had "
                f"on host {before}: if it had logged values after step {self._logged}, they "
                "are lost. No step was lost."
            )
            self.warn(text)

    # ---- views

    def show_ledger(self) -> None:
        """Show the steps of earlier sessions."""
        before = read_records(self._run / "ledger.bin", LEDGER)
        self.show(lambda view: view.records(before, np.empty(0, STEPS)))

    def show(self, what: Callable[[View], None]) -> None:
        """Update every view; one that fails is closed, so that the run does not fail with it."""
        for view in list(self._views):
            try:
                what(view)
            except Exception as error:
                self._views.remove(view)
                self.warn(f"a view of the run failed and was closed: {error!r}.")

    def close(self) -> None:
        """Close the files."""
        self._log.close()
        self._steps.close()


def _pace(timed: Records) -> Pace:
    """Means over these steps."""
    parts = [name for name in STEPS.names or () if name.endswith("_s")]
    step_s = float(np.mean(sum(timed[name].astype(np.float64) for name in parts)))
    return Pace(len(timed), step_s, float(np.mean(timed["load_s"])))


def _as_sent(event: Mapping[str, Any]) -> str:
    """An event as a worker sends it, without the time at which it was written."""
    plain = {key: value for key, value in event.items() if key != "time"}
    return json.dumps(plain, default=str, sort_keys=True)
