"""How long do jobs take under the policy of a pool, in the simulator of Pollux's publication?

    git clone -b osdi21-artifact https://github.com/petuum/adaptdl
    python benchmarks/pollux_simulator.py adaptdl/simulator
    python benchmarks/pollux_simulator.py adaptdl/simulator --drawn 3        # other workloads

The simulator, its measured step times and its workloads are theirs, read from the checkout and
unchanged: 16 hosts with 4 GPUs, decisions once a minute, 30 s for each start and resize. Beside
them runs `instep.pool.policy.plan`: batches as the workload has them, never changed, and a job's
length is the steps that it still has, times what its steps took so far. It runs with 30 s too, and
with the seconds of `--resize`. Tiresias is the simulator's; gangs with backfill (EASY) are here,
and know all lengths exactly. Pollux's figures are those that it was published with, from the same
checkout: it changes batches. With `--drawn` other workloads are drawn from the trace in the same
way: tune on those. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import math
import statistics
import sys
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from instep.pool.jobs import RUNNING, WAITING, PoolJob, PoolState
from instep.pool.paces.curve import curve_of, with_pace
from instep.pool.policy import plan

GPUS = "nvidia.com/gpu"
LOADS = {"1.0": "workloads", "1.5": "workloads-1.5", "2.0": "workloads-2.0"}

Allocations = dict[str, list[int]]


def simulator_of(path: Path) -> Any:
    """Import the simulator; what newer libraries no longer have is lent to it."""
    np, pd = importlib.import_module("numpy"), importlib.import_module("pandas")
    for name, kind in (("int", int), ("float", float)):
        if name not in np.__dict__:
            setattr(np, name, kind)
    if not hasattr(pd.DataFrame, "append"):

        def append(self: Any, other: Any, ignore_index: bool = False) -> Any:
            return pd.concat([self, other], ignore_index=ignore_index)

        pd.DataFrame.append = append
    for name in ("autograd", "pollux"):  # Pollux's own policy is not run
        sys.modules[name] = types.ModuleType(name)
    vars(sys.modules["pollux"])["PolluxPolicy"] = type("PolluxPolicy", (), {})
    sys.path.insert(0, str(path))
    found: Any = importlib.import_module("simulator")
    found.fit_perf_params = lambda *_: None  # of Pollux's policy alone
    for application in found.APPLICATIONS.values():
        application.get_throughput = StepTimes(application)
    return found


class StepTimes:
    """The simulator's step times of one application, interpolated as there, but prepared once.

    Args:
        application: with measured placements and scalability.
    """

    def __init__(self, application: Any) -> None:
        pd = importlib.import_module("pandas")
        self._places = application.placements
        self._ids = {int(each) for each in self._places.placement}
        by = ["num_nodes", "num_replicas", "local_bsz"]
        means = self._places.groupby(by, as_index=False)[["step_time", "sync_time"]].mean()
        self._all = pd.concat([means, application.scalability], ignore_index=True)
        self._by, self._known = by, dict[tuple[tuple[int, ...], int], Any]()
        self._lines, self._space = dict[int, Any](), list[Any]()

    def __call__(self, placement: Any, local_bsz: int) -> Any:
        """Seconds of a step, and of its synchronization."""
        hosts = tuple(each for each in placement if each)
        key = hosts, local_bsz
        if key not in self._known:
            self._known[key] = self._interpolated(hosts, local_bsz)
        return self._known[key]

    def _interpolated(self, hosts: tuple[int, ...], local_bsz: int) -> Any:
        from scipy.interpolate import LinearNDInterpolator, interp1d

        values = ["step_time", "sync_time"]
        turned = min(hosts[n:] + hosts[:n] for n in range(len(hosts)))
        number = int("".join(map(str, turned)))
        if number in self._ids:
            if number not in self._lines:
                rows = self._places[self._places.placement == number]
                self._lines[number] = interp1d(rows.local_bsz.values, rows[values].values, axis=0)
            return self._lines[number](local_bsz)
        if not self._space:
            space = LinearNDInterpolator(self._all[self._by].values, self._all[values].values)
            self._space.append(space)
        found = self._space[0]([min(len(hosts), 16), sum(hosts), local_bsz])[0]
        assert sum(found) == sum(found), (hosts, local_bsz)
        return found


class Lengths:
    """How many steps jobs have, and how long one takes, from the simulator's tables."""

    @staticmethod
    def steps_left(job: Any) -> float:
        """Steps until the epoch in which it reaches its target is over."""
        app, batch = job.application, job.target_batch_size
        last = app.get_completion_epoch(batch)
        if job.epoch > last:
            return 0.0
        before = app.get_iteration(batch, job.epoch - 1) if job.epoch else 0.0
        begin, end = app.get_progress(job.epoch), app.get_progress(job.epoch + 1)
        part = (job.progress - begin) / (end - begin)
        done = before + part * (app.get_iteration(batch, job.epoch) - before)
        return max(0.0, float(app.get_iteration(batch, last) - done))

    @staticmethod
    def step_s(job: Any) -> float:
        """Seconds of a step where it is now."""
        step_s, sync_s = job.application.get_throughput(job.placement, job.atomic_bsz)
        return float(step_s + (step_s - sync_s) * job.accum_steps)


