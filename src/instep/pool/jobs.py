"""Jobs of a pool and the events that change them: plain data, no files, clocks or processes."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

RUN, COMMAND, SEARCH = "run", "command", "search"
"""Kinds of jobs."""

WAITING, RUNNING, STOPPING, ENDED = "waiting", "running", "stopping", "ended"


class HostSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host in the file of a pool."""

    cores: int
    """Worker processes that there is room for."""
    memory: str = ""
    """Sum of all its workers, such as `"64GB"`; empty: nobody counts it."""
    start: str = ""
    """Command that runs another command there, such as `"ssh node2"`, with which the scheduler
    starts `instep host`; empty: somebody else does."""
    idle: str = ""
    """A duration, such as `"5m"`: the host is started once jobs wait for it, and given back when
    nothing has run there for so long. Empty: it is always there."""


class PoolSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file of a pool, `pool.toml`."""

    cores: int = 0
    """Worker processes that there is room for; 0: the cores of this machine."""
    runs: str = "runs"
    """Folder of run folders, relative to the file."""
    shares: dict[str, float] = {}
    """Weights; a share that is not named has 1."""
    limits: dict[str, ShareLimits] = {}
    listen: str = ""
    """Where hosts join the pool: an address of this machine that they reach, and a port."""
    hosts: dict[str, HostSpec] = {}
    """By name; none: this machine has all places."""


class ShareLimits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Bounds of one share."""

    workers: int
    """Most at once."""


class ResultTest(msgspec.Struct, frozen=True):
    """A figure of a job's result, compared with a number."""

    job: str
    figure: str
    """Its name, such as `metrics.accuracy`."""
    sign: str
    value: float


class FlowNeeds(msgspec.Struct, frozen=True):
    """The jobs that a job of a flow comes after, and what it needs of them."""

    jobs: tuple[str, ...]
    outcome: str
    """One of those in `flows.py`."""
    tests: tuple[ResultTest, ...] = ()


class PoolJob(msgspec.Struct, frozen=True, kw_only=True):
    """One job of a pool."""

    id: str
    """Also the name of its run."""
    share: str
    at_least: int
    """Workers without which it does not run: they start together, or none."""
    at_most: int
    unit: int = 1
    """Workers are a multiple of it."""
    memory: int = 0
    """Bytes of a worker on a host; 0: nobody counts them."""
    priority: int = 0
    submitted: float = 0.0
    """Unix seconds, as all times here."""
    key: str = ""
    kind: str = RUN
    command: tuple[str, ...] = ()
    """Words of a command."""
    folder: str = ""
    """In which a command runs."""
    flow: str = ""
    """The flow that it is part of."""
    needs: FlowNeeds | None = None
    saves: str = ""
    """Between its checkpoints, where the pool has chosen that."""
    attempt: int = 1
    """Counts how often somebody has asked for it to run."""
    status: str = WAITING
    target: int = 0
    """Workers that it is to have."""
    held: int = 0
    """Cores that it has: those of processes that have not ended count."""
    places: Mapping[str, int] = {}
    """Workers that it is to have on each host of the pool."""
    told: Mapping[str, int] = {}
    """Those that its run has been told of last, and may start."""
    reach: int = 0
    """Its run knows the first so many hosts."""
    local: bool = False
    """Whether all its processes are on the scheduler's machine: those of a search, a mesh, a
    command."""
    seen_here: int = 0
    """Processes of a local job that have not ended, on a pool with hosts."""
    cancelled: bool = False
    fixed: bool = False
    """Whether its run refuses to be resized."""
    began: float | None = None
    changed: float = 0.0
    """When its target last changed."""
    left_s: float | None = None
    """Seconds of one worker that it still needs, as far as they are known."""
    seen: float = 0.0
    """When that was so, if it runs."""
    paces: tuple[tuple[int, float], ...] = ()
    """Seconds of a step with so many workers, as they were measured."""
    doubts: tuple[tuple[int, float, int], ...] = ()
    """Workers that were no faster than fewer, when that was measured last, and how often."""
    like: str = ""
    """Jobs with the same need the same time."""
    head_s: float | None = None
    """Seconds from its start to its first step."""
    tail_s: float | None = None
    """Seconds from its last step to its end."""
    step: int = 0
    steps: int | None = None
    in_vain: int = 0
    """Ends of its client in a row without another step."""
    outcome: str = ""
    why: str = ""
    ended: float | None = None
    results: Mapping[str, float] = {}
    """Figures of a job of a flow, once it has ended."""

    @property
    def succeeded(self) -> bool:
        """Whether it has ended as it should: by its length or by a rule of its own."""
        return self.outcome in ("completed", "stopped")

    @property
    def open(self) -> bool:
        """Whether it is to run, now or later."""
        return self.status != ENDED and not self.cancelled


