"""A pool's scheduler among made-up runs, killed at any entry of its journal: one story for a seed.

The scheduler and its decisions are the real ones; runs, their clocks and the disk are made up here.
Way in: `story`.
"""

from __future__ import annotations

import random

from msgspec.structs import replace

from instep.pool.decide import MOST_IN_VAIN
from instep.pool.flows import AFTER_END, COMPLETED, FAILED
from instep.pool.jobs import (
    ENDED,
    RUNNING,
    AgainAsked,
    CancelAsked,
    FlowNeeds,
    FlowSubmitted,
    JobSubmitted,
    PoolJob,
    PoolState,
    ResultTest,
)
from instep.pool.paces.curve import speed
from instep.pool.scheduler import LATER, SCALED, JobSight, PoolScheduler


class Killed(Exception):
    """The scheduler is dead."""


class Disk:
    """Keeps what is written, and kills the scheduler before or after some entry."""

    def __init__(self, draw: random.Random, chance: float) -> None:
        self.draw, self.chance, self.state, self.entries = draw, chance, None, 0

    def write(self, event, before, after):
        if self.draw.random() < self.chance:
            raise Killed
        self.state, self.entries = after, self.entries + 1
        if self.draw.random() < self.chance:
            raise Killed


class MadeUpRun:
    """The run of one job: needs work, and resizes and stops with a delay."""

    def __init__(self, work: float) -> None:
        self.left, self.lives, self.workers, self.wanted = work, False, 0, 0
        self.ready_at = self.leaves_at = 0.0
        self.stopping, self.outcome, self.starts, self.folder = False, "", 0, False
        self.killed, self.fails, self.attempt = 0, 0, 1
        self.value = 0.0


class MadeUpRuns:
    """All runs, and the cores they use; refuses what a real machine would suffer from."""

    def __init__(self, draw: random.Random, cores: int, chance: float) -> None:
        self.draw, self.cores, self.chance, self.now = draw, cores, chance, 0.0
        self.runs: dict[str, MadeUpRun] = {}
        self.busy = self.most = 0

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for run in self.runs.values():
            if not run.lives:
                continue
            if run.workers > run.wanted and self.now >= run.leaves_at:
                run.workers = run.wanted
            if self.now >= run.ready_at and run.workers:
                run.left -= seconds * speed(min(run.workers, run.wanted or run.workers))
            if run.left <= 0:
                run.outcome = "failed" if run.fails >= run.attempt else "completed"
                run.lives, run.workers = False, 0
            elif run.stopping and self.now >= run.leaves_at:
                run.lives, run.workers, run.stopping = False, 0, False
            elif self.draw.random() < self.chance / 50:
                run.lives, run.workers, run.stopping = False, 0, False  # its client is killed
                run.left, run.killed = run.left + 1.0, run.killed + 1
        used = sum(run.workers for run in self.runs.values())
        assert used <= self.cores, f"{used} workers on {self.cores} cores"

    def kill_perhaps(self) -> None:
        if self.draw.random() < self.chance:
            raise Killed

    def look(self, job: PoolJob) -> JobSight:
        run = self.runs[job.id]
        if job.attempt > run.attempt and not run.lives:
            return JobSight(False)
        left = run.left * 1.1 if run.folder else None
        step, results = 100 - int(run.left), {"x": run.value}
        return JobSight(run.lives, run.workers, step, 100, left, run.outcome, results=results)

    def start(self, job: PoolJob) -> None:
        self.kill_perhaps()
        run = self.runs[job.id]
        again = job.attempt > run.attempt
        assert not run.outcome or again, "a run that is over is started again"
        assert unmet(job, self.runs) is None, f"{job.id} is started, and {unmet(job, self.runs)}"
        if again:
            run.attempt, run.outcome, run.left = job.attempt, "", 1.0
        assert job.target >= job.at_least, "half a gang"
        if not run.lives:
            run.lives, run.folder, run.starts = True, True, run.starts + 1
            run.workers = run.wanted = job.target
            run.ready_at = self.now + 1.0
        self.kill_perhaps()

    def scale(self, job: PoolJob) -> str:
        self.kill_perhaps()
        run = self.runs[job.id]
        if self.now < run.ready_at:
            return LATER
        if run.lives and not run.stopping:
            if job.target > run.workers:
                run.workers = job.target
            run.wanted, run.leaves_at = job.target, self.now + self.draw.uniform(0.0, 2.0)
        return SCALED

    def stop(self, job: PoolJob) -> None:
        self.kill_perhaps()
        run = self.runs[job.id]
        if run.lives and not run.stopping:
            run.stopping, run.leaves_at = True, self.now + self.draw.uniform(0.0, 2.0)


