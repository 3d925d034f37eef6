"""Do the jobs of a pool start and end when `instep explain` says?

    python benchmarks/pool_ahead.py                   # simulated: the real scheduler, made-up runs
    python benchmarks/pool_ahead.py --real 3          # short real jobs on two cores, three rounds

At many moments all open jobs are asked when they start and end, and what comes to pass is compared:
a forecast is right if it is off by at most 15 % of the time from that moment on, or two seconds.
Simulated jobs have steps whose length is measured with an error of 5 %, resizes take half a second,
and starts one to three. `known`: jobs like each have ended before; `half`: like every second one;
`new`: like none. `all_at_once`: all are submitted at the beginning; `arriving`: others come later,
of which no forecast can know. Forecasts that rest on a job of unknown length say so, and are
counted apart. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from pool_policy import MadeUpJob, MadeUpMachine, Nowhere, made_up_jobs, speed_of
from pooling import JOB, RECIPE, instep

from instep.pool.ahead.forecast import JobForecast, forecast
from instep.pool.jobs import ENDED, JobSubmitted, PoolJob, PoolState
from instep.pool.paces.curve import Paces, curve_of, with_pace
from instep.pool.pool_file import PoolFolder
from instep.pool.scheduler import JobSight, PoolScheduler

STEPS, TICK_S, ASKED_S = 1000, 0.5, 30.0
WITHIN, FLOOR_S = 0.15, 2.0


class PacedMachine(MadeUpMachine):
    """Runs whose steps are measured as a pool measures them, with an error."""

    def __init__(self, cores: int, draw: random.Random) -> None:
        super().__init__(cores)
        self.draw, self.paces = draw, dict[str, Paces]()
        self.first: dict[str, float] = {}

    def look(self, job: PoolJob) -> JobSight:
        each = self.jobs[job.id]
        sight = super().look(job)
        if not sight.lives:
            return sight._replace(last=self.now) if sight.outcome else sight
        paces = self.paces.setdefault(job.id, job.paces)
        if self.now > each.ready_at:
            self.first.setdefault(job.id, each.ready_at)
        pace = None
        if self.now > each.ready_at + 2.0 and each.workers:
            if each.workers not in dict(paces):
                true = each.work_s / STEPS / speed_of(each.workers, each.serial)
                paces = with_pace(paces, each.workers, true * self.draw.uniform(0.95, 1.05))
                self.paces[job.id] = paces
            pace = (each.workers, dict(paces)[each.workers])
        left_s = (STEPS - sight.step) * curve_of(paces).one_s if paces else None
        return sight._replace(left_s=left_s, pace=pace, first=self.first.get(job.id))

    def start(self, job: PoolJob) -> None:
        lived = self.jobs[job.id].lives
        super().start(job)
        if not lived:
            self.jobs[job.id].ready_at = self.now + self.draw.uniform(1.0, 3.0)


class Asked:
    """Forecasts, and what came to pass."""

    def __init__(self) -> None:
        self.said: list[tuple[float, str, JobForecast, bool]] = []

    def ask(self, state: PoolState, now: float) -> None:
        found = forecast(state, now)
        for name, each in found.items():
            self.said.append((now, name, each, bool(state.jobs[name].held)))

    def figures(self, began: dict[str, float], ended: dict[str, float]) -> dict[str, Any]:
        """Parts that were right, of those that rest on known lengths and of all."""
        off = defaultdict[str, list[float]](list)
        missed = defaultdict[str, int](int)
        for now, name, each, held in self.said:
            kinds = [("ends", each.ends_s, ended[name])]
            if not held and began[name] >= now:  # else it is parked, and starts again
                kinds.append(("starts", each.starts_s, began[name]))
            for kind, said_s, moment in kinds:
                if said_s is None:
                    missed[kind] += 1
                    continue
                true_s = moment - now
                off_s = abs(said_s - true_s)
                part = 0.0 if off_s <= FLOOR_S else off_s / max(true_s, 1e-9)
                off[kind + ("_resting_on_unknown" if each.rests_on else "")].append(part)
        found: dict[str, Any] = {f"{kind}_not_said": count for kind, count in missed.items()}
        for kind, parts in sorted(off.items()):
            found[kind] = {
                "forecasts": len(parts),
                "within_15": round(sum(part <= WITHIN for part in parts) / len(parts), 3),
                "median_off": round(statistics.median(parts), 3),
            }
        return found


def simulated(jobs: list[MadeUpJob], cores: int, known: float, draw: random.Random) -> Asked:
    """Schedule made-up jobs to their end, and ask on the way."""
    machine, asked = PacedMachine(cores, draw), Asked()
    machine.jobs = {each.job.id: each for each in jobs}
    before = {}
    for number, each in enumerate(jobs):
        like = f"like-{number}"
        each.job = replace(each.job, like=like)
        if draw.random() < known:
            paces = tuple(
                (n, each.work_s / STEPS / speed_of(n, each.serial) * draw.uniform(0.95, 1.05))
                for n in sorted({1, min(2, each.job.at_most)})
            )
            done = replace(each.job, id=f"earlier-{number}", status=ENDED, outcome="completed")
            done = replace(done, steps=STEPS, paces=paces, ended=-1.0, head_s=2.0, tail_s=0.0)
            before[done.id] = done
    scheduler = PoolScheduler(PoolState(cores=cores, jobs=before), Nowhere(), machine)
    waiting, ask_at = [*jobs], 5.0
    while waiting or any(each.ended is None for each in jobs):
        due = [each for each in waiting if each.job.submitted <= machine.now]
        waiting = [each for each in waiting if each.job.submitted > machine.now]
        scheduler.turn([JobSubmitted(each.job) for each in due], machine.now)
        if machine.now >= ask_at:
            asked.ask(scheduler.state, machine.now)
            ask_at += ASKED_S
        machine.pass_time(TICK_S)
    return asked


def simulations(seeds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for cores, count in ((2, 12), (16, 60)):
        for arriving in (False, True):
            for name, known in (("known", 1.0), ("half", 0.5), ("new", 0.0)):
                whole = Asked()
                began, ended = dict[str, float](), dict[str, float]()
                for seed in range(seeds):
                    draw = random.Random(seed)
                    jobs = made_up_jobs(draw, count, cores, 1800.0 if arriving else 0.001)
                    asked = simulated(jobs, cores, known, draw)
                    for now, job, each, held in asked.said:
                        whole.said.append((now, f"{seed}-{job}", each, held))
                    for made in jobs:
                        began[f"{seed}-{made.job.id}"] = made.began or 0.0
                        ended[f"{seed}-{made.job.id}"] = made.ended or 0.0
                key = f"{cores}_cores_{'arriving' if arriving else 'all_at_once'}_{name}"
                found[key] = whole.figures(began, ended)
                print(key, json.dumps(found[key]), flush=True)
    return found


def real(rounds: int, seconds: int) -> dict[str, Any]:
    """Short jobs of three lengths on a pool of two cores; each was run once before."""
    folder = Path(tempfile.mkdtemp())
    (folder / "recipe.py").write_text(RECIPE)
    for name, part in (("short", 0.5), ("middle", 1.0), ("long", 2.0)):
        text = JOB.format(name=name, steps=round(part * seconds * 10))
        (folder / f"{name}.toml").write_text(text)
    (folder / "pool.toml").write_text("cores = 2\n")
    pool = PoolFolder(folder / "pool")
    instep("pool", "--pool", pool.folder, "start", folder / "pool.toml")
    whole, found = Asked(), list[float]()
    for number in range(rounds + 1):
        for name in ("short", "middle", "long", "middle", "short", "long"):
            instep("submit", folder / f"{name}.toml", "--pool", pool.folder)
        while len(pool.state().jobs) < 6 * (number + 1):
            time.sleep(0.1)
        while any(not job.outcome for job in pool.state().jobs.values()):
            state = pool.state()
            if number:  # before that, nothing is known of them
                whole.ask(state, time.time())
            found.append(os.getloadavg()[0])
            time.sleep(2.0)
    jobs = pool.state().jobs
    instep("pool", "--pool", pool.folder, "stop")
    began = {name: job.began or 0.0 for name, job in jobs.items()}
    ended = {name: job.ended or 0.0 for name, job in jobs.items()}
    took = [ended[name] - began[name] for name in jobs]
    return {
        "rounds": rounds,
        "load": [round(min(found), 1), round(max(found), 1)],
        "job_s": [round(min(took), 1), round(max(took), 1)],
        "outcomes": sorted({job.outcome for job in jobs.values()}),
        **whole.figures(began, ended),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="simulated workloads of each kind")
    parser.add_argument("--real", type=int, default=0, help="rounds of six real jobs")
    parser.add_argument("--seconds", type=int, default=20, help="about how long a real one takes")
    args = parser.parse_args()
    found = {"real": real(args.real, args.seconds)} if args.real else simulations(args.seeds)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
