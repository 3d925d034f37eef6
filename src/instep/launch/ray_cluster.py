"""The Ray cluster of a run: found or started, and what it has, in words."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from instep.errors import SpecError

CONNECT_S = 5.0
"""How long a cluster may take to accept a connection."""

ANSWER_S = 0.5
"""How long the raylet of a node may take."""

STORE_BYTES = 80 << 20
"""Of the object store of a cluster that is started for a run; nothing is put into it."""


def connect(address: str, cpus: int) -> tuple[Any, bool]:
    """Ray, and whether it was connected to a cluster just now.

    Args:
        address: of the cluster; `local` starts one.
        cpus: at least so many cores that one has.

    Raises:
        SpecError: Ray is not installed, or there is no cluster.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise SpecError(
            "launch.on = 'ray' needs Ray, which is not installed: pip install 'instep[ray]'."
        ) from None
    if ray.is_initialized():
        return ray, False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cores = max(cpus, os.cpu_count() or 1)
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        try:
            with _on_loopback(ray):
                ray.init("local", num_cpus=cores, **own, **quiet)
        except (OSError, RuntimeError) as error:
            raise SpecError(
                f"no Ray cluster could be started here: {last_line(error)}. Its files go to the "
                "folder RAY_TMPDIR, which needs a short name."
            ) from None
        return ray, True
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            socket.create_connection((host, int(port)), CONNECT_S).close()
        ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        raise SpecError(
            f"no Ray cluster at {address!r}: {last_line(error)}. Give host:port of its head node, "
            "such as 10.0.0.1:6379; or leave RAY_ADDRESS and --ray-address out, to start one."
        ) from None
    return ray, True


@contextmanager
def _on_loopback(ray: Any) -> Iterator[None]:
    """Have a cluster that is started listen on loopback alone: whoever reaches it can run programs.

    Ray has a setting for that, named after the systems where it is the default.
    """
    setting = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    constants, given = ray._private.ray_constants, os.environ.get(setting)
    before = constants.ENABLE_RAY_CLUSTER
    os.environ[setting], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if given is None:
            del os.environ[setting]
        else:
            os.environ[setting] = given


def nodes_with(ray: Any, resources: Mapping[str, float]) -> list[str]:
    """The nodes that have so much, in use or not, and whose raylet answers now.

    Ray may take a minute to notice that one is lost.
    """
    found = []
    for node in ray.nodes():
        there = node["Alive"] and _accepts(node["NodeManagerAddress"], node["NodeManagerPort"])
        if there and all(node["Resources"].get(n, 0) >= much for n, much in resources.items()):
            found.append(str(node["NodeID"]))
    return found


def _accepts(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), ANSWER_S).close()
    except OSError:
        return False
    return True


def amounts(resources: Mapping[str, float]) -> str:
    """Resources in words, without those that Ray makes up for itself."""
    own = {name for name in resources if ":" in name or "memory" in name}
    parts = []
    for name, amount in resources.items():
        if name not in own and amount:
            ending = "s" if name in ("CPU", "GPU") and amount != 1 else ""
            parts.append(f"{amount:g} {name}{ending}")
    return ", ".join(parts) or "nothing"


def last_line(error: Exception) -> str:
    """What an error says in the end: of one that comes from a node, its cause."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].rstrip(".") if lines else type(error).__name__
