"""The Ray cluster of a run: found or started, and what it has, in words."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Any

from instep.errors import SpecError

CONNECT_S = 5.0
"""How long a cluster may take to accept a connection."""

ANSWER_S = 0.5
"""How long the raylet of a node may take."""

STORE_BYTES = 80 << 20
"""Of the object store of a cluster that is started for a run; nothing is put into it."""

_ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Has a cluster that is started here listen on loopback alone, on any system; otherwise whoever
reaches it could run programs. Ray reads the first when it is imported."""


def connect(address: str, cpus: int) -> tuple[Any, bool]:
    """Ray, and whether it was connected to a cluster just now.

    Args:
        address: of the cluster; `local` starts one.
        cpus: at least so many cores that one has.

    Raises:
        SpecError: Ray is not installed, or there is no cluster.
    """
    if address == "local":
        os.environ.update(_ON_LOOPBACK)
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
        cores = max(cpus, os.cpu_count() or 1)
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        try:
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