class PoolHost(msgspec.Struct, frozen=True, kw_only=True):
    """A host of a pool."""

    cores: int
    memory: int = 0
    """Bytes; 0: nobody counts them."""
    local: bool = False
    """Whether it is the machine of the scheduler."""
    drained: bool = False
    """Whether nothing is to run there."""
    leaving: bool = False
    """Whether it has said that it will soon be gone, or is given back."""
    on_demand: bool = False
    """Whether it is started only for jobs that wait."""
    away: float | None = None
    """Since when it is out of reach."""
    workers: Mapping[str, int] = {}
    """Processes of each job that have not ended, as it said last."""

    @property
    def closed(self) -> bool:
        """Whether nothing is to run there any more."""
        return self.drained or self.leaving


class PoolState(msgspec.Struct, frozen=True, kw_only=True):
    """All jobs of a pool, and what each share has used."""

    cores: int
    weights: Mapping[str, float] = {}
    limits: Mapping[str, int] = {}
    """Most workers of a share."""
    jobs: Mapping[str, PoolJob] = {}
    hosts: Mapping[str, PoolHost] = {}
    """By name, in the order of their numbers; none: all is on this machine."""
    used: Mapping[str, float] = {}
    """Core seconds of each share, of which half are forgotten in a day."""
    at: float = 0.0
    """When `used` was counted."""

    @property
    def held(self) -> int:
        """Cores that jobs have."""
        return sum(each.held for each in self.jobs.values())

    def weight(self, share: str) -> float:
        """The weight of a share."""
        return self.weights.get(share, 1.0)


class JobSubmitted(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants a job to run."""

    job: PoolJob


class FlowSubmitted(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants the jobs of a flow to run, each once its needs are met."""

    flow: str
    jobs: tuple[PoolJob, ...]


class AgainAsked(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants jobs that have ended without success to run once more."""

    ids: tuple[str, ...]


class CancelAsked(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants a job to stop for good."""

    id: str


class RunSeen(msgspec.Struct, frozen=True, tag=True):
    """A job's run was looked at, and its client lives."""

    id: str
    workers: int
    """Processes that have not ended."""
    step: int = 0
    steps: int | None = None
    left_s: float | None = None
    lost: tuple[str, ...] = ()
    """Hosts of the pool that the run does not have."""
    begun: bool = True
    """Whether its workers have begun to train."""
    pace: tuple[int, float] | None = None
    """Seconds of a step with so many workers."""
    first: float | None = None
    """When its first step began."""


class ResizeRefused(msgspec.Struct, frozen=True, tag=True):
    """A run cannot have another number of workers."""

    id: str
    workers: int


class ClientEnded(msgspec.Struct, frozen=True, tag=True):
    """A job's client has ended, and so have its workers."""

    id: str
    outcome: str
    """The outcome of the run; empty if it is not over."""
    why: str = ""
    step: int = 0
    results: Mapping[str, float] = {}
    last: float | None = None
    """When its last step began, if it has completed."""
    pace: tuple[int, float] | None = None
    """Seconds of a step with so many workers."""


class HostSeen(msgspec.Struct, frozen=True, tag=True):
    """A host is in reach, and has these processes of workers."""

    host: str
    workers: Mapping[str, int]
    leaving: bool = False
    """Whether it will soon be gone, or is given back."""


class HostAway(msgspec.Struct, frozen=True, tag=True):
    """A host is out of reach. Whatever it had, it may still have."""

    host: str


class DrainAsked(msgspec.Struct, frozen=True, tag=True):
    """Somebody wants nothing to run on a host, or again something."""

    host: str
    drained: bool = True


class PlacesTold(msgspec.Struct, frozen=True, tag=True):
    """A run knows how many workers it may have on each host."""

    id: str
    places: Mapping[str, int]


class TimePassed(msgspec.Struct, frozen=True, tag=True):
    """Nothing happened: use is counted, and what was put off is looked at again."""


PoolEvent = (
    JobSubmitted
    | FlowSubmitted
    | AgainAsked
    | CancelAsked
    | RunSeen
    | ResizeRefused
    | ClientEnded
    | HostSeen
    | HostAway
    | DrainAsked
    | PlacesTold
    | TimePassed
)