def unmet(job: PoolJob, runs: dict[str, MadeUpRun]) -> str | None:
    """A need of a job of a flow that its runs do not meet, by what they have come to."""
    if job.needs is None:
        return None
    before = [runs[name].outcome for name in job.needs.jobs]
    if job.needs.outcome == COMPLETED and any(each != "completed" for each in before):
        return f"those before it are {before}"
    if job.needs.outcome == FAILED and all(each == "completed" for each in before):
        return "nothing before it has failed"
    return next(
        (
            f"{test.job} has {runs[test.job].value}"
            for test in job.needs.tests
            if not runs[test.job].value >= test.value
        ),
        None,
    )


def made_up_flow(draw: random.Random, jobs: list[PoolJob], runs: MadeUpRuns) -> FlowSubmitted:
    """Some jobs as a flow: each may need some of those before it; some of their runs fail."""
    found = list[PoolJob]()
    for job in jobs:
        runs.runs[job.id].value = draw.random()
        runs.runs[job.id].fails = draw.choice([0, 0, 1, 1, 9])
        before = [each.id for each in found if draw.random() < 0.5]
        if before:
            outcome = draw.choice([COMPLETED, COMPLETED, FAILED, AFTER_END])
            tests = [ResultTest(before[0], "x", ">=", 0.3)] if outcome == COMPLETED else []
            needs = FlowNeeds(tuple(before), outcome, tuple(tests[: draw.randint(0, 1)]))
            job = replace(job, flow="flow", needs=needs)
        found.append(job)
    return FlowSubmitted("flow", tuple(found))


def story(seed: int) -> dict[str, int]:
    """Jobs of three users on a few cores, until all have ended.

    Raises:
        AssertionError: a promise was broken.
    """
    draw = random.Random(seed)
    cores, chance = draw.randint(2, 12), draw.choice([0.0, 0.02, 0.1])
    empty = PoolState(cores=cores, weights={"a": 2.0}, limits={"c": max(1, cores // 2)})
    disk, runs = Disk(draw, chance), MadeUpRuns(draw, cores, chance)
    disk.state, kills = empty, 0
    arrivals = sorted((draw.uniform(0, 120), number) for number in range(draw.randint(2, 14)))
    wanted, waiting = dict[str, PoolJob](), []
    for at, number in arrivals:
        least = draw.randint(1, min(3, cores))
        job = PoolJob(
            id=f"job-{number}",
            share=draw.choice("abc"),
            at_least=least,
            at_most=draw.randint(least, 12),
            priority=draw.choice([0, 0, 0, 5]),
            submitted=at,
        )
        possible = least <= (empty.limits["c"] if job.share == "c" else cores)
        if not possible:
            continue
        wanted[job.id] = job
        runs.runs[job.id] = MadeUpRun(draw.uniform(1, 60))
        waiting.append((at, JobSubmitted(job)))
        if draw.random() < 0.1:
            waiting.append((at + draw.uniform(0, 40), CancelAsked(job.id)))
    again = False
    if draw.random() < 0.5 and len(wanted) > 1:
        flow = made_up_flow(draw, [*wanted.values()], runs)
        waiting, wanted = [(arrivals[0][0], flow)], {job.id: job for job in flow.jobs}
        if draw.random() < 0.3:
            waiting.append((waiting[0][0] + draw.uniform(0, 60), CancelAsked(flow.jobs[0].id)))
        again = all(job.needs is None or job.needs.outcome == COMPLETED for job in flow.jobs)
    scheduler = PoolScheduler(disk.state, disk, runs)
    while waiting or any(job.status != ENDED for job in disk.state.jobs.values()):
        assert runs.now < 20_000, f"no end: {disk.state}"
        due = [event for at, event in waiting if at <= runs.now]
        try:
            scheduler.turn(due, runs.now)
            waiting = [each for each in waiting if each[0] > runs.now]
        except Killed:
            kills += 1
            scheduler = PoolScheduler(disk.state, disk, runs)
        state = disk.state
        assert state.held <= cores, "more cores are given than there are"
        for job in state.jobs.values():
            if job.status == RUNNING:
                assert job.target >= job.at_least, f"half a gang: {job}"
        runs.pass_time(draw.choice([0.1, 0.5, 2.0]))
        if again and not waiting and all(job.status == ENDED for job in state.jobs.values()):
            again, waiting = False, [(runs.now, AgainAsked((*wanted,)))]
    assert disk.state.jobs.keys() == wanted.keys(), "a job was lost"
    for job in disk.state.jobs.values():
        run = runs.runs[job.id]
        assert not run.lives, "a run outlives its job"
        failed = job.outcome == "failed" and (run.killed >= MOST_IN_VAIN or run.fails)
        assert failed or job.outcome in ("completed", "cancelled", "skipped"), job
        if job.outcome == "skipped":
            assert run.starts == 0 or job.attempt > 1, "a job ran, and its needs could not be met"
            assert unmet(job, runs.runs), f"{job.id} is skipped: {job.why}"
        assert job.outcome != "completed" or run.outcome == "completed"
    return {"kills": kills, "entries": disk.entries, "jobs": len(wanted)}
