"""A Ray cluster of several nodes of this machine, and what a run has on it."""

import contextlib
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from started import TIMEOUT_S, Start, Started, newest_pids

from instep.lab.netlab import OUTSIDE, Network
from instep.launch.ray.private import patient

RAY = Path(sys.executable).with_name("ray")
STORE_BYTES = 80 << 20
KEYS = ("train.steps=400", 'train.determinism="bits"')
ON_RAY = ('launch.on="ray"',)


def of_hosts() -> set[psutil.Process]:
    """Living actors and fork servers, and what these have started, of this program's cluster."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = " ".join(process.cmdline())
            if "ray::Host" in words or "fork_server" in words:
                found.add(process)
    return found


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A Ray cluster of three nodes, the first without cores; `param` is its configuration."""
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    store = {"object_store_memory": STORE_BYTES}
    head = {"num_cpus": 0, "include_dashboard": False, **store}
    head["_system_config"] = {"worker_niceness": 0, **getattr(request, "param", {})}
    import ray

    with patient(ray):
        made = Cluster(initialize_head=True, head_node_args=head)
    try:
        with patient(ray):
            for _ in range(2):
                made.add_node(num_cpus=2, **store)
        made.wait_for_nodes(TIMEOUT_S)
        monkeypatch.setenv("RAY_ADDRESS", made.address)
        yield made
    finally:
        made.shutdown()


def hash_alone(run: Start, *settings: str) -> str:
    """Of the same job on this machine."""
    program = run("tiny.py:recipe", *KEYS, *settings)
    assert program.end() == 0, program.stderr
    return str(program.summary["parameters_sha256"])


def fork_server_of(program: Started, worker: int | None) -> psutil.Process:
    assert worker is not None
    server = psutil.Process(newest_pids(program)[worker]).parent()
    assert server is not None
    return server


def actor_of(program: Started, worker: int | None) -> psutil.Process:
    actor = fork_server_of(program, worker).parent()
    assert actor is not None
    assert actor.name().startswith("ray::Host")
    return actor


def worker_on(program: Started, host: int) -> int | None:
    """The worker on a host, once each of two hosts has one."""
    ended = {e["pid"] for e in program.events("process_ended")}
    joined = [e for e in program.events("worker_joined") if e["pid"] not in ended]
    places = {e["worker"]: e["host"] for e in joined}
    both = sorted(places.values()) == [0, 1]
    return next(w for w, its in places.items() if its == host) if both else None


def wait_until_spread(program: Started) -> None:
    program.until(program.is_training, "training")
    program.until(lambda: worker_on(program, 1) is not None, "a worker on each host")


def raylet_of(program: Started, host: int) -> int:
    return actor_of(program, worker_on(program, host)).ppid()


def end_of(processes: set[psutil.Process]) -> None:
    """Wait until none of them is left."""
    _, alive = psutil.wait_procs(list(processes), timeout=TIMEOUT_S)
    assert [process.pid for process in alive] == []


def raylet_pid(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def drain(cluster: Any, raylet: int) -> None:
    """Announce that a node will be gone in a minute, as a cloud does, or `ray drain-node`."""
    from ray._raylet import GcsClient
    from ray.core.generated.autoscaler_pb2 import DrainNodeReason

    (node,) = (each for each in cluster.worker_nodes if raylet_pid(each) == raylet)
    reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
    deadline_ms = int(1000 * (time.time() + 60))
    client = GcsClient(address=cluster.address)
    accepted, why = client.drain_node(node.node_id, reason, "a test", deadline_ms)
    assert accepted, why


@contextlib.contextmanager
def nodes_on(network: Network) -> Iterator[str]:
    """A Ray cluster whose head is this machine, with a node of two cores on each emulated host.

    Each has a folder of its own for Ray, which looks there for the address of its node.

    Yields:
        Its address.
    """
    head, folder = network.address(OUTSIDE), Path(os.environ["RAY_TMPDIR"])
    with socket.create_server((head, 0)) as free:
        port = free.getsockname()[1]
    own = ["--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"]
    programs = [_node(network, OUTSIDE, *own)]
    try:
        _until_accepts(head, port)
        for host in network.hosts:
            (mine := folder / host).mkdir()
            mount = shlex.join(["mount", "--bind", str(mine), str(folder)])
            enter = ("unshare", "--mount", "sh", "-c", f'{mount} && exec "$@"', "sh")
            there = (f"--address={head}:{port}", "--num-cpus=2")
            programs.append(_node(network, host, *there, enter=enter))
        _until_there(f"{head}:{port}", len(programs))  # else one node would get both hosts
        yield f"{head}:{port}"
    finally:
        for program in programs:
            for process in [*psutil.Process(program.pid).children(recursive=True), program]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            program.wait()


def _node(
    network: Network, host: str, *words: str, enter: tuple[str, ...] = ()
) -> subprocess.Popen[Any]:
    more = (f"--node-ip-address={network.address(host)}", f"--object-store-memory={STORE_BYTES}")
    command = [*enter, str(RAY), "start", *words, *more, "--disable-usage-stats", "--block"]
    environment = {**os.environ, "RAY_worker_niceness": "0"}
    return network.run(host, command, stdout=subprocess.DEVNULL, env=environment)


def _until_accepts(host: str, port: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((host, port), 1.0).close()
            return
        time.sleep(0.1)
    raise AssertionError(f"no Ray at {host}:{port}")


def _until_there(address: str, nodes: int) -> None:
    """Wait until a cluster has so many nodes."""
    from ray._raylet import GcsClient

    deadline, client = time.monotonic() + TIMEOUT_S, GcsClient(address=address)
    while len(client.get_all_node_info(timeout=TIMEOUT_S)) < nodes:
        assert time.monotonic() < deadline, f"not {nodes} nodes in {TIMEOUT_S} s"
        time.sleep(0.1)
