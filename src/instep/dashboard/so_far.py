"""Results of the records of a run so far, which are not kept: times, curves, parts of steps, audit.

Records come in the order of the files, in pieces of any size. Ways in: `StepsSoFar`, `LedgerSoFar`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from instep.dashboard.fold import Fold
from instep.events import LEDGER, STEPS
from instep.job.spec import JobSpec
from instep.report.figures.proof import untiled
from instep.store.run_files import PARTS, Event, Floats, Records, step_ends, with_possible_times
from instep.store.run_folder import RunPlan, last_whole_step
from instep.store.run_times import elapsed_in, seconds_of

OPEN = 256
"""Steps that may still get records of other workers, or be computed again."""

MEMORY_STEPS = 20.0
"""Over so many steps the parts of a step are averaged."""

_RECENT = 1024
"""Records at the end of a piece, among which is the one that ended last."""

_TAIL = 512
"""Records at the end of the ledger, among which is the last whole step."""

PARTS_S = [f"{part}_s" for part in PARTS]


class TimesSoFar:
    """The sessions of a run, as they come."""

    def __init__(self) -> None:
        self._sessions: list[tuple[float, float]] = []

    def start(self, at: float) -> None:
        """Begin a session, Unix seconds."""
        self._sessions.append((at, at))

    def reach(self, at: float) -> None:
        """Note that something happened, Unix seconds."""
        if self._sessions and at > self.end:
            self._sessions[-1] = self.begin, at

    @property
    def begin(self) -> float:
        """When the latest one began, Unix seconds; 0 if there is none."""
        return self._sessions[-1][0] if self._sessions else 0.0

    @property
    def end(self) -> float:
        """When the last thing happened, Unix seconds; 0 if nothing has."""
        return self._sessions[-1][1] if self._sessions else 0.0

    @property
    def first(self) -> float | None:
        """When the run began, Unix seconds."""
        return self._sessions[0][0] if self._sessions else None

    def session_of(self, times: Floats) -> NDArray[np.int64]:
        """Number the session of each of some Unix times, from 0."""
        return np.searchsorted([begin for begin, _ in self._sessions[1:]], times)

    def elapsed(self, times: Floats | float) -> Floats:
        """Give Unix times as seconds of this run; time between two sessions does not count."""
        return elapsed_in(self._sessions, times)

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken."""
        return seconds_of(self._sessions)


SessionOf = Callable[[Floats], NDArray[np.int64]]
"""From Unix times to the numbers of the sessions of a run in which they are."""


class WorkerTotals:
    """Samples and seconds of one worker in the whole run, as `summary.json` counts them."""

    def __init__(self) -> None:
        self.samples = 0.0
        self.parts: Floats = np.zeros(len(PARTS))
        """Seconds of each part of its steps, [parts]; `PARTS` names them."""
        self._spans: dict[int, tuple[float, float]] = {}

    def count(self, steps: Records) -> None:
        """Count records of steps that count."""
        self.samples += float(steps["samples"].sum())
        self.parts += [float(steps[part].sum(dtype=np.float64)) for part in PARTS_S]

    def span(self, steps: Records, session_of: SessionOf) -> None:
        """See when steps were computed, those that were discarded too."""
        ends, sessions = step_ends(steps), session_of(steps["begin"])
        for number in np.unique(sessions).tolist():
            mine = sessions == number
            begin, end = float(steps["begin"][mine].min()), float(ends[mine].max())
            before = self._spans.get(number, (begin, end))
            self._spans[number] = min(begin, before[0]), max(end, before[1])

    @property
    def seconds(self) -> float:
        """From the begin of its first step to the end of its last, over the sessions."""
        return sum(end - begin for begin, end in self._spans.values())


