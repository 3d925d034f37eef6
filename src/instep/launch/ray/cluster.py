"""The Ray cluster of a run: found or started, and what it has, in words."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from instep.errors import SpecError
from instep.launch.ray.private import draining, on_loopback, patient
from instep.words import plural

CONNECT_S = 5.0
"""How long a cluster may take to accept a connection, and to answer."""

ANSWER_S = 0.5
"""How long the raylet of a node may take."""

STORE_BYTES = 80 << 20
"""Of the object store of a cluster that is started for a run; nothing is put into it."""


def connect(address: str, cpus: int, working_dir: str = "") -> tuple[Any, bool]:
    """Ray, and whether it was connected to a cluster just now.

    Args:
        address: of the cluster; `local` starts one.
        cpus: at least so many cores that one has.
        working_dir: a folder of which each node is to get a copy.

    Raises:
        SpecError: Ray is not installed, or there is no cluster; or the folder cannot be copied.
    """
    try:
        import ray
        import ray.util.scheduling_strategies
    except ImportError:
        raise SpecError(
            "launch.on = 'ray' needs Ray, which is not installed: pip install 'instep[ray]'."
        ) from None
    if ray.is_initialized():
        if working_dir:
            raise SpecError(
                "launch.options.working_dir is given, and this program has connected to Ray "
                "before. Give it there: ray.init(runtime_env={'working_dir': ...})."
            )
        return ray, False
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if working_dir:
        quiet["runtime_env"] = {"working_dir": _folder(working_dir)}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")  # as without Ray; its own value is 15
        cores = max(cpus, os.cpu_count() or 1)
        own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
        try:
            _start_here(ray, num_cpus=cores, **own, **quiet)
        except Exception as error:  # Ray raises this very class where a node takes long
            raise SpecError(
                f"no Ray cluster could be started here: {last_line(error)}. Its files go to the "
                "folder RAY_TMPDIR, which needs a short name."
            ) from None
        return ray, True
    try:
        if address != "auto":
            host, _, port = address.rpartition(":")
            if not (host and port.isdecimal()):
                raise ValueError("there is no port")
            _check_speaks_grpc(host, int(port))
        ray.init(address, **quiet)
    except (OSError, ValueError, RuntimeError) as error:
        if working_dir and "package" in str(error).lower():
            raise SpecError(
                f"launch.options.working_dir = {working_dir!r}: {last_line(error)}. Leave data out "
                "of that folder."
            ) from None
        raise SpecError(
            f"no Ray cluster at {address!r}: {last_line(error)}. Give host:port of its head node, "
            "such as 10.0.0.1:6379; or leave RAY_ADDRESS and --ray-address out, to start one."
        ) from None
    return ray, True


def _start_here(ray: Any, **options: Any) -> None:
    """Start a cluster of this machine. On a busy one Ray gives up its own node after 30 s, a
    constant of its `node.py`: then what it has started is ended, and it is tried again."""
    for left in range(STARTS, 0, -1):
        before = set(psutil.Process().children())
        try:
            with on_loopback(ray), patient(ray):
                ray.init("local", **options)
            return
        except Exception as error:
            ray.shutdown()
            _end(set(psutil.Process().children()) - before, Path(ray.__file__).parent)
            if _SLOW not in str(error) or left == 1:
                raise
            print("warning Ray took too long to start its node; retrying.", file=sys.stderr)


def _end(processes: Iterable[psutil.Process], package: Path) -> None:
    """End what Ray leaves of a node that it has given up, and would work on beside the next.

    Its programs lie in its package; the caller may have started others meanwhile.
    """
    ended = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if any(word.startswith(f"{package}/") for word in process.cmdline()):
                process.kill()
                ended.append(process)
    psutil.wait_procs(ended, ANSWER_S)


STARTS = 10
"""How often a node that Ray gives up is started."""

_SLOW = "timed out during startup"


def _check_speaks_grpc(host: str, port: int) -> None:
    """Raise OSError where nothing listens, or something that cannot be Ray's: its own attempts
    would take minutes."""
    with socket.create_connection((host, port), CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS", "0") != "0":
            return
        connection.sendall(_HTTP_2)
        answer = connection.recv(len(_SETTINGS))
    if answer[3:4] != _SETTINGS[3:4]:
        raise OSError("what listens there is no head node of Ray")


_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_HTTP_2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS
"""How both ends of HTTP/2, and so of gRPC, begin: RFC 9113, section 3.4."""


def _folder(path: str) -> str:
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        raise SpecError(
            f"launch.options.working_dir = {path!r}: there is no such folder. Give one with the "
            "recipe's file in it."
        )
    return str(folder)


def nodes_with(ray: Any, resources: Mapping[str, float]) -> list[str]:
    """The nodes that have so much, in use or not, that stay, and whose raylet answers now.

    Ray may take a minute to notice that one is lost.
    """
    found, going = [], draining(ray)
    for node in ray.nodes():
        if node["NodeID"] in going:
            continue
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


def address_of(ray: Any, node: str) -> str:
    """By which Ray knows a node; empty if it does not."""
    found = (n["NodeManagerAddress"] for n in ray.nodes() if n["NodeID"] == node)
    return str(next(found, ""))


def no_room(ray: Any, hosts: int, each: Mapping[str, float], waited_s: float) -> SpecError:
    """For a cluster that has had no room for so many hosts with so much each."""
    nodes = [amounts(n["Resources"]) for n in ray.nodes() if n["Alive"]]
    return SpecError(
        f"the Ray cluster has had no room for {plural(hosts, 'host')} with {amounts(each)} each "
        f"for {waited_s:g} s. It has {plural(len(nodes), 'node')} ({'; '.join(nodes)}), and other "
        "programs may use some of it. Ask for less with launch.nodes, launch.cpus and "
        "launch.gpus, or set launch.options.wait_s."
    )


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
