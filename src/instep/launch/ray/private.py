"""All that instep uses of Ray beside its public interface; each with what is lost without it.

Ray may change these without notice, so each is asked for where it is used, and may be absent.
"""

from __future__ import annotations

import importlib
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

LOOK_S = 0.5
"""Seconds between two questions which nodes are about to go."""


def draining(ray: Any) -> set[str]:
    """Ids of the nodes that are about to go; without it their workers are lost with them.

    Ray Train and Ray Data ask in the same way. A cluster that cannot be asked has none.
    """
    try:
        return set(ray._private.state.state.get_draining_nodes())
    except Exception:
        return set()


def events_folder(ray: Any) -> Path | None:
    """Where this node's Ray looks for events; without it its dashboard shows none of instep's."""
    try:
        return Path(ray._private.worker._global_node.get_logs_dir_path()) / "events"
    except Exception:
        return None


class Drains:
    """Asks again and again which nodes are about to go, in a thread: a head node that hangs must
    not hold the caller."""

    def __init__(self, ray: Any) -> None:
        self.nodes: set[str] = set()
        """As they were a moment ago."""
        self._ray, self._over = ray, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.nodes = draining(self._ray)

    def close(self) -> None:
        """Ask no more, before Ray is disconnected; a second call does nothing."""
        self._over.set()
        self._thread.join(LOOK_S)


def spilling(strategies: Any, node: str) -> Any:
    """A strategy: on this node if it has room, else on any; without it the actor would wait there.

    Args:
        strategies: `ray.util.scheduling_strategies`.
        node: its id.
    """
    there = strategies.NodeAffinitySchedulingStrategy
    try:
        return there(node, soft=True, _spill_on_unavailable=True)
    except TypeError:
        return "SPREAD"


@contextmanager
def patient(ray: Any) -> Iterator[None]:
    """Have nodes that are started wait for their agents however long they take.

    Ray's raylet ends itself if an agent has not told its ports within 15 seconds, a constant
    (Ray's issue 65983), which on a busy machine is too short for their imports. Here the one port
    that a run needs is given, and of the others it is told that they are not in use, as an agent
    does where Ray is installed without its dashboard. Without this it is so.
    """
    try:
        raylet: Any = importlib.import_module("ray._raylet")

        services = ray._private.services
        begin, tell = services.start_raylet, raylet.persist_port
        names = [getattr(raylet, f"{name}_PORT_NAME") for name in _UNUSED]
        known = signature(begin)
    except (AttributeError, ImportError, ValueError):
        yield
        return

    def start(*args: Any, **options: Any) -> Any:
        given = known.bind(*args, **options).arguments
        if not options.get("runtime_env_agent_port"):
            options["runtime_env_agent_port"] = _free_port()
        for name in names:
            tell(given["session_dir"], given["node_id"], name, -1)
        return begin(*args, **options)

    services.start_raylet = start
    try:
        yield
    finally:
        services.start_raylet = begin


_UNUSED = ("DASHBOARD_AGENT_LISTEN", "METRICS_AGENT", "METRICS_EXPORT")


def _free_port() -> int:
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


@contextmanager
def on_loopback(ray: Any) -> Iterator[None]:
    """Have a cluster that is started listen on loopback alone: who reaches it can run programs.

    Ray has a setting for that, named after the systems where it is the default; it is read when
    Ray is imported. Without it a cluster listens on all networks.
    """
    setting = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    constants, given = ray._private.ray_constants, os.environ.get(setting)
    before = getattr(constants, "ENABLE_RAY_CLUSTER", False)
    os.environ[setting], constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if given is None:
            del os.environ[setting]
        else:
            os.environ[setting] = given
