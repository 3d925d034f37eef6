"""The processes that predict, as their master sees them: replicas of one process, or of several.

The processes of a replica share its model and compute a turn together: each the batch at its
place. So it works only while all of them are there, and if one is lost, all start again. What the
master does about that is in `master.py`.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from dataclasses import dataclass

from instep.client.predict.batches import START
from instep.comm.protocol.hub import Peer
from instep.comm.protocol.messages import READING
from instep.job.mesh import MeshSpec
from instep.system.lease import Lease
from instep.system.limits import FLOOR_S
from instep.system.processes import Watched

REPORT_S = 0.5
"""How long the fork server may take to report the end of a worker."""


@dataclass(eq=False)
class PredictProcess:
    """A process that predicts."""

    number: int
    peer: Peer
    system: Watched
    lease: Lease
    marks: int
    """How many changes of the marks of samples it knows."""
    since: float
    """When it made progress last."""
    ready: bool = False
    handled: int = 0
    """Messages of its that were handled."""
    at: tuple[str, int] = ("", -1)
    """Phase and progress of its last heartbeat."""
    killed: str = ""
    """Why it was killed from here."""
    hung: bool = False
    """Whether it was killed because it got nothing done."""
    to_blame: bool = True
    """False if it was killed only because another of its replica was lost."""
    closed_at: float = math.inf
    """When its connection closed."""
    ended_at: float | None = None
    """When it was seen to have ended."""

    def watch(self, now: float) -> bool:
        """End it if it is silent; returns whether it has ended, and nobody reports that."""
        if self.system.ended:
            self.ended_at = self.ended_at or now
            return now - self.ended_at > REPORT_S
        if not self.killed:
            how = self.lease.turn(now)
            if now - self.closed_at > FLOOR_S:
                how = "it hung up"
            if how:
                self.kill(how)
        return False

    def kill(self, why: str, *, to_blame: bool = True) -> None:
        """End it by SIGKILL."""
        self.killed, self.to_blame = why, to_blame
        self.system.signal(signal.SIGKILL)


class PredictReplica:
    """The processes that share one model.

    Args:
        number: among the replicas.
        mesh: its axes.
    """

    def __init__(self, number: int, mesh: MeshSpec) -> None:
        self.number, self._mesh = number, mesh
        self.numbers = mesh.replica(number)
        """Of its processes."""
        self.restarts = 0
        """How often it was started again; processes of different starts never meet."""
        self.processes: dict[int, PredictProcess] = {}
        self.turns: deque[list[int]] = deque()
        """Batches that it was given: each turn as long as one of its batches has no part."""
        self._left: set[int] = set()

    @property
    def ready(self) -> bool:
        """Whether all of its processes can predict."""
        there = self.processes.values()
        return len(there) == len(self.numbers) and all(p.ready and not p.killed for p in there)

    @property
    def marks(self) -> int:
        """How many changes of the marks of samples all of its processes know."""
        return min(process.marks for process in self.processes.values())

    @property
    def since(self) -> float:
        """When one of its processes made progress last: in a pass they wait for each other."""
        return max(process.since for process in self.processes.values())

    def give(self, turns: list[list[int]]) -> None:
        """It has got turns, after those that it has."""
        self.turns += turns
        self._left.update(*turns)

    def finish(self, batch: int) -> None:
        """A batch has its part."""
        self._left.discard(batch)
        while self.turns and self._left.isdisjoint(self.turns[0]):
            self.turns.popleft()

    def drop(self) -> list[int]:
        """Forget its turns; returns the batches that have no part."""
        left = sorted(self._left)
        self.turns.clear()
        self._left.clear()
        return left

    def batch_of(self, process: PredictProcess) -> int:
        """The batch that one of its processes is at; `START` before it has one."""
        if not process.ready or not self.turns:
            return START
        place = self._mesh.coordinate(process.number).shard
        own = (turn[place % len(turn)] for turn in self.turns)
        return next((batch for batch in own if batch in self._left), self.turns[0][0])

    def slowest(self) -> PredictProcess | None:
        """The process that all wait for, if they have something to do.

        That is one that reads: the others are past that, or wait for it in the pass.
        """
        processes = self.processes.values()
        if any(process.killed for process in processes):
            return None
        if self.ready and not self.turns:
            return None
        reads = [process for process in processes if process.at[0] == READING]
        others = processes if self.ready else ()  # one that builds may take any time
        return min(reads or others, key=lambda process: process.since, default=None)
