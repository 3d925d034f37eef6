"""How soon is the first step of a job on a warm pool, beside `instep run` in the same minute?

    python benchmarks/pool_latency.py --times 15

In turns: a job is submitted to a pool of two cores with nothing on it, and the same job is run by
`instep run`. Then a long job fills the pool, and jobs of higher priority are submitted, one after
the other; at last its scheduler is killed and started again. All seconds are from the start of the
command. The long job is compared with an undisturbed run. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from pooling import JOB, RECIPE, first_step, instep, wait_for

from instep.detached import pid_of
from instep.pool.pool_file import PoolFolder
from instep.store.run_folder import RunFolder


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "median_s": round(statistics.median(ordered), 2),
        "p95_s": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 2),
        "least_s": round(ordered[0], 2),
    }


def submitted(folder: Path, pool: PoolFolder, *more: object) -> tuple[float, str]:
    """Submit a short job, wait for its end; seconds to its first step, and its name."""
    began = time.time()
    said = json.loads(
        instep("submit", folder / "short.toml", "--pool", pool.folder, "--json", *more)
    )
    wait_for("it has ended", lambda: bool(pool.state().jobs[said["job"]].outcome))
    return (first_step(Path(said["run"])) or 0.0) - began, said["job"]


def run_alone(folder: Path, number: int) -> float:
    began, name = time.time(), f"short-{number}"
    runs = folder / "alone"
    instep("run", folder / "short.toml", "--runs", runs, "--name", name, "--workers", 1, "--json")
    return (first_step(runs / name) or 0.0) - began


def urgent_ones(folder: Path, pool: PoolFolder, times: int) -> tuple[list[float], str]:
    """Submit jobs of higher priority while a long one has both cores; seconds to first steps."""
    long = json.loads(instep("submit", folder / "long.toml", "--pool", pool.folder, "--json"))[
        "job"
    ]
    found = []
    for _ in range(times):
        wait_for("it has both cores", lambda: workers_of(pool, long) == 2)
        found.append(submitted(folder, pool, "--priority", 5, "--at-most", 1)[0])
    wait_for("the long one has ended", lambda: bool(pool.state().jobs[long].outcome))
    return found, long


def workers_of(pool: PoolFolder, name: str) -> int:
    """Workers that are in the group of a run; 0 before it has one."""
    try:
        return RunFolder(pool.runs / name).members.team
    except Exception:
        return 0


def attached(pool: PoolFolder) -> float:
    """Kill the scheduler, and start another; seconds until it has the pool."""
    pid = pid_of(pool.lock)
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    instep("pool", "--pool", pool.folder, "start")
    wait_for("it is there", lambda: pid_of(pool.lock) is not None)
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=15)
    parser.add_argument("--long", type=int, default=1500, help="steps of the long job")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    (folder / "recipe.py").write_text(RECIPE)
    for name, steps in (("short", 5), ("long", args.long)):
        (folder / f"{name}.toml").write_text(JOB.format(name=name, steps=steps))
    (folder / "pool.toml").write_text("cores = 2\n")
    pool = PoolFolder(folder / "pool")
    instep("pool", "--pool", pool.folder, "start", folder / "pool.toml")
    submitted(folder, pool)  # once its process is warm
    warm, cold = list[float](), list[float]()
    for number in range(args.times):
        warm.append(submitted(folder, pool, "--at-most", 1)[0])
        cold.append(run_alone(folder, number))
    urgent, long = urgent_ones(folder, pool, max(1, args.times // 3))
    again = [attached(pool) for _ in range(max(1, args.times // 3))]
    instep("pool", "--pool", pool.folder, "stop")
    done = instep("run", folder / "long.toml", "--runs", folder / "alone", "--workers", 1, "--json")
    truth = json.loads(done.splitlines()[-1])["parameters_sha256"]
    run = RunFolder(pool.runs / long)
    found: dict[str, Any] = {
        "times": args.times,
        "load": [round(each, 1) for each in os.getloadavg()],
        "cores": os.cpu_count(),
        "submitted": spread(warm),
        "run": spread(cold),
        "ratio": round(statistics.median(warm) / statistics.median(cold), 3),
        "urgent": spread(urgent),
        "attached": spread(again),
        "long_is_undisturbed": run.last("model_saved").get("parameters_sha256") == truth,
        "long_repeated": run.audit.repeated + run.audit.stray,
        "long_sessions": len(run.times.sessions),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
