"""Figures of a job on a machine, as probes measured them.

They are plain data: written to JSON and read again. Ways in: `JobFigures`, `CrewFigures`,
`visits_apart`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct


class PassTime(Struct, frozen=True):
    """A forward and backward pass of so many samples, in one process with all cores."""

    samples: int
    seconds: float


class BucketShare(Struct, frozen=True):
    """A bucket: its share of all bytes, and when in the backward pass it is full, 0 to 1."""

    share: float
    at: float


class JobFigures(Struct, frozen=True):
    """A job and its recipe, in one process."""

    global_batch: int
    micro_batches: int
    steps: int
    merged: bool
    """Whether a worker runs its micro-batches as one pass."""
    passes: list[PassTime]
    trained_bytes: int
    state_bytes: int = 0
    """Bytes that the optimizer keeps."""
    parameters: int = 0
    part_update_s: float = 0.0
    """Seconds of the optimizer's step."""

    def seconds_of(self, samples: float) -> float:
        """Seconds of a pass of so many samples, by a line through those that were measured."""
        fixed, each = self.line
        return fixed + each * samples

    @property
    def line(self) -> tuple[float, float]:
        """Seconds of a pass beside its samples, and for each sample; neither is negative."""
        points = [(float(each.samples), each.seconds) for each in self.passes]
        if len(points) < 2:
            samples, seconds = points[0] if points else (1.0, 0.0)
            return 0.0, seconds / samples
        mean_x = sum(x for x, _ in points) / len(points)
        mean_y = sum(y for _, y in points) / len(points)
        over = sum((x - mean_x) ** 2 for x, _ in points)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / over if over else 0.0
        slope = min(max(slope, 0.0), mean_y / mean_x)
        return max(0.0, mean_y - slope * mean_x), slope

    def seconds_of_share(self, micro_batches: float, *, batch: float = 1.0) -> float:
        """Seconds of so many micro-batches of a step, as a worker runs them.

        Args:
            micro_batches: of the step.
            batch: how many times as large the global batch is.
        """
        each = self.global_batch * batch / self.micro_batches
        if self.merged:
            return self.seconds_of(each * micro_batches)
        return micro_batches * self.seconds_of(each)


class CrewFigures(Struct, frozen=True):
    """Steps that processes of one machine took together; medians, seconds of a step."""

    workers: int
    strategy: str = "all_reduce"
    codec: str = "none"
    servers: int = 0
    passes_s: float = 0.0
    """Mean of the workers."""
    slowest_s: float = 0.0
    """The slowest of them."""
    last_s: float = 0.0
    """The last backward pass."""
    wire_s: float = 0.0
    """From the end of the slowest's passes to the end of the exchange."""
    update_s: float = 0.0
    whole_s: float = 0.0
    spread: float = 0.0
    """Half of what lies between the quartiles of steps, as a share of their median."""
    sent_bytes: float = 0.0
    """Bytes of a worker, in a step."""
    sent_by_server: float = 0.0
    buckets: list[BucketShare] = []
    small_s: float = 0.0
    """A sum of a few bytes over the group."""
    worker_bytes: int = 0
    """Most resident memory of a worker."""
    server_bytes: int = 0
    begun_bytes: int = 0
    """Resident memory of a worker at its beginning: what had been imported before the fork."""
    worker_held: int = 0
    """Resident memory of a worker between steps."""
    server_held: int = 0
    steps: int = 0
    visits: list[float] = []
    """Seconds of a step in each visit that counts."""
    others_busy: float = 0.0
    """Cores that other processes kept busy meanwhile."""
    hosts: int = 1
    """Emulated hosts that its processes were on."""
    bits_per_s: float = 0.0
    """Rate of the links of these hosts; 0: there were none."""
    mesh: str = ""
    """Axes of a replica of several processes; then what they send each other is in `passes_s`."""
    failed: str = ""
    """Why there are no figures."""

    @property
    def key(self) -> tuple[str, str, int, int, str]:
        """Tells it from other crews; `TrainingWay.key` is alike."""
        return self.strategy, self.codec, self.servers, self.workers, self.mesh


def visits_apart(crews: Sequence[CrewFigures]) -> tuple[float, int]:
    """How far visits of the same crew are apart: the standard deviation of the logarithm of a
    step's time, over all crews, and how many differences it is from."""
    squares, count = 0.0, 0
    for each in crews:
        logs = [math.log(seconds) for seconds in each.visits if seconds > 0]
        if len(logs) > 1 and not each.failed:
            mean = sum(logs) / len(logs)
            squares += sum((log - mean) ** 2 for log in logs)
            count += len(logs) - 1
    return (math.sqrt(squares / count) if count else 0.0), count


class ProbedMachine(Struct, frozen=True):
    """The machine, and how quiet it was."""

    cores: int
    seconds: float = 0.0
    """How long the probes took."""
    others_busy: float = 0.0
    """Cores that other processes kept busy meanwhile."""
    drift: float = 0.0
    """How much slower the reference kernel was at the median than at its best, as a share."""

    @property
    def is_busy(self) -> bool:
        """Whether other work makes the figures doubtful."""
        return self.others_busy > 0.25 * self.cores or self.drift > 0.3