def most_gpus(job: Any) -> int:
    """GPUs that a job can use without another batch; `ncf` one, as in the simulator."""
    app = job.application
    return 1 if app.name == "ncf" else min(64, max(1, job.target_batch_size // app.min_local_bsz))


class PoolPolicyThere:
    """`plan` in the simulator: it knows steps left, and the steps that were measured."""

    def __init__(self) -> None:
        self.paces: dict[str, tuple[tuple[int, float], ...]] = {}
        self.began: dict[str, float] = {}

    def counts(
        self, jobs: Mapping[str, Any], now: float, gpus: int, before: Allocations
    ) -> Counter[str]:
        """GPUs of each job."""
        known = {}
        for name, job in jobs.items():
            held = len(before.get(name, ()))
            if held and job.rescale_time <= 0:
                step_s = Lengths.step_s(job)
                self.paces[name] = with_pace(self.paces.get(name, ()), held, step_s)
            paces = self.paces.get(name, ())
            left_s = Lengths.steps_left(job) * curve_of(paces).one_s if paces else None
            known[name] = PoolJob(
                id=name,
                share="all",
                at_least=1,
                at_most=most_gpus(job),
                submitted=job.submission_time,
                status=RUNNING if held else WAITING,
                target=held,
                held=held,
                began=self.began.get(name),
                left_s=left_s,
                paces=paces,
                seen=now,
            )
        found = Counter(plan(PoolState(cores=gpus, jobs=known), now, explain=False).workers)
        for name, count in found.items():
            if count:
                self.began.setdefault(name, now)
        return found


class Backfill:
    """Gangs in their order, and others that delay the first that waits by nothing (EASY)."""

    def counts(
        self, jobs: Mapping[str, Any], now: float, gpus: int, before: Allocations
    ) -> Counter[str]:
        """GPUs of each job."""
        found = Counter({name: len(each) for name, each in before.items() if each})
        free = gpus - found.total()
        ends = sorted((now + self._takes_s(jobs[name], n), n) for name, n in found.items())
        waiting = [job for name, job in jobs.items() if not found[name]]
        reserved, spare = math.inf, 0
        for job in sorted(waiting, key=lambda each: (each.submission_time, each.name)):
            size = job.target_num_replicas
            end = now + 60.0 + self._takes_s(job, size)
            if size <= free and (end <= reserved or size <= spare):
                found[job.name] = size
                free, spare = free - size, spare - size * (end > reserved)
                ends.append((end, size))
            elif reserved == math.inf:
                room = free
                for end, cores in sorted(ends):
                    room += cores
                    if room >= size:
                        reserved, spare = end, min(room - size, free)
                        break
            if reserved == math.inf:
                spare = free
        return found

    @staticmethod
    def _takes_s(job: Any, gpus: int) -> float:
        app = job.application
        placement = (4,) * (gpus // 4) + ((gpus % 4,) if gpus % 4 else ())
        batch = math.ceil(job.target_batch_size / gpus - 1e-8)
        more = math.ceil(batch / app.max_local_bsz - 1e-8) - 1
        if gpus == 1 and job.target_batch_size > app.init_batch_size:
            more = max(1, more)
        step_s, sync_s = app.get_throughput(placement, math.ceil(batch / (more + 1) - 1e-8))
        return float(Lengths.steps_left(job) * (step_s + more * (step_s - sync_s)))


def placed(counts: Mapping[str, int], before: Allocations, nodes: Mapping[int, Any]) -> Allocations:
    """GPUs of each job: who keeps their number keeps its place; few hosts for the others."""
    found = {name: each for name, each in before.items() if each and counts.get(name) == len(each)}
    free = {index: int(node.resources[GPUS]) for index, node in nodes.items()}
    for each in found.values():
        for index in each:
            free[index] -= 1
    others = [name for name, count in counts.items() if count and name not in found]
    for name in sorted(others, key=lambda each: (-counts[each], each)):
        left, mine = counts[name], list[int]()
        while left:
            fits = [index for index, room in free.items() if room >= left]
            if fits:
                index = min(fits, key=lambda each: (free[each], each))
            else:
                index = max(free, key=lambda each: (free[each], -each))
            taken = min(left, free[index])
            free[index] -= taken
            left -= taken
            mine += [index] * taken
        found[name] = mine
    return found


def simulated(there: Any, workload: Any, ours: Any, resize_s: float) -> list[float]:
    """Seconds from submission to end of each job; None for `ours` is the simulator's Tiresias."""
    resizes: Callable[[Any, Any], None] = there.Job.reallocate
    cluster: Any = None

    class Job(there.Job):  # type: ignore[misc]
        def reallocate(self, placement: Any) -> None:
            resizes(self, placement)
            if placement:
                self.rescale_time = resize_s

    tiresias = there.TiresiasPolicy(lambda: cluster.current_time)
    if ours is not None:

        def optimize(jobs: Any, nodes: Any, before: Any, _: Any) -> Any:
            mine = {job.name: job for job in cluster.jobs if job.name in jobs}
            gpus = sum(int(node.resources[GPUS]) for node in nodes.values())
            counts = ours.counts(mine, float(cluster.current_time), gpus, before)
            return placed(counts, before, nodes), len(nodes)

        tiresias.optimize = optimize
    theirs, there.Job = there.Job, Job
    try:
        cluster = there.Cluster(workload, tiresias, 16)
    finally:
        there.Job = theirs
    with contextlib.redirect_stdout(io.StringIO()):
        while not cluster.all_complete():
            cluster.step(60)
            del cluster.logs[:-1]
    return [job.completion_time - job.submission_time for job in cluster.jobs]


def workloads_of(there: Any, path: Path, load: str, args: argparse.Namespace) -> dict[str, Any]:
    """The workloads that were published for a load; or others, drawn from the same trace."""
    pd = importlib.import_module("pandas")
    if not args.drawn:
        files = sorted((path / LOADS[load]).glob("workload-*.csv"))[: args.most]
        return {file.stem: pd.read_csv(file) for file in files}
    generate = importlib.import_module("workload").generate
    count, seeds = round(160 * float(load)), range(1000, 1000 + args.drawn)
    return {f"drawn-{seed}": generate(count, start=2, duration=8, seed=seed) for seed in seeds}


def compared(there: Any, path: Path, load: str, args: argparse.Namespace) -> dict[str, Any]:
    """Mean seconds of a job under each policy."""
    ways: dict[str, Callable[[Any], list[float]]] = {
        "pool_30s": lambda jobs: simulated(there, jobs, PoolPolicyThere(), 30.0),
        f"pool_{args.resize:g}s": lambda jobs: simulated(
            there, jobs, PoolPolicyThere(), args.resize
        ),
        "tiresias": lambda jobs: simulated(there, jobs, None, 30.0),
        "backfill": lambda jobs: simulated(there, jobs, Backfill(), 30.0),
    }
    workloads = workloads_of(there, path, load, args)
    found: dict[str, Any] = {"load": float(load), "workloads": len(workloads)}
    each: dict[str, dict[str, float]] = {}
    for way in [*ways] if not args.ways else args.ways:
        each[way] = {}
        for name, jobs in workloads.items():
            began = time.process_time()
            each[way][name] = statistics.mean(ways[way](jobs))
            took_s = time.process_time() - began
            print(f"{load} {way:10} {name} {each[way][name]:8.0f} s   ({took_s:.0f} s)", flush=True)
    if not args.drawn:
        for policy in ("pollux", "tiresias"):
            file = path / "results-jobload" / f"{policy}-{load}" / "summary.json"
            averages = json.loads(file.read_text())["avgs"]
            each[f"{policy}_published"] = {name: averages[name] for name in workloads}
    found["mean_completion_s"] = {
        way: round(statistics.mean(means.values()), 1) for way, means in each.items()
    }
    found["each_s"] = {
        way: {name: round(mean, 1) for name, mean in means.items()} for way, means in each.items()
    }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("simulator", type=Path, help="folder `simulator` of the checkout")
    parser.add_argument("--loads", nargs="+", default=[*LOADS], choices=[*LOADS])
    parser.add_argument("--resize", type=float, default=1.0, help="seconds of our resize")
    parser.add_argument("--drawn", type=int, default=0, help="so many workloads of other seeds")
    parser.add_argument("--most", type=int, default=8, help="workloads of each load")
    parser.add_argument("--ways", nargs="*", help="only these")
    args = parser.parse_args()
    there = simulator_of(args.simulator.resolve())
    loads = [compared(there, args.simulator, load, args) for load in args.loads]
    print(json.dumps({"drawn": args.drawn, "resize_s": args.resize, "loads": loads}))


if __name__ == "__main__":
    main()