class StepsSoFar:
    """Takes records of steps.

    Args:
        discards: events at which the run went back: Unix seconds, and the step it went back to.
        session_of: tells sessions apart; without it, no totals of workers are kept.
    """

    def __init__(
        self,
        discards: Sequence[tuple[float, int]] = (),
        session_of: SessionOf | None = None,
    ) -> None:
        self._discards, self._session_of = discards, session_of
        self._loss, self._norm = Fold(), Fold()
        self._open: Records = np.zeros(0, STEPS)
        self.records, self.begin, self.end = 0, 0.0, 0.0
        """How many there were; when the first step began and the last one ended, Unix seconds."""
        self.parts: dict[int, Floats] = {}
        """Seconds of each part of recent steps, by worker, [parts]; `PARTS` names them."""
        self.workers = defaultdict[int, WorkerTotals](WorkerTotals)
        """Totals by worker."""

    def take(self, steps: Records) -> Records:
        """Take records; returns those that count, [any] of `STEPS`."""
        if self._session_of is not None:
            for worker, mine in _by_worker(with_possible_times(steps)):
                self.workers[worker].span(mine, self._session_of)
        for time, step in self._discards:
            steps = steps[(steps["step"] <= step) | (steps["begin"] >= time)]
        if not len(steps):
            return steps
        if self._session_of is not None:
            for worker, mine in _by_worker(steps):
                self.workers[worker].count(mine)
        recent = with_possible_times(steps[-_RECENT:])
        self.records += len(steps)
        self.begin = self.begin or float(steps["begin"].min())
        self.end = max(self.end, float(step_ends(recent).max()))
        self._follow_parts(recent)
        waiting = np.concatenate([self._open, steps]) if len(self._open) else steps
        number = waiting["step"].astype(np.int64)
        if np.all(number[1:] >= number[:-1]):  # a slice costs nothing, as does one of a long run
            cut = int(np.searchsorted(number, number[-1] - OPEN, side="right"))
            over, still = waiting[:cut], waiting[cut:]
        else:
            old = number <= int(number.max()) - OPEN
            over, still = waiting[old], waiting[~old]
        _fold(over, self._loss, self._norm)
        self._open = still.copy()
        return steps

    def _follow_parts(self, steps: Records) -> None:
        steps = steps[np.argsort(steps["worker"], kind="stable")]
        workers, begins, counts = np.unique(steps["worker"], return_index=True, return_counts=True)
        times = np.array([steps[part] for part in PARTS_S], np.float64)
        sums = np.add.reduceat(times, begins, axis=1).T
        kept = np.exp(-counts / MEMORY_STEPS)
        for at, worker in enumerate(workers.tolist()):
            self.parts[worker] = self.parts.get(worker, 0.0) * kept[at] + sums[at]

    def curves(self) -> tuple[Fold, Fold]:
        """Loss and norm of the gradient, of all steps so far."""
        loss, norm = self._loss.copy(), self._norm.copy()
        _fold(self._open, loss, norm)
        return loss, norm


def _by_worker(steps: Records) -> Iterator[tuple[int, Records]]:
    for worker in np.flatnonzero(np.bincount(steps["worker"])).tolist():
        yield worker, steps[steps["worker"] == worker]


def _fold(steps: Records, loss: Fold, norm: Fold) -> None:
    """Add the results of some steps, whose records are all here; the later of two counts."""
    if not len(steps):
        return
    number = steps["step"].astype(np.int64)
    if np.any(number[1:] <= number[:-1]):  # several workers, or a step that was repeated
        steps = steps[np.lexsort((steps["begin"], number))]
        number = steps["step"].astype(np.int64)
        begins = np.concatenate([[0], np.flatnonzero(np.diff(number)) + 1])
        newest = np.append(begins[1:], len(number)) - 1
        norms = _norms(steps)
        of = np.fmax.reduceat(norms, begins)
        ends = np.maximum.reduceat(step_ends(with_possible_times(steps)), begins)
        loss.add(number[newest], steps["loss"][newest], ends)
        known = np.isfinite(of)
        norm.add(number[newest][known], of[known], ends[known])
        return
    loss.add(number, steps["loss"].astype(np.float64), partial(_ends_at, steps))
    norms = _norms(steps)
    known = np.isfinite(norms)
    if known.all():
        norm.add(number, norms, partial(_ends_at, steps))
    elif known.any():
        norm.add(number[known], norms[known], partial(_ends_at, steps[known]))


def _norms(steps: Records) -> Floats:
    """Norms of the gradient, [records]; NaN where none was computed, or it is not finite."""
    norms: Floats = steps["gradient_norm"].astype(np.float64)
    norms[~np.isfinite(norms)] = np.nan
    return norms


def _ends_at(steps: Records, places: NDArray[np.int64]) -> Floats:
    return step_ends(with_possible_times(steps[places]))


