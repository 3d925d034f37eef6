"""The figures of a run that is still running: rates, shares, the loss, the time left.

The views feed it every event and every record, and ask it for what they show. It knows
nothing of terminals, colours or layout. Way in: `Progress`.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from instep.data.batches import Batches
from instep.data.order import LARGEST, Position
from instep.data.step_sizes import NewestSteps
from instep.job.spec import JobSpec
from instep.report.figures.summary import OWN
from instep.store.run_files import PARTS, Records, step_ends
from instep.words import LAST_STEPS, phases_in_words, whole_seconds

MEMORY_S, MEMORY_STEPS = 10.0, 20.0
"""Time constant of the rates: so many seconds or so many steps, whichever is longer."""
SLOW = 1.5
"""A worker this many times slower than the median is shown as slow."""
QUIET_S, QUIET_STEPS = 5.0, 5.0
"""A worker without records for this long, in seconds and in steps, is shown as quiet."""

_STEPS, _SAMPLES, _WORK, _WAIT, _WALL, _SUMS = range(6)


class Row(NamedTuple):
    """One line of the table: a worker, several of them, or all."""

    name: str
    state: str
    rate: float  # samples per second
    share: float  # of the samples of recent steps, 0 to 1
    wait: float  # of the time of recent steps, 0 to 1
    sent: float  # bytes since the start
    received: float
    note: str = ""  # instead of the figures, before the first step


class Progress:
    """Figures of a run; takes an amount of memory that does not grow with the run's length.

    Rates and shares are exponential moving averages over recent steps: over ten seconds, or
    over twenty steps if those take longer, and begin anew when the members change. The loss is
    that of the summary.

    Args:
        job: as run.
        name: of the run.
        clock: seconds, from any origin.
        earlier: steps that earlier sessions committed, and the loss of each: [steps] and [steps].
    """

    def __init__(
        self,
        job: JobSpec,
        name: str,
        clock: Callable[[], float],
        earlier: tuple[Records, Records] | None = None,
    ) -> None:
        self._earlier = earlier
        self.job, self.name, self.clock = job, name, clock
        self.began = clock()
        self.ready: dict[str, Any] = {}
        self.generations = 0
        self.step = self.epoch = self.committed = 0
        self.validated: dict[str, Any] = {}
        self.logged: dict[str, Any] = {}
        """The newest value of each name that callbacks have logged."""
        self.saved: tuple[float, dict[str, Any]] | None = None
        self.over = False
        """Whether no process computes any more, whatever the last events say."""
        self._losses = deque[tuple[float, int]](maxlen=LAST_STEPS)
        self._sum: tuple[float, ...] = (0.0, 0)  # loss times samples, and samples
        self._loss_step, self._loss_epoch = 0, 0  # the last that is in it
        self._taken = NewestSteps()  # of unequal size
        self._begin_session(0)

    def _begin_session(self, first_step: int) -> None:
        """Forget the processes of the session before."""
        self._first_step, self._pauses_s = first_step, 0.0
        self.workers = list(range(self.job.workers + self.job.sync.server_count))
        self.servers = set(self.workers[self.job.workers :])
        self._members = set[int]()
        self.states: dict[int, str] = {}
        self.phases: dict[int, dict[str, float]] = {}
        self.tried: dict[int, tuple[int, int]] = {}
        """How far the trial of each worker is."""
        self.traffic: dict[int, tuple[float, float]] = {}
        self.steps_seen = False
        """Whether a worker has recorded a step in this session."""
        self._forget_rates()

    def _forget_rates(self) -> None:
        """Begin anew with the rates and shares of those who are there now."""
        count = max(self.workers, default=-1) + 1
        self._sums = np.zeros((count, _SUMS))
        self._end = np.full(count, np.inf)  # Unix seconds; the end of each worker's newest step
        self._seen = np.full(count, np.inf)  # when each worker last sent a record, on `clock`

    def event(self, event: dict[str, Any]) -> None:
        """Take in one event of `EVENTS`; events that change no figure are ignored."""
        what, worker = event["event"], event.get("worker", -1)
        if what == "run_started":
            self._begin_session(event.get("resumed_step", -1) + 1)
        elif what == "worker_joined":
            self.states[worker] = "joined"
            (self.servers.add if event.get("role") == "server" else self.servers.discard)(worker)
        elif what == "trial_progress":
            self.tried[worker] = event["done"], event["of"]
        elif what == "worker_ready":
            self.states[worker], self.ready = "ready", event
            self.phases[worker] = event.get("phases") or {}
            if self._earlier is not None:  # now the length of an epoch is known
                self._follow_loss(*self._earlier)
                self._earlier = None
        elif what == "generation_started":
            self._regroup({*event["members"]})
        elif what == "traffic":
            self.traffic[worker] = (event["sent_bytes"], event["received_bytes"])
        elif what == "validated":
            self.validated = event
            self._pauses_s += event.get("seconds") or 0.0
        elif what == "logged":
            values = event["values"].items()
            self.logged |= {name: v for name, v in values if not name.startswith(OWN)}
        elif what == "epoch_finished" and not self.job.train.steps:
            if event["step"] >= self._loss_step:  # else steps of the next one were quicker
                self._sum = event["loss"] * event["samples"], event["samples"]
                self._loss_step = event["step"]
        elif what == "checkpoint_saved":
            self.saved = (self.clock(), event)
        elif what == "worker_failed":
            self._leaves(worker, "failed")
        elif what == "run_finished":
            for one in self.workers:
                if self.states.get(one) in ("joined", "ready"):
                    self.states[one] = "done"
        elif what == "process_ended" and self.states.get(worker) != "failed":
            self._leaves(worker, f"exit {event['code']}" if event["code"] else "done")

    def _regroup(self, members: set[int]) -> None:
        """See who computes from now on."""
        self.workers, self._members = sorted({*self.workers, *members}), members
        self.generations += 1
        gone = {*self.workers} - members
        self.states |= {one: "left" for one in gone if self.states.get(one) == "done"}
        self._forget_rates()

    def _leaves(self, worker: int, state: str) -> None:
        others_go_on = state == "done" and self._members and worker not in self._members
        self.states[worker] = "left" if others_go_on else state
        if state != "done" and 0 <= worker < len(self._sums):
            self._sums[worker] = 0

    def records(self, ledger: Records, steps: Records) -> None:
        """Take in new records, [any] of `LEDGER` and [any] of `STEPS`."""
        if len(ledger):
            self._first_step = self._first_step or int(ledger["step"].min())
            self.step = max(self.step, int(ledger["step"].max()))
            newest = int(ledger["epoch"].max())
            if self.job.own_data:  # participants have epochs of their own
                newest = self._where(self.step).epoch
            self.epoch = max(self.epoch, newest)
            if self.ready.get("epoch_steps"):
                self._taken.add(ledger)
            self.committed += int((ledger["stop"] - ledger["first"]).sum())
        if len(steps):
            self.steps_seen = True
            worker = steps["worker"]
            self._make_room(int(worker.max()) + 1)
            if not self._members:
                self.workers = sorted({*self.workers, *np.unique(worker).tolist()})
            self._follow_rates(steps[np.isin(worker, list(self._members or self.workers))])
            numbers, first = np.unique(steps["step"], return_index=True)
            self._follow_loss(numbers, steps["loss"][first])  # all workers record the same loss

    def _make_room(self, workers: int) -> None:
        missing = workers - len(self._sums)
        if missing > 0:
            self._sums = np.vstack([self._sums, np.zeros((missing, _SUMS))])
            self._end = np.append(self._end, np.full(missing, np.inf))
            self._seen = np.append(self._seen, np.full(missing, np.inf))

    def _follow_rates(self, steps: Records) -> None:
        worker, count = steps["worker"], len(self._sums)
        parts_s = {part: np.bincount(worker, steps[f"{part}_s"], count) for part in PARTS}
        busy_s = sum(parts_s.values())
        end = np.zeros(count)
        np.maximum.at(end, worker, step_ends(steps))
        new = np.zeros((count, _SUMS))
        new[:, _STEPS] = np.bincount(worker, minlength=count)
        new[:, _SAMPLES] = np.bincount(worker, steps["samples"], count)
        new[:, _WORK] = parts_s["load"] + parts_s["forward"] + parts_s["backward"]
        new[:, _WAIT] = parts_s["wait"]
        # Time between steps counts, unless it is so long that it was a pause (a validation).
        new[:, _WALL] = np.clip(end - self._end, busy_s, 2 * busy_s)
        forget = np.minimum(new[:, _WALL] / MEMORY_S, new[:, _STEPS] / MEMORY_STEPS)
        self._sums = self._sums * np.exp(-forget)[:, None] + new
        active = new[:, _STEPS] > 0
        self._end[active], self._seen[active] = end[active], self.clock()

    def _follow_loss(self, numbers: Records, losses: Records) -> None:
        train = self.job.train
        if train.steps:  # no more count
            numbers, losses = numbers[-LAST_STEPS:], losses[-LAST_STEPS:]
        for step, loss in zip(numbers.tolist(), losses.tolist(), strict=True):
            if step <= self._loss_step:
                continue
            where = self._where(step)
            if not train.steps and where.epoch != self._loss_epoch:
                self._losses.clear()
                self._sum = (0.0, 0)
            self._loss_step, self._loss_epoch = step, where.epoch
            size = where.size
            if train.steps:
                self._losses.append((loss * size, size))
                sums = zip(*self._losses, strict=True)
                self._sum = tuple(map(sum, sums))
            else:
                self._sum = self._sum[0] + loss * size, self._sum[1] + size

    def _where(self, step: int) -> Position:
        """Find what a step takes; as if all were one epoch until the number of samples is known."""
        samples = self.ready["samples"] if self.ready else LARGEST
        if steps := self.ready.get("epoch_steps"):  # of unequal size: known once recorded
            first, stop = self._taken.of(step, self.job.train.global_batch)
            return Position((step - 1) // steps, first, stop)
        return Batches.of_job(self.job, samples).of(step)

    @property
    def loss(self) -> float:
        """Mean over the samples of the epoch so far, or of the last 100 steps of a job of steps.

        NaN before the first step, and in a private run, which tells no loss.
        """
        if self.job.privacy.on:
            return math.nan
        return float(self._sum[0] / self._sum[1]) if self._sum[1] else math.nan

    @property
    def samples_per_s(self) -> float:
        """Of all workers together, over recent steps."""
        return sum(row.rate for row in self._every_row(self.clock()))

    @property
    def epochs(self) -> int | None:
        """Passes over the data that the job asks for; None if it counts steps."""
        train, own_loop = self.job.train, self.ready and self.total is None
        return None if train.steps or (own_loop and not train.epochs) else train.passes

    @property
    def total(self) -> int | None:
        """Steps of the whole job; None until a worker has said so, or if it has no fixed length."""
        last: int | None = self.ready.get("last_step", self.job.train.steps)
        return last

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step, validations included; None until it can be estimated."""
        steps, wall_s = self._sums[:, _STEPS].sum(), self._sums[:, _WALL].sum()
        if self.total is None or not steps or self.over:
            return None
        last = min(self.total, self.job.train.stop_after_steps or self.total)
        pause_s = self._pauses_s / max(self.step - self._first_step + 1, 1)
        return max(last - self.step, 0) * float(wall_s / steps + pause_s)

    def rows(self, most: int) -> tuple[list[Row], Row]:
        """The rows of the table.

        Returns:
            At most `most` rows: failed workers first, then those that are starting, then the
            slow ones, then the others by number; workers that do not fit share one row. And a row
            for all workers.
        """
        rows = self._every_row(self.clock())
        whole = _together("all", rows)
        if len(rows) > most:
            rest = rows[most - 1 :]
            rows = [*rows[: most - 1], _together(f"{len(rest)} more", rest)]
        return rows, whole

    def _every_row(self, now: float) -> list[Row]:
        wall, samples, work = (self._sums[:, field] for field in (_WALL, _SAMPLES, _WORK))
        with np.errstate(divide="ignore", invalid="ignore"):
            rate, wait = samples / wall, self._sums[:, _WAIT] / wall
            if self.over:  # but of those that have ended by themselves, the last is shown
                rate = np.where([self.states.get(w) == "done" for w in range(len(rate))], rate, 0)
            cost = np.where(samples, work / samples, np.nan)  # seconds of own work per sample
            known = cost[np.isfinite(cost)]  # of two workers, the faster one is the reference
            slowness = cost / np.quantile(known, 0.5, method="lower") if len(known) else cost
        share = samples / max(samples.sum(), 1)
        figures = np.nan_to_num(np.stack([rate, share, wait, slowness]), posinf=0.0)
        place = {"failed": 0, "starting": 1, "joined": 1}  # failed and starting workers come first
        order = sorted(
            self.workers,
            key=lambda w: (
                place.get(self._state(w, 1, now), 2 + (w in self.servers)),
                -round(figures[3][w], 1) if figures[3][w] >= SLOW else 0.0,
                w,
            ),
        )
        return [
            Row(
                str(w),
                self._state(w, float(figures[3][w]), now),
                rate=float(figures[0][w]),
                share=float(figures[1][w]),
                wait=float(figures[2][w]),
                sent=self.traffic.get(w, (0, 0))[0],
                received=self.traffic.get(w, (0, 0))[1],
                note=phases_in_words(self.phases.get(w, {})),
            )
            for w in order
        ]

    def _state(self, worker: int, slowness: float, now: float) -> str:
        state = self.states.get(worker, "starting")
        if self.over and state in ("starting", "joined", "ready"):
            return "ended"
        steps, _, _, _, wall_s = self._sums[worker]
        if not steps or state not in ("starting", "joined", "ready"):
            return state
        silent_s = now - self._seen[worker]
        if silent_s > max(QUIET_S, QUIET_STEPS * wall_s / steps):
            return f"quiet {whole_seconds(silent_s)}"
        if worker in self.servers:
            return "serving"
        return f"slow {slowness:.1f}x" if slowness >= SLOW else "training"


def _together(name: str, rows: Sequence[Row]) -> Row:
    training = sum(row.state.startswith(("training", "slow")) for row in rows)
    waits = [row.wait for row in rows if row.rate]
    return Row(
        name,
        f"{training} training" if training else "",
        rate=sum(row.rate for row in rows),
        share=sum(row.share for row in rows),
        wait=sum(waits) / max(len(waits), 1),
        sent=sum(row.sent for row in rows),
        received=sum(row.received for row in rows),
    )
