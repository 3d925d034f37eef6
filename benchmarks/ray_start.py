"""How long until two hosts of a run are ready on a warm Ray cluster, and train?

    python benchmarks/ray_start.py [--rounds 5] [--json FILE]

A real Ray cluster on this machine: a head without cores, and two nodes of one core. Warm: a run
was there before, so Ray and Python are in the page cache; it is up, and its nodes are idle. Told
are seconds from the start of `instep run --on ray`, of which a part is `import ray` and the
connection, and from the call of `instep.train` in a program that is connected already:

- until both hosts are ready: each has torch and the recipe, and a worker that knows the master;
- until the first step is committed.

Needs Ray.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import ray

import instep
from instep.events import STEPS, read_events, read_records

RECIPE = f"{Path(__file__).parent / 'recipes' / 'mlp.py'}:recipe"
HOSTS = 2
STORE_BYTES = 80 << 20
AIM_S = 5.0


def seconds_of(run: Path, began: float) -> dict[str, float]:
    """From the start until both hosts were ready, and until the end of the first step."""
    ready: dict[int, float] = {}
    for event in read_events(run / "events.jsonl"):
        if event["event"] == "worker_joined":
            ready.setdefault(event["host"], event["time"] - began)
    assert len(ready) == HOSTS, ready
    first = read_records(run / "steps.bin", STEPS)[0]
    spent = sum(float(first[name]) for name in STEPS.names or () if name.endswith("_s"))
    return {"hosts ready": max(ready.values()), "first step": float(first["begin"]) + spent - began}


def by_command(folder: Path) -> dict[str, float]:
    job = folder / "job.toml"
    job.write_text(f'recipe = "{RECIPE}"\nname = "start"\nworkers = {HOSTS}\n')
    words = ["run", str(job), "--on", "ray", "--runs", str(folder), "--set", "train.steps=1"]
    began = time.time()
    done = subprocess.run([sys.executable, "-m", "instep", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return seconds_of(folder / "start", began)


def within_a_program(folder: Path) -> dict[str, float]:
    began = time.time()
    run = instep.train(
        RECIPE, name="start", workers=HOSTS, runs=folder, on="ray", train={"steps": 1}, quiet=True
    )
    return seconds_of(run.path, began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from ray.cluster_utils import Cluster

    own = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args=own)
    rounds: dict[str, list[dict[str, float]]] = {"command": [], "program": []}
    try:
        for _ in range(HOSTS):
            cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        cluster.wait_for_nodes()
        os.environ["RAY_ADDRESS"] = cluster.address
        ray.init(cluster.address, log_to_driver=False)
        for number in range(args.rounds + 1):
            for name, call in (("command", by_command), ("program", within_a_program)):
                with tempfile.TemporaryDirectory() as folder:
                    found = call(Path(folder))
                if number:  # the first one warms the cluster
                    rounds[name].append(found)
    finally:
        ray.shutdown()
        cluster.shutdown()
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "machine": platform.platform(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "aim_s": AIM_S,
        "rounds": rounds,
    }
    for name, each in rounds.items():
        for what in each[0]:
            taken = [one[what] for one in each]
            result[f"{name}: {what}"] = statistics.median(taken)
            print(
                f"{name:8} {what:12}{statistics.median(taken):6.2f} s ({max(taken):.2f} at worst)"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
