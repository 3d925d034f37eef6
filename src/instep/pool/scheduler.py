"""Keeps the jobs of a pool as its state says: it decides, journals, and then does.

What it does follows from the state and from what it sees, never from what it remembers: a client
that should be there and is not is started, workers that should be others are asked for. So one
that was killed anywhere is followed by another that does what is missing, and nothing twice: a
client has its file locked from its first moment. Way in: `PoolScheduler.turn`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from instep.pool.decide import decide
from instep.pool.hosts.placement import without
from instep.pool.jobs import (
    RUNNING,
    STOPPING,
    ClientEnded,
    PlacesTold,
    PoolEvent,
    PoolJob,
    PoolState,
    ResizeRefused,
    RunSeen,
    TimePassed,
)
from instep.pool.paces.curve import left_of
from instep.pool.paces.doubts import is_pace_news

TICK_S = 5.0
"""Between two counts of use, where nothing happens."""

NOTED_S, NOTED_PART = 1.0, 20
"""The remaining time of a job is journaled where it is off by more seconds, and by that part."""


SCALED, LATER, REFUSED = "scaled", "later", "refused"
"""Answers of a run that is asked for another number of workers."""


class JobSight(NamedTuple):
    """A job's run, as it is seen now."""

    lives: bool
    """Whether its client does."""
    workers: int = 0
    """Processes of workers that have not ended."""
    step: int = 0
    steps: int | None = None
    left_s: float | None = None
    outcome: str = ""
    """Once the run is over, else empty."""
    why: str = ""
    results: Mapping[str, float] = {}
    """Figures of a job of a flow that is over."""
    lost: tuple[str, ...] = ()
    """Hosts of a pool that the run does not have."""
    begun: bool = True
    """Whether its workers have begun to train, as far as is known."""
    pace: tuple[int, float] | None = None
    """Seconds of a step with so many workers."""
    first: float | None = None
    """When the first step of the run began."""
    last: float | None = None
    """When the last step of a run that is over began."""


class Hands(Protocol):
    """The three words that a scheduler says to a run, and a look at it."""

    def look(self, job: PoolJob) -> JobSight:
        """See what there is of a job's run."""

    def start(self, job: PoolJob) -> None:
        """Start its client with `job.target` workers; does nothing if one lives."""

    def scale(self, job: PoolJob) -> str:
        """Ask for `job.target` workers."""

    def stop(self, job: PoolJob) -> None:
        """Ask it to stop at its next commit, and save."""


class WritesEvents(Protocol):
    """A journal."""

    def write(self, event: PoolEvent, before: PoolState, after: PoolState) -> None:
        """Write an event, and what it has changed."""


class PoolScheduler:
    """The scheduler of one pool.

    Args:
        state: as the journal has it.
        journal: gets each event before anything follows from it.
        hands: reach the runs.
    """

    def __init__(self, state: PoolState, journal: WritesEvents, hands: Hands) -> None:
        self.state, self._journal, self._hands = state, journal, hands
        # workers that a run was asked for, or how many on which hosts
        self._asked: dict[str, int | Mapping[str, int]] = {}
        self._known: set[str] = set()  # started by this scheduler, or seen to live

    def take(self, event: PoolEvent, now: float) -> None:
        """Decide on an event, and write it down."""
        after = decide(self.state, event, now)
        self._journal.write(event, self.state, after)
        self.state = after

    def turn(self, requests: Sequence[PoolEvent], now: float) -> None:
        """Take what people want, look at all runs, and do what follows."""
        for event in requests:
            self.take(event, now)
        for job in [*self.state.jobs.values()]:
            if job.status in (RUNNING, STOPPING):
                self._look(job, now)
        if now - self.state.at >= TICK_S:
            self.take(TimePassed(), now)
        for job in [*self.state.jobs.values()]:
            self._do(job, now)

    def _look(self, job: PoolJob, now: float) -> None:
        sight = self._hands.look(job)
        if sight.lives:
            self._known.add(job.id)
            if self._is_news(job, sight, now):
                workers, step, steps, left_s = sight[1:5]
                more = sight.lost, sight.begun, sight.pace, sight.first
                self.take(RunSeen(job.id, workers, step, steps, left_s, *more), now)
        elif sight.outcome or job.status == STOPPING or job.id in self._known:
            end = (sight.outcome, sight.why, sight.step, sight.results, sight.last, sight.pace)
            self.take(ClientEnded(job.id, *end), now)
            self._known.discard(job.id)  # once that is journaled: else its end would be forgotten
            self._asked.pop(job.id, None)
        # else another scheduler was to start it, and this one does

    def _is_news(self, job: PoolJob, sight: JobSight, now: float) -> bool:
        """Whether a run that lives is not as the state has it."""
        if self.state.hosts:  # they say what they have
            if without(self.state, job, sight.lost, sight.begun, now) is not job:
                return True
            if job.local and job.seen_here != sight.workers:
                return True
        elif job.status == RUNNING and job.held != max(job.target, sight.workers):
            return True
        if (sight.steps and not job.steps) or (sight.first and not job.step and sight.step):
            return True
        if sight.pace is not None and is_pace_news(job, *sight.pace, now):
            return True
        before = left_of(job, now)
        if sight.left_s is None or before is None:
            return sight.left_s is not None
        return abs(sight.left_s - before) > max(NOTED_S, before / NOTED_PART)

    def _do(self, job: PoolJob, now: float) -> None:
        if job.status == STOPPING:
            self._hands.stop(job)
        elif job.status == RUNNING:
            if not self._hands.look(job).lives:
                if job.id not in self._known:
                    self._hands.start(job)
                    self._known.add(job.id)
                    self._asked[job.id] = job.places or job.target
            elif self._asked.get(job.id) != (job.places or job.target):
                answer = self._hands.scale(job)
                if answer == SCALED:
                    self._asked[job.id] = job.places or job.target
                    if job.told != job.places:
                        self.take(PlacesTold(job.id, job.places), now)
                elif answer == REFUSED:
                    workers = self._hands.look(job).workers
                    self.take(ResizeRefused(job.id, workers), now)
                    kept = self.state.jobs[job.id]
                    self._asked[job.id] = kept.places or kept.target
