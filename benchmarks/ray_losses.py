"""How long does a run on Ray stand still when actors and nodes are lost, and does it show?

    python benchmarks/ray_losses.py [--raylets 20] [--actors 20] [--drains 10] [--network private]
                                    [--json FILE]

A real Ray cluster on this machine: a head without cores, and three nodes of one core, each with
one host and one worker of a run that is "to the bit". In an order drawn by chance raylets and
actors get SIGKILL, and nodes are drained, as a cloud announces that it takes one away. Once
the run has gone on, another node is added in the place of one that is gone: not before, as it would
have cores of its own, and its start takes both of these for seconds. The next comes when three
hosts have a worker each again. Told are:

- from the kill to the end of the next step that three workers committed; the same for workers
  that are killed in a run of three on this machine alone (half of them before, half after);
- from the announcement of a drain until the node is empty, and the longest step meanwhile;
- repeated and missing samples, workers lost by drains, returns to a checkpoint, processes that
  are left, and whether the parameters are those of an undisturbed run.

Ray's workers have the priority of other programs, as those of the run on this machine alone. The
run on Ray is encrypted, that on this machine alone is not; with `--network private` neither.
Needs Ray. The times of Ray's own starts (a node, an actor) are in none of the figures: workers
that were lost start on the hosts that are left.
"""

import argparse
import datetime
import json
import os
import platform
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from recovery import UnderInstep, disturb, percentiles, sameness
from rivals.contender import recovery

from instep.events import read_events

RECIPE = f"{Path(__file__).parent / 'recipes' / 'one_is_slow.py'}:recipe"
WORKERS, GLOBAL_BATCH = 3, 24
SAMPLE_S = 0.002
"""Of each sample, slept: raylets that start need the cores."""

LIMIT_S = 120.0
"""For a run to be whole again."""

STORE_BYTES = 80 << 20

NICENESS = 0
"""Of what Ray starts; its own value is 15, with which all that a run does comes after the rest of
this machine, and not only what is measured here."""


def arguments(folder: Path, sample_s: float) -> dict[str, Any]:
    return {"mark": str(folder / "first"), "sample_s": sample_s, "times": 1.0}


