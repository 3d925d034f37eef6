"""Hosts of a pool on the nodes of a Ray cluster: asked for, drained, killed and given back."""

import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from on_ray import STORE_BYTES, cluster, drain, raylet_pid
from test_hosts_of_a_pool import HostedPool, make, until

from instep.detached import pid_of
from instep.events import read_events
from instep.launch.ray.private import patient

pytestmark = [pytest.mark.process, pytest.mark.slow]
__all__ = ["cluster", "make"]

RUN = f"{sys.executable} -m instep.pool.on_ray.run"


def line(address: str, cpus: int = 2) -> str:
    return f'start = "{RUN} {address} --cpus {cpus} --"\nidle = "2s"\n'


def guards() -> list[psutil.Process]:
    """The processes that end what runs on nodes; a zombie has ended."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words, status = process.info["cmdline"] or [], process.info["status"]
        if "instep.pool.on_ray.guard" in words and status != psutil.STATUS_ZOMBIE:
            found.append(process)
    return found


def hosts_of(guard: psutil.Process) -> list[psutil.Process]:
    """The `instep host` that a guard runs."""
    found = []
    for each in guard.children():
        with suppress(psutil.Error):  # it has just ended
            found += [each] if "--stay" in each.cmdline() else []
    return found


def raylet_above(process: psutil.Process) -> int:
    """The raylet of the node on which a guard runs."""
    return int(process.environ()["RAY_RAYLET_PID"])


def test_jobs_go_on_with_the_same_bits_while_one_node_is_drained_and_one_is_killed(
    make: Callable[..., HostedPool], cluster: Any, tmp_path: Path
) -> None:
    import ray

    with patient(ray):
        cluster.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    lines = {name: line(cluster.address) for name in ("one", "two", "three")}
    pool = make(dict.fromkeys(lines, 2), lines=lines)
    assert "one: 0 of 2 cores busy, started once jobs wait for it" in pool.status()
    assert not guards()

    jobs = {pool.submit(steps, 0.008, "--at-least", 1): steps for steps in (201, 202, 203)}
    until(lambda: all(pool.steps(name) > 3 for name in jobs))
    assert 1 <= len(guards()) <= 3, "a host that no job needs was started"

    first = guards()[0]
    drain(cluster, raylet_above(first))
    until(lambda: first not in guards() or "leaving" in pool.status())
    moved = {name: pool.steps(name) for name in jobs}
    until(lambda: all(pool.steps(n) > moved[n] or pool.job(n).outcome for n in jobs))
    scheduler = pid_of(pool.folder.lock)
    assert scheduler is not None
    os.kill(scheduler, signal.SIGKILL)
    left = [each for each in guards() if each.pid != first.pid]
    killed = raylet_above(left[0])
    (node,) = (each for each in cluster.worker_nodes if raylet_pid(each) == killed)
    cluster.remove_node(node, allow_graceful=False)
    pool.call("pool", *pool.where, "start")
    until(lambda: all(pool.job(name).outcome for name in jobs))
    for name, steps in jobs.items():
        pool.check_bits(name, steps)
    until(lambda: not guards())
    assert not [*Path("/tmp").glob("instep-ray-*")]


def test_what_was_started_on_a_node_ends_with_its_actor_and_starts_again(
    make: Callable[..., HostedPool], cluster: Any
) -> None:
    pool = make({"one": 2}, lines={"one": line(cluster.address)})
    name = pool.submit(400, 0.008)
    until(lambda: pool.steps(name) > 3)
    (guard,) = guards()
    (host,) = hosts_of(guard)
    host.kill()  # another one is started beside what goes on
    until(lambda: sum(len(hosts_of(each)) for each in guards()) == 1)
    again = pool.steps(name)
    until(lambda: pool.steps(name) > again + 3)
    events = [e["event"] for e in read_events(pool.folder.runs / name / "events.jsonl")]
    assert "host_lost" not in events
    below = [*guards(), *(p for each in guards() for p in each.children(recursive=True))]
    assert len(below) >= 5, "no host, or no run"
    actor = next(p for p in psutil.process_iter() if p.name().startswith("ray::NodeCommand"))
    actor.kill()
    _, alive = psutil.wait_procs(below, timeout=600)
    assert not alive
    until(lambda: bool(pool.job(name).outcome))
    pool.check_bits(name, 400)


def test_a_pool_that_stops_gives_its_nodes_back(
    make: Callable[..., HostedPool], cluster: Any
) -> None:
    pool = make({"one": 2, "large": 9}, lines={n: line(cluster.address, c) for n, c in SIZES})
    name = pool.submit(2000, 0.02, "--at-most", 2)
    until(lambda: pool.steps(name) > 3)
    pool.submit(400, 0.02, "--at-least", 5)  # no node has so many
    pool.call("cancel", name, *pool.where)
    until(lambda: bool(pool.job(name).outcome))
    pool.call("pool", *pool.where, "stop")
    until(lambda: not guards())


SIZES = (("one", 2), ("large", 9))
