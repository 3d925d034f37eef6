"""A Ray cluster: a fork server on each node that the run uses, started by an actor there.

Ray places the actors, and says when one has ended. It gets nothing else of a run: tensors and
messages do not pass through it. The standard input of a fork server ends with its actor, so
nothing is left on a node once the driver, the actor or the node's raylet is killed.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, field

from instep.comm.protocol.endpoint import Endpoint
from instep.errors import SpecError
from instep.job.base import Natural, Section
from instep.job.launch import LaunchSpec
from instep.job.spec import JobSpec
from instep.launch.base import check_no_hosts, options_of
from instep.launch.local import TIMEOUT_S
from instep.launch.node import Needs
from instep.launch.ray.actor import Actor, wait_until_there
from instep.launch.ray.cluster import address_of, connect, nodes_with
from instep.launch.ray.private import Drains
from instep.store.folder import host_log


class Options(Section, frozen=True, kw_only=True):
    """`launch.options` of `ray`."""

    ray_address: str = ""
    """`host:port` of a cluster; empty: `RAY_ADDRESS`, and without that one started for the run."""

    working_dir: str = ""
    """A folder of which Ray brings a copy to each node, for a recipe that is in no shared one."""

    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources that a host asks for."""

    wait_s: Annotated[float, Meta(gt=0)] = 60.0
    """How long to wait until all hosts, or `at_least`, are there: until the cluster has room for
    them, and has started Python there, which takes a busy node many seconds."""

    at_least: Natural = 0
    """With how many hosts to begin; the others join when the cluster has room. 0: with all."""


class RayLauncher:
    """Has an actor for each host.

    Args:
        job: what to run.
        options: its `launch.options`.

    Raises:
        SpecError: there is no such cluster.
    """

    def __init__(self, job: JobSpec, options: Options) -> None:
        launch, self._options, self._needs = job.launch, options, Needs.of(job)
        self._actors: dict[int, Actor] = {}
        self._codes: dict[int, int] = {}
        self._logs = Path()
        address = options.ray_address or os.environ.get("RAY_ADDRESS") or "local"
        each = launch.cpus or -(-job.workers // (launch.nodes or 1))
        self._ray, self._connected = connect(
            address, each * (launch.nodes or 1), options.working_dir
        )
        self._drains = Drains(self._ray)
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        with_cores = [node for node in nodes if node["Resources"].get("CPU", 0) >= 1]
        self.count = launch.nodes or max(1, min(len(with_cores), job.workers))
        cpus = launch.cpus or -(-job.workers // self.count)
        self._each = {"CPU": cpus, "GPU": launch.gpus, **options.resources}

    @classmethod
    def of(cls, job: JobSpec) -> RayLauncher:
        """Connect to a cluster, or start one, and get room there for all hosts."""
        options = options_of(job.launch, Options)
        check_no_hosts(job.launch, "Ray")
        launcher = cls(job, options)
        try:
            launcher._gather()
        except BaseException:
            launcher.stop()
            raise
        return launcher

    def settled(self, launch: LaunchSpec) -> LaunchSpec:
        """With the number of actors, and the address by which Ray knows this machine."""
        here = self._ray.get_runtime_context().get_node_id()
        address = launch.address or address_of(self._ray, here)
        return msgspec.structs.replace(launch, nodes=self.count, address=address)

    def _gather(self) -> None:
        """Make the actors, and wait until each has said that nothing is missing."""
        for number in range(self.count):
            self._actors[number] = self._actor()
        least = min(self._options.at_least or self.count, self.count)
        wait_until_there(self._ray, list(self._actors.values()), least, self._options.wait_s)

    def _actor(self) -> Actor:
        """On the node that has the fewest, if it can be there at once."""
        used = Counter(actor.node for actor in self._actors.values())
        nodes = nodes_with(self._ray, self._each)
        node = min(nodes, key=lambda each: used[each], default="")
        return Actor(self._ray, self._each, node, self._needs)

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Have the actor of a host start a fork server; another actor, if that one is lost."""
        number = endpoint.host
        before = self._actors.get(number)
        if before is None or (before.served is not None and not before.answers()):
            if before is not None:
                before.kill()
            self._actors[number] = self._actor()
        self._codes.pop(number, None)
        self._logs = logs
        self._actors[number].serve(endpoint, logs)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the fork server, or None while it runs; killed, if its actor is lost."""
        if host not in self._codes and (found := self._actors[host].ended()) is not None:
            if isinstance(found, str):
                with suppress(OSError), open(host_log(self._logs, host), "a") as log:
                    log.write(f"the node of host {host} {found}\n")
                found = SpecError.exit_code
            self._codes[host] = found
        return self._codes.get(host)

    def end_if_stopped(self, host: int = 0) -> None:
        """Have the actor or its fork server killed by another process of its node."""
        self._actors[host].end_if_stopped()

    def leaving(self) -> list[int]:
        """Hosts on nodes that Ray drains."""
        going = self._drains.nodes
        places = {n: actor.place for n, actor in self._actors.items()} if going else {}
        return [n for n, place in places.items() if place is not None and place.node in going]

    def give_back(self, host: int) -> None:
        """End its actor, and with it its fork server; again, if that one's spare was faster."""
        if (actor := self._actors.pop(host, None)) is not None:
            actor.kill()
        self._codes[host] = -signal.SIGKILL

    def stop(self) -> None:
        """End all actors with what they started; and the cluster, if it was started here."""
        self._drains.close()
        if not self._ray.is_initialized():
            return
        actors, self._actors = list(self._actors.values()), {}
        places = [actor.place for actor in actors]
        ends = [end for actor in actors for end in actor.ask_to_stop()]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=2 * TIMEOUT_S)
        for actor in actors:
            actor.kill()
        deadline = time.monotonic() + TIMEOUT_S
        while any(p is not None and p.is_there for p in places) and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._connected:
            self._ray.shutdown()