class Nodes:
    """A Ray cluster of this machine, whose nodes come and go."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        own: dict[str, Any] = {"num_cpus": 0, "include_dashboard": False}
        own |= {"object_store_memory": STORE_BYTES, "_system_config": {"worker_niceness": NICENESS}}
        self.cluster = Cluster(initialize_head=True, head_node_args=own)
        self.pids: set[int] = set()
        for _ in range(WORKERS):
            self.add()

    def add(self) -> None:
        node = self.cluster.add_node(num_cpus=1, object_store_memory=STORE_BYTES)
        self.pids.add(raylet_pid(node))

    def of(self, raylet: int) -> Any:
        (node,) = (each for each in self.cluster.worker_nodes if raylet_pid(each) == raylet)
        return node

    def drain(self, raylet: int) -> None:
        """As `ray drain-node` does it, and an autoscaler that is told of a preemption."""
        from ray._raylet import GcsClient  # type: ignore[attr-defined]
        from ray.core.generated.autoscaler_pb2 import (  # type: ignore[attr-defined]
            DrainNodeReason,
        )

        reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
        client, deadline_ms = GcsClient(address=self.cluster.address), 1000 * (time.time() + 60)
        accepted, why = client.drain_node(
            self.of(raylet).node_id, reason, "a benchmark", int(deadline_ms)
        )
        if not accepted:
            raise RuntimeError(why)

    def replace(self, raylet: int) -> None:
        """Once a node is gone, or about to go by itself, add another."""
        self.cluster.remove_node(self.of(raylet), allow_graceful=False)
        self.add()


def raylet_pid(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


class OnRay(UnderInstep):
    """A run on such a cluster."""

    def __init__(self, folder: Path, nodes: Nodes, network: str) -> None:
        os.environ["RAY_ADDRESS"] = nodes.cluster.address
        on = {"launch.on": '"ray"', "launch.nodes": WORKERS, "launch.cpus": 1}
        on["network"] = json.dumps(network)
        super().__init__(folder, WORKERS, GLOBAL_BATCH, RECIPE, {**on, **settings(folder)})

    def events(self, *names: str) -> list[dict[str, Any]]:
        return [e for e in read_events(self.run / "events.jsonl") if e["event"] in names]

    def whole(self, since: float) -> bool:
        """Whether three hosts have a worker each, and train since that moment."""
        places = {e["worker"]: e["host"] for e in self.events("worker_joined")}
        formed = self.events("generation_started")
        members = formed[-1]["members"] if formed else []
        gone = ("host_lost", "host_given_back", "worker_lost")
        last = max([since, *(e["time"] for e in self.events(*gone))])
        if {places[worker] for worker in members} != set(range(WORKERS)):
            return False
        return formed[-1]["time"] > last and recovery(self.steps(500), last, WORKERS) is not None

    def goes_on(self, since: float) -> bool:
        """Whether all workers have taken a step together since then."""
        return recovery(self.steps(500), since, WORKERS) is not None

    def fork_server(self, host: int) -> psutil.Process:
        of_host = [e for e in self.events("host_joined") if e["host"] == host]
        return psutil.Process(of_host[-1]["pid"])

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            if time.monotonic() > deadline or not self.alive():
                said = (self.run.parent / "said").read_text()[-3000:]
                raise RuntimeError(f"not {what} in {LIMIT_S:.0f} s:\n{said}")
            time.sleep(0.1)


def settings(folder: Path) -> dict[str, object]:
    given = arguments(folder, SAMPLE_S).items()
    more = {"checkpoint.every": 500, "train.micro_batches": 6}
    return {**{f"arguments.{k}": json.dumps(v) for k, v in given}, **more}


def is_drained(run: OnRay, before: int) -> bool:
    """Whether a host was given back since."""
    return len(run.events("host_given_back")) > before


def disturb_on_ray(run: OnRay, nodes: Nodes, kinds: list[str], draw: random.Random) -> list[Any]:
    """One loss after the other; the kind and the moment of each."""
    done: list[Any] = []
    run.until(lambda: run.run.is_dir() and run.whole(0.0), "training on three hosts")
    for kind in kinds:
        time.sleep(draw.uniform(0.5, 1.5))
        server = run.fork_server(draw.randrange(WORKERS))
        actor = server.parent()
        raylet = actor.parent()
        assert actor.name().startswith("ray::Host"), actor.name()
        given_back = len(run.events("host_given_back"))
        moment = time.time()
        if kind == "actor":
            actor.kill()
        elif kind == "raylet":
            raylet.kill()
        else:
            nodes.drain(raylet.pid)
            run.until(partial(is_drained, run, given_back), "drained")
        done.append((kind, moment))
        run.until(partial(run.goes_on, moment), f"going on after a {kind}")
        if kind != "actor":
            nodes.replace(raylet.pid)
        run.until(partial(run.whole, moment), f"whole again after a {kind}")
        took = time.time() - moment
        print(f"\r{len(done)} of {len(kinds)}: {kind}, whole after {took:.1f} s   ", end="")
        sys.stdout.flush()
    print()
    return done


def left() -> list[str]:
    """Actors, fork servers and workers that are still there; Ray itself is."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            words = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if "ray::Host" in words or "instep" in words:
            found.append(words)
    return found