class LedgerSoFar:
    """Takes records of the ledger, and checks that each step took what the job gives it.

    Where steps are not of one size, what each takes is known from the whole ledger alone, and it is
    checked at the end.

    Args:
        spec: of the job.
        check: whether to check, or only to count.
    """

    def __init__(self, spec: JobSpec, *, check: bool = True) -> None:
        self._checks = check
        self._spec, self.is_fixed = spec, False
        self.plan = RunPlan(spec, {}, {}, np.zeros(0, LEDGER))
        self.records, self.samples = 0, 0
        self.wrong = 0
        """Steps whose records are not exactly the positions of their global batch."""
        self.checked = 0
        """The last step that is checked; 0 where that cannot be told step by step."""
        self._used = Fold()
        self._tail: Records = np.zeros(0, LEDGER)
        self._unchecked: list[Records] = []
        self._last: int | None = None
        self._ahead = 0

    def know(self, ready: Event, divided: Event) -> None:
        """Take the newest `worker_ready` and `data_divided` event."""
        self.is_fixed, self._last = not ready.get("epoch_steps"), None
        self.plan = RunPlan(self._spec, ready, divided, np.zeros(0, LEDGER))

    def take(self, ledger: Records) -> None:
        """Take the next records, [any] of `LEDGER`."""
        if not len(ledger):
            return
        self._last = None
        self.records += len(ledger)
        self._tail = np.concatenate([self._tail, ledger[-_TAIL:]])[-_TAIL:]
        taken = ledger["stop"] - ledger["first"]
        self.samples += int(taken.sum())
        step = ledger["step"].astype(np.int64)
        self._used.add(step, taken.astype(np.float64), np.zeros(len(step)))
        known = self.is_fixed or not self.plan.epoch_samples
        if self._checks and known and self.plan.own_rounds is None:
            self._unchecked.append(ledger)
            self._check()

    def _check(self) -> None:
        """Check whole steps; the samples of a step have to be known before."""
        if not self.is_fixed or not self.plan.epoch_samples or self.last_step <= self.checked:
            return
        waiting = np.concatenate(self._unchecked)
        ready = waiting["step"] <= self.last_step
        batches = self.plan.batches
        found = untiled(waiting[ready], batches, self.last_step, self.checked + 1)
        self.wrong, self.checked = self.wrong + len(found), self.last_step
        self._unchecked = [waiting[~ready]]

    @property
    def last_step(self) -> int:
        """The last step that is whole."""
        if self._last is None and not self.is_fixed:
            self._last = int(self._tail["step"].max(initial=0))
        if self._last is None:
            self._last = last_whole_step(self._tail, self.plan, self.records)
        return self._last

    def look_ahead(self, tail: Records, records: int) -> None:
        """See the end of a ledger of so many records that is not read so far."""
        self._ahead = last_whole_step(tail, self.plan, records)

    @property
    def reached(self) -> int:
        """The last step that is whole, of all that is there."""
        return max(self.last_step, self._ahead)

    @property
    def epoch(self) -> int:
        """The last one that is begun, from 0."""
        return int(self._tail["epoch"].max(initial=0))

    def samples_by(self, steps: Records) -> Floats:
        """Samples of all steps up to and including each of `steps`, [steps]; within a bucket of
        many steps in proportion."""
        ends, sums = self._used.step, np.cumsum(self._used.total)
        if not len(ends) or not len(steps):
            return np.zeros(len(steps))
        if steps.max() > ends[-1] and self.is_fixed and self.plan.epoch_samples > 0:
            due = [self.plan.batches.of(step) for step in steps.tolist()]  # it is not read so far
            return np.array([self.plan.epoch_samples * at.epoch + at.stop for at in due], float)
        begin = (steps // self._used.width) * self._used.width - 1
        before = np.searchsorted(ends, begin, side="right") - 1
        known = np.append(0.0, sums)[before + 1]
        places = np.append(0, ends)[before + 1]
        after = np.minimum(before + 1, len(ends) - 1)
        span = np.maximum(ends[after] - np.maximum(places, begin), 1)
        share = np.clip((steps - np.maximum(places, begin)) / span, 0.0, 1.0)
        found: Floats = np.round(known + (sums[after] - known) * share)
        return found

    def as_table(self) -> Mapping[str, Any]:
        """Tell what is known by now; `exact` is None where it cannot be told before the end."""
        known = self.checked > 0
        return {
            "exact": self.wrong == 0 if known else None,
            "last_step": self.last_step,
            "planned_steps": self.plan.steps,
            "records": self.records,
            "used": self.samples,
            "wrong_steps": self.wrong,
        }
