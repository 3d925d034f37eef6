"""A Ray cluster: a fork server on each node that the run uses, started by an actor there.

Ray places the actors, and says when one has ended. It gets nothing else of a run: tensors and
messages do not pass through it. The standard input of a fork server ends with its actor, so
nothing is left on a node once the driver, the actor or the node's raylet is killed.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from instep.comm.endpoint import Endpoint
from instep.errors import SpecError
from instep.launch.base import options_of
from instep.launch.local import TIMEOUT_S
from instep.launch.node import Needs, id_of
from instep.launch.ray_actor import Host, Place, kill_if_stopped
from instep.launch.ray_cluster import amounts, connect, last_line
from instep.spec import JobSpec, LaunchSpec, Section
from instep.store.folder import host_log
from instep.words import plural

ANSWER_S = 1.0
"""How long an actor whose fork server has ended may take to answer, before another replaces it."""


class Options(Section, frozen=True, kw_only=True):
    """`launch.options` of `ray`."""

    ray_address: str = ""
    """`host:port` of a cluster; empty: `RAY_ADDRESS`, and without that one started for the run."""

    resources: dict[str, float] = field(default_factory=dict)
    """Custom resources that a host asks for."""

    wait_s: Annotated[float, Meta(gt=0)] = 10.0
    """How long to wait until the cluster has room for all hosts."""


@dataclass
class _Actor:
    handle: Any
    place: Any
    """The reference of its `Place`."""
    served: Any = None
    """That of what its fork server ends with."""
    logs: Path = Path()
    code: int | None = None


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
        self._actors: dict[int, _Actor] = {}
        address = options.ray_address or os.environ.get("RAY_ADDRESS", "local")
        each = launch.cpus or -(-job.workers // (launch.nodes or 1))
        self._ray, self._connected = connect(address, each * (launch.nodes or 1))
        nodes = [node for node in self._ray.nodes() if node["Alive"]]
        with_cores = [node for node in nodes if node["Resources"].get("CPU", 0) >= 1]
        self.count = launch.nodes or max(1, min(len(with_cores), job.workers))
        self._asked: dict[str, Any] = {
            "num_cpus": launch.cpus or -(-job.workers // self.count),
            "num_gpus": launch.gpus,
            "resources": options.resources,
        }

    @classmethod
    def of(cls, job: JobSpec) -> RayLauncher:
        """Connect to a cluster, or start one, and get room there for all hosts."""
        options = options_of(job.launch, Options)
        if job.launch.hosts:
            raise SpecError("launch.hosts with launch.on = 'ray': Ray has the hosts. Give nodes.")
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
        address = launch.address or self._address(here)
        return msgspec.structs.replace(launch, nodes=self.count, address=address)

    def _address(self, node: str) -> str:
        found = (n["NodeManagerAddress"] for n in self._ray.nodes() if n["NodeID"] == node)
        return str(next(found, ""))

    def _gather(self) -> None:
        """Make the actors, and wait until each has said that nothing is missing."""
        self._actors = {number: self._actor() for number in range(self.count)}
        places = [actor.place for actor in self._actors.values()]
        there, late = self._ray.wait(places, num_returns=self.count, timeout=self._options.wait_s)
        for place in there:
            try:
                found: Place = self._ray.get(place)
            except self._ray.exceptions.RayError as error:
                raise SpecError(
                    f"a node of the Ray cluster cannot start a host: {last_line(error)}. Install "
                    "the same instep and torch on each node."
                ) from None
            if found.missing:
                raise SpecError(f"the node {self._address(found.node)} {found.missing}")
        if late:
            asked = {"CPU": self._asked["num_cpus"], "GPU": self._asked["num_gpus"]}
            each = amounts({**asked, **self._options.resources})
            nodes = [amounts(n["Resources"]) for n in self._ray.nodes() if n["Alive"]]
            raise SpecError(
                f"the Ray cluster has had no room for {plural(self.count, 'host')} with {each} "
                f"each for {self._options.wait_s:g} s. It has {plural(len(nodes), 'node')} "
                f"({'; '.join(nodes)}), and other programs may use some of it. Ask for less with "
                "launch.nodes, launch.cpus and launch.gpus, or set launch.options.wait_s."
            )

    def _actor(self) -> _Actor:
        options = {"scheduling_strategy": "SPREAD", "max_restarts": 0, "max_concurrency": 4}
        handle = self._ray.remote(Host).options(**self._asked, **options).remote()
        return _Actor(handle, handle.place.remote(self._needs))

    def start(self, endpoint: Endpoint, logs: Path) -> None:
        """Have the actor of a host start a fork server; another actor, if that one is lost."""
        actor = self._actors[endpoint.host]
        if actor.served is not None and not self._answers(actor):
            self._ray.kill(actor.handle)
            actor = self._actors[endpoint.host] = self._actor()
        actor.code, actor.logs = None, logs
        actor.served = actor.handle.serve.remote(endpoint, logs, id_of(logs.parent), self._needs)

    def ended(self, host: int = 0) -> int | None:
        """The exit code of the fork server, or None while it runs; killed, if its actor is lost."""
        actor = self._actors[host]
        if actor.code is None and self._ray.wait([actor.served], timeout=0)[0]:
            try:
                found = self._ray.get(actor.served)
            except self._ray.exceptions.RayActorError:
                found = -signal.SIGKILL
            except self._ray.exceptions.RayError as error:
                found = f"failed: {last_line(error)}"
            if isinstance(found, str):
                with suppress(OSError), open(host_log(actor.logs, host), "a") as log:
                    log.write(f"the node of host {host} {found}\n")
                found = SpecError.exit_code
            actor.code = found
        return actor.code

    def _answers(self, actor: _Actor) -> bool:
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(actor.handle.place.remote(self._needs), timeout=ANSWER_S)
            return True
        return False

    def _place(self, actor: _Actor) -> Place | None:
        """Where an actor is; None while it is nowhere, or if it has not got there."""
        with suppress(self._ray.exceptions.RayError):
            place: Place = self._ray.get(actor.place, timeout=0)
            return place
        return None

    def end_if_stopped(self, host: int = 0) -> None:
        """Have the actor or its fork server killed by another process of its node."""
        strategies = self._ray.util.scheduling_strategies
        if (place := self._place(self._actors[host])) is not None:
            there = strategies.NodeAffinitySchedulingStrategy(place.node, soft=False)
            task = self._ray.remote(kill_if_stopped)
            task.options(num_cpus=0, max_retries=0, scheduling_strategy=there).remote(place)

    def stop(self) -> None:
        """End all actors with what they started; and the cluster, if it was started here."""
        if not self._ray.is_initialized():
            return
        actors, self._actors = list(self._actors.values()), {}
        places = [place for actor in actors if (place := self._place(actor)) is not None]
        ends = [actor.handle.stop.remote() for actor in actors if self._place(actor) is not None]
        if ends:
            self._ray.wait(ends, num_returns=len(ends), timeout=2 * TIMEOUT_S)
        for actor in actors:
            self._ray.kill(actor.handle)
        deadline = time.monotonic() + TIMEOUT_S
        while any(place.is_there for place in places) and time.monotonic() < deadline:
            time.sleep(0.01)
        if self._connected:
            self._ray.shutdown()
