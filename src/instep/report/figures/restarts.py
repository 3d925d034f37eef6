"""From where each replica that was started again continued, from the events of a run.

A replica of several processes that loses one restarts whole, and its state comes from one of three
places. Way in: `restarts`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from instep.units import readable_count

SOURCES = {
    "other_replicas": "the state that other replicas hold",
    "host_memory": "memory of its host",
    "checkpoint": "a checkpoint",
}
"""Where the state may come from, by name."""


class Restart(NamedTuple):
    """A replica that was started again, and has formed a group again."""

    replica: int
    lost: list[int]
    """Workers that were lost, oldest first; the others of the replica were ended."""
    time: float
    """When the first of them was lost, Unix seconds."""
    source: str = "other_replicas"
    """A key of `SOURCES`."""
    step: int | None = None
    """From which it continued; None where other replicas hold the state. Without any checkpoint
    that is 0."""

    def words(self) -> str:
        """From where it continued."""
        if self.step is None:
            return SOURCES[self.source]
        step = readable_count(self.step)
        if self.source == "host_memory":
            return f"{SOURCES[self.source]}, which had step {step}"
        return f"the checkpoint of step {step}" if self.step else "the beginning"


def restarts(events: Iterable[dict[str, Any]], ranks: int) -> list[Restart]:
    """Each restart of a replica, oldest first; of one that has not come back nothing is told.

    Args:
        events: of a run, oldest first.
        ranks: processes of a replica; none is told of where it is one.
    """
    found: list[Restart] = []
    begun: dict[int, Restart] = {}
    first = 0  # the step that a session began with
    for event in events if ranks > 1 else ():
        what = event["event"]
        if what == "run_started":
            begun, first = {}, event.get("resumed_step", 0)
        elif what == "worker_lost":
            replica = event["worker"] // ranks
            begun.setdefault(replica, Restart(replica, [], event["time"]))
            begun[replica].lost.append(event["worker"])
        elif what == "taken_from_host" and event["replica"] in begun:
            taken = begun[event["replica"]]._replace(source="host_memory", step=event["step"])
            begun[event["replica"]] = taken
        elif what == "went_back":
            begun = {n: _from_disk(each, event["resumed_step"]) for n, each in begun.items()}
        elif what == "generation_started":
            members = {n // ranks for n in event["members"] if isinstance(n, int)}
            alone = not members - begun.keys()
            for each in (begun.pop(n) for n in sorted(members & begun.keys())):
                found.append(_from_disk(each, first) if alone and each.step is None else each)
    return found


def _from_disk(one: Restart, step: int) -> Restart:
    return one._replace(source="checkpoint", step=step)