def on_ray(nodes: Nodes, kinds: list[str], draw: random.Random, network: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        run = OnRay(folder, nodes, network)
        try:
            done = disturb_on_ray(run, nodes, kinds, draw)
            run.stop()
            steps, events = run.steps(), run.events
            lengths = np.diff([step.end for step in steps])
            result = {
                **sameness(
                    run.run,
                    folder,
                    RECIPE,
                    {"micro_batches": 6},
                    arguments=arguments(folder, 0.0),
                ),
                "usual_step_s": round(float(np.median(lengths)), 4),
                "went_back": len(events("went_back")),
                "workers_lost": len(events("worker_lost")),
                "hosts_joined": len(events("host_joined")),
                "processes_left": len(left()),
            }
            losses = {kind: [m for k, m in done if k == kind] for kind in sorted(set(kinds))}
            for kind in ("actor", "raylet"):
                found = [recovery(steps, m, WORKERS) for m in losses.get(kind, [])]
                result[kind] = spread([each.full_s for each in found if each is not None])
            result["drain"] = drains(run, losses.get("drain", []))
            return result
        finally:
            run.end()


def drains(run: OnRay, moments: list[float]) -> dict[str, Any]:
    """How long until a drained node was empty, what was lost, and the longest step meanwhile."""
    ends = np.sort([step.end for step in run.steps()])
    lost = [e["time"] for e in run.events("worker_lost")]
    back = [e["time"] for e in run.events("host_given_back")]
    empty = [min(b for b in back if b > m) for m in moments]
    pairs = list(zip(moments, empty, strict=True))
    longest = [
        float(np.diff(ends[np.searchsorted(ends, m) - 1 : np.searchsorted(ends, e) + 1]).max())
        for m, e in pairs
    ]
    return {
        "empty": spread([e - m for m, e in pairs]),
        "longest_step": spread(longest),
        "workers_lost": sum(m <= each <= e for m, e in pairs for each in lost),
    }


def on_this_machine(kills: int, draw: random.Random) -> list[float]:
    with tempfile.TemporaryDirectory() as text:
        run = UnderInstep(Path(text), WORKERS, GLOBAL_BATCH, RECIPE, settings(Path(text)))
        try:
            moments = disturb(run, kills, draw, "on this machine", LIMIT_S)
            steps = run.steps()
            found = [recovery(steps, moment, WORKERS) for moment in moments]
            return [each.full_s for each in found if each is not None]
        finally:
            run.end()


def spread(values: list[float]) -> dict[str, Any]:
    if not values:
        return {"count": 0}
    each = [round(value, 3) for value in values]
    return {"count": len(values), **percentiles(values), "each_s": each}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    draw = random.Random(args.seed)
    counts = {"raylet": args.raylets, "actor": args.actors, "drain": args.drains}
    kinds = [kind for kind, count in counts.items() for _ in range(count)]
    draw.shuffle(kinds)
    half = max(1, (args.raylets + args.actors) // 4)
    loads = [os.getloadavg()[1]]
    local = on_this_machine(half, draw)
    nodes = Nodes()
    try:
        ray = on_ray(nodes, kinds, draw, args.network)
        loads.append(os.getloadavg()[1])
        ray["nodes_added"] = len(nodes.pids) - WORKERS
    finally:
        nodes.cluster.shutdown()
    local += on_this_machine(half, draw)
    killed = [s for kind in ("raylet", "actor") for s in ray[kind].get("each_s", [])]
    return {
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "seed": args.seed,
        "network": args.network,
        "worker_niceness": NICENESS,
        "load": [round(load, 1) for load in [*loads, os.getloadavg()[1]]],
        "on_this_machine": spread(local),
        "on_ray": {"killed": spread(killed), **ray},
        "ray_over_this_machine": round(float(np.median(killed) / np.median(local)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--raylets", type=int, default=20, help="to kill")
    parser.add_argument("--actors", type=int, default=20, help="to kill")
    parser.add_argument("--drains", type=int, default=10, help="nodes to drain")
    parser.add_argument(
        "--network",
        choices=["loopback", "private"],
        default="loopback",
        help="of the run on Ray: loopback (encrypted between hosts) or private (not)",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that all is ended on the way out
    result = measure(args)
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
