"""Ways of training a job: how many workers, which strategy, which codec.

A way is what `--workers` and `--set` say. What a job cannot have is refused elsewhere. Ways in:
`TrainingWay`, `counts`.
"""

from __future__ import annotations

from typing import NamedTuple

from instep.job.sync.tables import STRATEGY_ROWS, UNKNOWN


class TrainingWay(NamedTuple):
    """One candidate."""

    workers: int
    strategy: str = "all_reduce"
    codec: str = "none"
    servers: int = 0
    same: bool = True
    """Whether its result is that of one machine."""
    changes: tuple[str, ...] = ()
    """Changes of the job beside the workers, as `--set` takes them."""
    local_steps: int = 0
    """Steps of a participant in a round; 0 for a strategy without rounds."""
    participants: int = 0
    samples: int = 0
    """Samples of one commit; 0: those of a step of the job."""
    mesh: tuple[tuple[str, int], ...] = ()
    """Axes of a replica with several processes, and how many each has; empty: it has one."""

    @property
    def name(self) -> str:
        """How a table calls it."""
        if self.workers == 1 and not self.servers and self.codec == "none" and self.same:
            return "1 worker"
        text = f"{self.workers} {self.strategy}"
        if self.servers:
            text += f", {self.servers} server{'s' if self.servers > 1 else ''}"
        if self.mesh:
            text += f", {self.axes}"
        return text + (f", {self.codec}" if self.codec != "none" else "")

    @property
    def axes(self) -> str:
        """The mesh, as text."""
        return ", ".join(f"{axis} = {size}" for axis, size in self.mesh)

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """Tells it from ways whose steps are others; `CrewFigures.key` is alike."""
        return self.strategy, self.codec, self.servers, self.workers, self.axes

    @property
    def leased(self) -> bool:
        """Whether no step waits for all workers."""
        return STRATEGY_ROWS.get(self.strategy, UNKNOWN).leased

    @property
    def is_plain(self) -> bool:
        """Whether nothing has to be exchanged."""
        return self.workers == 1 and not self.servers

    @property
    def processes(self) -> int:
        """Workers and servers."""
        return self.workers + self.servers


def counts(most: int, hosts: int = 1) -> list[int]:
    """Numbers of workers to look at: 1, 2, 4, 8 ..., the hosts, and the most.

    Args:
        most: workers.
        hosts: machines.
    """
    found = {1, most}
    step = 2
    while step < most:
        found.add(step)
        step *= 2
    return sorted(found | {hosts} if hosts <= most else found)
