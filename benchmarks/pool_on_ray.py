"""Thirty jobs on three nodes of a Ray cluster, of which one is drained and one is killed.

    python benchmarks/pool_on_ray.py [--jobs 30] [--json FILE]

The cluster is one of this machine, of three nodes with two cores each. The pool has a host on
demand for each node, through `python -m instep.pool.on_ray.run`. Jobs of three users, of six
lengths, are submitted at once. When a third of them has ended, a node that is used is announced
to go, as a cloud does; when two thirds have, another one is killed with all that runs there. The
parameters of each job are compared with those of `instep run` on one worker without a pool, and
its ledger is audited. At the end the pool gives all nodes back.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil
from pooling import JOB, RECIPE, instep, wait_for
from turns import write

from instep.launch.ray.private import patient
from instep.pool.pool_file import PoolFolder
from instep.store.run_folder import RunFolder

STEPS = (60, 75, 90, 105, 120, 135)
NODES, CORES, STORE_BYTES = 3, 2, 80 << 20
GOES_IN_S = 30
LIMIT_S = 3600.0


def cluster() -> Any:
    """A head without cores, and the nodes."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    with patient(ray):
        made = Cluster(initialize_head=True, head_node_args=head)
        for _ in range(NODES):
            made.add_node(num_cpus=CORES, object_store_memory=STORE_BYTES)
    made.wait_for_nodes(LIMIT_S)
    return made


def used_nodes(made: Any) -> list[Any]:
    """The nodes on which the pool has something, by the guards that are there."""
    raylets = {
        int(process.environ()["RAY_RAYLET_PID"])
        for process in psutil.process_iter(["cmdline"])
        if "instep.pool.on_ray.guard" in (process.info["cmdline"] or [])
    }
    return [
        node
        for node in made.worker_nodes
        if int(node.all_processes["raylet"][0].process.pid) in raylets
    ]


def announce(made: Any, node: Any) -> None:
    """Say that a node will be gone."""
    words = import_module("ray.core.generated.autoscaler_pb2")
    reason = words.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    until_ms = int(1000 * (time.time() + GOES_IN_S))
    import_module("ray._raylet").GcsClient(address=made.address).drain_node(
        node.node_id, reason, "a benchmark", until_ms
    )


def start_pool(folder: Path, address: str) -> PoolFolder:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    start = f"{sys.executable} -m instep.pool.on_ray.run {address} --cpus {CORES} --"
    table = f'cores = {CORES}\nstart = "{start}"\nidle = "5s"\n'
    hosts = "".join(f"[hosts.node-{number}]\n{table}" for number in range(NODES))
    (folder / "pool.toml").write_text(f'listen = "127.0.0.1:{port}"\n{hosts}')
    pool = PoolFolder(folder / "pool")
    instep("pool", "--pool", pool.folder, "start", folder / "pool.toml")
    return pool


def measure(folder: Path, jobs: int) -> dict[str, Any]:
    (folder / "recipe.py").write_text(RECIPE)
    truth: dict[int, str] = {}
    for steps in STEPS:
        path = folder / f"net-{steps}.toml"
        path.write_text(JOB.format(name=f"net-{steps}", steps=steps))
        said = instep("run", path, "--runs", folder / "alone", "--workers", 1, "--json")
        truth[steps] = json.loads(said.splitlines()[-1])["parameters_sha256"]
    made = cluster()
    pool = start_pool(folder, made.address)
    began, names = time.monotonic(), dict[str, int]()
    for number in range(jobs):
        steps = STEPS[number % len(STEPS)]
        words = ("--share", "abc"[number % 3], "--at-most", CORES, "--json")
        said = instep("submit", folder / f"net-{steps}.toml", "--pool", pool.folder, *words)
        names[json.loads(said)["job"]] = steps

    def ended() -> int:
        return sum(bool(job.outcome) for job in pool.state().jobs.values())

    try:
        wait_for("a third of the jobs", lambda: ended() >= jobs // 3, LIMIT_S)
        first = used_nodes(made)[0]
        announce(made, first)
        wait_for("two thirds of the jobs", lambda: ended() >= 2 * jobs // 3, LIMIT_S)
        second = next(node for node in used_nodes(made) if node is not first)
        made.remove_node(second, allow_graceful=False)
        wait_for("all jobs", lambda: ended() == jobs, LIMIT_S)
        took_s = time.monotonic() - began
        wait_for("nodes are given back", lambda: not used_nodes(made), LIMIT_S)
        instep("pool", "--pool", pool.folder, "stop")
    finally:
        made.shutdown()
    runs = {name: RunFolder(pool.runs / name) for name in names}
    same = [
        run.last("model_saved").get("parameters_sha256") == truth[names[name]]
        for name, run in runs.items()
    ]
    return {
        "jobs": jobs,
        "seconds": round(took_s, 1),
        "load": os.getloadavg()[0],
        "completed": sum(run.outcome == "completed" for run in runs.values()),
        "other_bits": len(same) - sum(same),
        "repeated_samples": sum(r.audit.repeated + r.audit.stray for r in runs.values()),
        "missing_samples": sum(run.audit.missing for run in runs.values()),
        "sessions": sum(len(run.times.sessions) for run in runs.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--json", type=Path, help="file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as text:
        found = measure(Path(text), args.jobs)
    print(json.dumps(found))
    if args.json:
        write(args.json, [found])


if __name__ == "__main__":
    main()
