"""Is a pool busy and fair, and how long does a decision take? A simulation of its own scheduler.

    python benchmarks/pool_policy.py

`PoolScheduler`, its decisions and its policy are the real ones; runs and their clock are made up: a
start takes 1 s, a resize 0.5 s in which no step is made, and n workers are faster by a curve of
each job that the policy does not know. Beside it, on the same jobs and cores: gangs of a fixed
size in the order of their arrival, and the same with backfill by exact lengths. The last line is
one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from instep.pool.decide import decide
from instep.pool.jobs import ENDED, JobSubmitted, PoolEvent, PoolJob, PoolState, RunSeen
from instep.pool.policy import plan
from instep.pool.scheduler import SCALED, JobSight, PoolScheduler

START_S, RESIZE_S, TICK_S = 1.0, 0.5, 0.5


def speed_of(workers: int, serial: float) -> float:
    return workers / (1.0 + serial * (workers - 1))


class MadeUpJob:
    def __init__(self, job: PoolJob, work_s: float, serial: float) -> None:
        self.job, self.left_s, self.serial, self.work_s = job, work_s, serial, work_s
        self.lives, self.workers, self.wanted = False, 0, 0
        self.ready_at = self.leaves_at = 0.0
        self.stopping = False
        self.began: float | None = None
        self.ended: float | None = None


class MadeUpMachine:
    """The hands of a scheduler, and the clock."""

    def __init__(self, cores: int) -> None:
        self.cores, self.now = cores, 0.0
        self.jobs: dict[str, MadeUpJob] = {}
        self.core_s: dict[str, float] = {}

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for each in self.jobs.values():
            if not each.lives:
                continue
            used = self.core_s.get(each.job.share, 0.0)
            self.core_s[each.job.share] = used + seconds * each.workers
            if each.workers > each.wanted and self.now >= each.leaves_at:
                each.workers = each.wanted
            if each.workers and self.now >= each.ready_at:
                each.left_s -= seconds * speed_of(each.workers, each.serial)
            if each.left_s <= 0:
                each.lives, each.workers, each.ended = False, 0, self.now
            elif each.stopping and self.now >= each.leaves_at:
                each.lives, each.workers, each.stopping = False, 0, False
        assert sum(each.workers for each in self.jobs.values()) <= self.cores

    def look(self, job: PoolJob) -> JobSight:
        each = self.jobs[job.id]
        step = int(1000 * (1 - each.left_s / each.work_s))
        outcome = "completed" if each.ended is not None else ""
        left = each.left_s if each.lives and self.now > each.ready_at + 2 else None
        return JobSight(each.lives, each.workers, step, 1000, left, outcome)

    def start(self, job: PoolJob) -> None:
        each = self.jobs[job.id]
        if not each.lives:
            each.lives, each.workers, each.wanted = True, job.target, job.target
            each.ready_at = self.now + START_S
            each.began = self.now if each.began is None else each.began

    def scale(self, job: PoolJob) -> str:
        each = self.jobs[job.id]
        each.workers = max(each.workers, job.target)
        each.wanted, each.leaves_at = job.target, self.now + RESIZE_S
        each.ready_at = max(each.ready_at, self.now + RESIZE_S)
        return SCALED

    def stop(self, job: PoolJob) -> None:
        each = self.jobs[job.id]
        if each.lives and not each.stopping:
            each.stopping, each.leaves_at = True, self.now + RESIZE_S


class Nowhere:
    def write(self, event: PoolEvent, before: PoolState, after: PoolState) -> None:
        pass


def made_up_jobs(draw: random.Random, count: int, cores: int, within_s: float) -> list[MadeUpJob]:
    """Jobs of three users, most of them short, in a random order."""
    found = []
    for number in range(count):
        least = draw.choice([1, 1, 1, 2] if cores > 2 else [1])
        job = PoolJob(
            id=f"job-{number}",
            share="abc"[number % 3],
            at_least=least,
            at_most=draw.choice([least, cores, 2 * cores]),
            submitted=draw.uniform(0.0, within_s),
        )
        work_s = math.exp(draw.uniform(math.log(20.0), math.log(1200.0)))
        found.append(MadeUpJob(job, work_s, draw.uniform(0.0, 0.1)))
    return sorted(found, key=lambda each: each.job.submitted)


def with_policy(jobs: list[MadeUpJob], cores: int) -> dict[str, Any]:
    """Schedule jobs to their end; core time busy while one waits that would fit."""
    machine = MadeUpMachine(cores)
    machine.jobs = {each.job.id: each for each in jobs}
    scheduler = PoolScheduler(PoolState(cores=cores), Nowhere(), machine)
    waiting, wanted_s, busy_s = [*jobs], 0.0, 0.0
    while waiting or any(each.ended is None for each in jobs):
        due = [each for each in waiting if each.job.submitted <= machine.now]
        waiting = [each for each in waiting if each.job.submitted > machine.now]
        scheduler.turn([JobSubmitted(each.job) for each in due], machine.now)
        open_jobs = [job for job in scheduler.state.jobs.values() if job.status != ENDED]
        usable = min(cores, sum(job.at_most for job in open_jobs))
        used = sum(each.workers for each in jobs)
        wanted_s, busy_s = wanted_s + usable * TICK_S, busy_s + min(used, usable) * TICK_S
        machine.pass_time(TICK_S)
    return {**told(jobs, machine.now), "busy_while_wanted": round(busy_s / wanted_s, 4)}


def in_gangs(jobs: list[MadeUpJob], cores: int, *, backfill: bool) -> dict[str, Any]:
    """Gangs of a fixed size, the first that came first; with backfill, those that delay nobody."""
    now, left = 0.0, [*jobs]
    running = list[tuple[float, int]]()  # end, cores
    while left or running:
        running = [each for each in running if each[0] > now]
        free = cores - sum(each[1] for each in running)
        queue = [each for each in left if each.job.submitted <= now]
        reserved_at, spare = float("inf"), free
        for each in queue:
            size = min(each.job.at_most, cores)
            length = START_S + each.work_s / speed_of(size, each.serial)
            fits = size <= free and (
                reserved_at == float("inf") or now + length <= reserved_at or size <= spare
            )
            if fits:
                left.remove(each)
                each.began, each.ended = now, now + length
                running.append((now + length, size))
                free, spare = free - size, spare - size * (now + length > reserved_at)
            elif reserved_at == float("inf"):
                if not backfill:
                    break
                reserved_at, spare = reservation(running, now, free, size)
        moments = [each[0] for each in running]
        moments += [each.job.submitted for each in left if each.job.submitted > now]
        now = min(moments, default=now)
    return told(jobs, max(each.ended or 0.0 for each in jobs))


def reservation(
    running: list[tuple[float, int]], now: float, free: int, size: int
) -> tuple[float, int]:
    """When the first that waits can start, and the cores that it leaves to others by then."""
    for end, cores in sorted(running):
        free += cores
        if free >= size:
            return end, free - size
    return now, free


def told(jobs: list[MadeUpJob], makespan_s: float) -> dict[str, Any]:
    completion = [(each.ended or 0.0) - each.job.submitted for each in jobs]
    waits = sorted((each.began or 0.0) - each.job.submitted for each in jobs)
    return {
        "mean_completion_s": round(statistics.mean(completion), 1),
        "makespan_s": round(makespan_s, 1),
        "median_wait_s": round(statistics.median(waits), 1),
        "longest_wait_s": round(waits[-1], 1),
    }


def compared(cores: int, count: int, within_s: float, seeds: int) -> dict[str, Any]:
    """The mean of each figure over some workloads, for each way."""
    ways: dict[str, Callable[[list[MadeUpJob], int], dict[str, Any]]] = {
        "pool": with_policy,
        "gangs": lambda jobs, cores: in_gangs(jobs, cores, backfill=False),
        "backfill": lambda jobs, cores: in_gangs(jobs, cores, backfill=True),
    }
    found: dict[str, Any] = {"cores": cores, "jobs": count, "workloads": seeds}
    for name, way in ways.items():
        each = [
            way(made_up_jobs(random.Random(seed), count, cores, within_s), cores)
            for seed in range(seeds)
        ]
        found[name] = {key: round(statistics.mean(e[key] for e in each), 3) for key in each[0]}
        if name == "pool":
            found["least_busy"] = min(e["busy_while_wanted"] for e in each)
    pool = found["pool"]["mean_completion_s"]
    found["of_gangs"] = round(pool / found["gangs"]["mean_completion_s"], 3)
    found["of_backfill"] = round(pool / found["backfill"]["mean_completion_s"], 3)
    return found


def fairness(cores: int, hours: int, seed: int) -> dict[str, Any]:
    """Three shares that always want more, by weights 2, 1 and 1; how far each hour is off."""
    weights, draw = {"a": 2.0, "b": 1.0, "c": 1.0}, random.Random(seed)
    machine = MadeUpMachine(cores)
    scheduler = PoolScheduler(PoolState(cores=cores, weights=weights), Nowhere(), machine)
    before, worst, number = dict[str, float](), 0.0, 0
    for hour in range(hours):
        while machine.now < 3600.0 * (hour + 1):
            events: list[PoolEvent] = []
            for share in weights:
                mine = [j for j in scheduler.state.jobs.values() if j.share == share]
                wanted = sum(j.at_most for j in mine if j.status != ENDED)
                while wanted < 2 * cores:
                    (each,) = made_up_jobs(draw, 1, cores, 0.0)
                    job = replace(
                        each.job, id=f"{share}-{number}", share=share, submitted=machine.now
                    )
                    each.job, number, wanted = job, number + 1, wanted + job.at_most
                    machine.jobs[job.id] = each
                    events.append(JobSubmitted(job))
            scheduler.turn(events, machine.now)
            machine.pass_time(TICK_S)
            over = [n for n, each in machine.jobs.items() if each.ended is not None]
            for name in over:
                if scheduler.state.jobs[name].status == ENDED:
                    del machine.jobs[name]
            if len(scheduler.state.jobs) > 200:  # as a pool would, that forgets old jobs
                kept = {n: j for n, j in scheduler.state.jobs.items() if j.status != ENDED}
                scheduler.state = replace(scheduler.state, jobs=kept)
        used = {s: machine.core_s.get(s, 0.0) - before.get(s, 0.0) for s in weights}
        before = dict(machine.core_s)
        if hour:
            total, due = sum(used.values()), sum(weights.values())
            off = [abs(used[s] / total - weights[s] / due) for s in weights]
            worst = max(worst, *off)
    return {"cores": cores, "hours": hours, "worst_hour_off": round(worst, 4)}


def decisions(count: int, cores: int) -> dict[str, Any]:
    """Milliseconds of a processor for a decision among many jobs, and for all reasons."""
    draw, jobs = random.Random(0), {}
    for number in range(count):
        least = draw.choice([1, 1, 1, 2, 4, 8])
        job = PoolJob(
            id=f"job-{number}",
            share=draw.choice("abcdefgh"),
            at_least=least,
            at_most=least * draw.choice([1, 2, 8]),
            priority=draw.choice([0, 0, 0, 5]),
            submitted=float(number),
            left_s=draw.choice([None, 100.0, 5000.0]),
        )
        jobs[job.id] = job
    state = decide(PoolState(cores=cores, jobs=jobs), RunSeen("none", 1), count + 1.0)
    names = [job.id for job in state.jobs.values() if job.held]
    spent = []
    for number, name in enumerate(names[:40]):
        held = state.jobs[name].held
        began = time.process_time()
        state = decide(state, RunSeen(name, held, 5, 10, 50.0), count + 2.0 + number)
        spent.append(1000 * (time.process_time() - began))
    began = time.process_time()
    plan(state, count + 99.0)
    explained_ms = 1000 * (time.process_time() - began)
    ordered = sorted(spent)
    return {
        "jobs": count,
        "cores": cores,
        "median_ms": round(statistics.median(ordered), 1),
        "p95_ms": round(ordered[int(0.95 * len(ordered))], 1),
        "with_reasons_ms": round(explained_ms, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    args = parser.parse_args()
    found = {
        "two_cores": compared(2, 30, 1800.0, args.seeds),
        "sixteen_cores": compared(16, 120, 3600.0, args.seeds),
        "fairness": [fairness(cores, 6, seed) for cores, seed in ((8, 0), (8, 1), (32, 2))],
        "decisions": decisions(10_000, 1600),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
