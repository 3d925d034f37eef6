"""An actor on a Ray cluster, as the driver sees it: placed, asked, and ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from instep.comm.protocol.endpoint import Endpoint
from instep.errors import SpecError
from instep.launch.node import Needs
from instep.launch.ray.cluster import address_of, last_line, no_room
from instep.launch.ray.host import Host, Place, kill_if_stopped
from instep.launch.ray.private import spilling
from instep.store.folder import id_of

ANSWER_S = 1.0
"""How long an actor that is asked whether it lives may take."""


class Actor:
    """Has a host's fork server; takes its room at once, and gets there when it can.

    Args:
        ray: connected to a cluster.
        each: the resources that it asks for.
        node: where to start it, if there is room at once; empty: anywhere.
        needs: what its node needs.
    """

    def __init__(self, ray: Any, each: Mapping[str, float], node: str, needs: Needs) -> None:
        self._ray, self._node, self._needs, self.each = ray, node, needs, each
        others = {name: amount for name, amount in each.items() if name not in ("CPU", "GPU")}
        make = ray.remote(Host).options(
            num_cpus=each["CPU"],
            num_gpus=each["GPU"],
            resources=others,
            scheduling_strategy=spilling(self._strategies, node) if node else "SPREAD",
            max_restarts=0,
            max_concurrency=4,
        )
        self._handle = make.remote()
        self.placed = self._handle.place.remote(needs)
        """The reference of its `Place`."""
        self._looks: Any = None  # the last look whether it was stopped
        self.served: Any = None
        """That of what its fork server ends with; None before the first."""

    @property
    def _strategies(self) -> Any:
        return self._ray.util.scheduling_strategies

    @property
    def place(self) -> Place | None:
        """Where it is; None if it has not got there, or was lost before."""
        with suppress(self._ray.exceptions.RayError):
            place: Place = self._ray.get(self.placed, timeout=0)
            return place
        return None

    @property
    def node(self) -> str:
        """The node where it is or shall be, as far as is known."""
        return self.place.node if self.place is not None else self._node

    def answers(self) -> bool:
        """Whether it lives."""
        with suppress(self._ray.exceptions.RayError):
            self._ray.get(self._handle.place.remote(self._needs), timeout=ANSWER_S)
            return True
        return False

    def serve(self, endpoint: Endpoint, logs: Path) -> None:
        """Have it start a fork server."""
        run_id = id_of(logs.parent)
        self.served = self._handle.serve.remote(endpoint, logs, run_id, self._needs)

    def ended(self) -> int | str | None:
        """The exit code of its fork server, or why there is none; None while it runs."""
        if not self._ray.wait([self.served], timeout=0)[0]:
            return None
        try:
            found: int | str = self._ray.get(self.served)
        except self._ray.exceptions.RayActorError:
            return -signal.SIGKILL
        except self._ray.exceptions.RayError as error:
            return f"failed: {last_line(error)}"
        return found

    def end_if_stopped(self) -> None:
        """Have it or its fork server killed by another process of its node, if it was stopped.

        By one at a time: where a node is slow, or cut off, each would add to what it has to do.
        """
        looking = self._looks is not None and not self._ray.wait([self._looks], timeout=0)[0]
        if (place := self.place) is not None and not looking:
            task = self._ray.remote(kill_if_stopped)
            there = self._strategies.NodeAffinitySchedulingStrategy(place.node, soft=False)
            alone = task.options(num_cpus=0, max_retries=0, scheduling_strategy=there)
            self._looks = alone.remote(place)

    def ask_to_stop(self) -> list[Any]:
        """Have it end what it has started; a reference to wait for, if it is anywhere."""
        return [self._handle.stop.remote()] if self.place is not None else []

    def kill(self) -> None:
        """End it, and with it what it has started."""
        self._ray.kill(self._handle)


def wait_until_there(ray: Any, actors: Sequence[Actor], least: int, wait_s: float) -> None:
    """Wait until so many actors have said that nothing is missing; the others may come later.

    Raises:
        SpecError: a node lacks something, or the cluster has no room.
    """
    places = [actor.placed for actor in actors]
    ray.wait(places, num_returns=least, timeout=wait_s)
    there, _ = ray.wait(places, num_returns=len(places), timeout=0)
    for place in there:
        try:
            found: Place = ray.get(place)
        except ray.exceptions.RayError as error:
            raise SpecError(
                f"a node of the Ray cluster cannot start a host: {last_line(error)}. Install "
                "the same instep and torch on each node."
            ) from None
        if found.missing:
            hint = " Or give its folder to launch.options.working_dir." * (
                "recipe" in found.missing
            )
            raise SpecError(f"the node {address_of(ray, found.node)} {found.missing}{hint}")
    if len(there) < least:
        raise no_room(ray, least, actors[0].each, wait_s)
