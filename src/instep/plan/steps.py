"""One commit as events: passes on cores, buckets on links and servers' lines, then the update.

Buckets leave in their real order, each as soon as its gradients are there. Ways in: `in_lockstep`,
`in_round`, `leased`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from instep.plan.machine import Machines
from instep.plan.timeline import Timeline

SEGMENT_BYTES = 1 << 17
"""Longest segment of a server's part (`sync/servers/cuts.py`)."""

SEGMENTS = 32
"""Segments of a bucket that are told apart: more change a step by less than a thirtieth."""


class StepParts(NamedTuple):
    """Seconds of a step, by what they are for; together they are the step."""

    passes: float = 0.0
    """Mean of the workers that compute."""
    waits: float = 0.0
    """From then until the slowest has computed."""
    wire: float = 0.0
    """From then until all is exchanged: the part of the exchange that no pass hides."""
    update: float = 0.0
    rest: float = 0.0
    """Ledger, records, and what else a step does."""

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(self)

    def times(self, factor: float) -> StepParts:
        """All parts, so many times as long."""
        return StepParts(*(factor * part for part in self))


class WorkerPass(NamedTuple):
    """The passes of one worker in a step."""

    seconds: float
    """Reading and all passes."""
    last_s: float
    """The last backward pass of these, in which buckets become full."""


class FullBucket(NamedTuple):
    """A bucket, as it goes on its way."""

    size: float
    """Bytes that each worker sends for it, as they are on the wire."""
    at: float
    """How much of the last backward pass is over when it is full, 0 to 1."""
    messages: float = 1.0
    """How often the bytes wait for a message to begin."""


class BucketExchange(NamedTuple):
    """How gradients are exchanged."""

    buckets: Sequence[FullBucket]
    """In the order in which they leave; the last one leaves after the passes."""
    software_s: float = 0.0
    """Seconds of software for each byte: encoding, copies, the system's network code."""
    fixed_s: float = 0.0
    """Seconds of the whole exchange beside its bytes; below 0, bursts pass links at once."""
    servers: int = 0
    """Parameter servers, which take the optimizer's step; 0: the workers sum in a ring."""
    server_update_s: float = 0.0
    """Seconds of the optimizer's step on all parameters, on one server."""
    encoded: bool = False
    """Whether segments are encoded: owners add them up, and only then send what all get."""
    stretch: float = 1.0
    """How many times as long as links allow by their rate: acknowledgements share them."""


def in_lockstep(
    machines: Machines,
    passes: Sequence[WorkerPass],
    exchange: BucketExchange,
    *,
    update_s: float = 0.0,
    rest_s: float = 0.0,
) -> StepParts:
    """Simulate a step that all workers take together.

    Args:
        machines: hosts and links.
        passes: of each worker; those without work, which take no time, wait for the others.
        exchange: what they exchange.
        update_s: of a worker, after the exchange.
        rest_s: what else a step takes.
    """
    computing = [each.seconds for each in passes if each.seconds > 0] or [0.0]
    mean, slowest = sum(computing) / len(computing), max(computing)
    wire = 0.0
    if len(passes) > 1 or exchange.servers:
        simulate = _in_two_phases if exchange.encoded else _in_a_ring
        simulate = _by_servers if exchange.servers else simulate
        late = max(0.0, simulate(machines, passes, exchange) - slowest)
        wire = max(0.0, exchange.stretch * late + exchange.fixed_s)
    return StepParts(mean, slowest - mean, wire, update_s, rest_s)


def in_round(
    machines: Machines,
    passes: Sequence[WorkerPass],
    exchange: BucketExchange,
    *,
    update_s: float = 0.0,
    rest_s: float = 0.0,
) -> StepParts:
    """Simulate a round: participants take their local steps, and only then all is exchanged.

    Args:
        machines, exchange, update_s, rest_s: as for `in_lockstep`.
        passes: of each worker, the local steps of all of its participants.
    """
    late = exchange._replace(buckets=[each._replace(at=1.0) for each in exchange.buckets])
    return in_lockstep(machines, passes, late, update_s=update_s, rest_s=rest_s)


def leased(
    machines: Machines,
    passes: Sequence[WorkerPass],
    size: float,
    units: int,
    exchange: BucketExchange,
    *,
    rest_s: float = 0.0,
) -> StepParts:
    """Simulate as many micro-batches as a step has, each of which a server commits by itself.

    Args:
        machines: hosts and links.
        passes: of each worker, one micro-batch.
        size: bytes of a push, and of the parameters that come back.
        units: micro-batches of a step.
        exchange: the servers, and what software costs.
        rest_s: for each micro-batch, on the server.
    """
    lines, workers, servers = Timeline(), len(passes), exchange.servers
    part = size / servers
    taken, free, ends = [0] * workers, [0.0] * workers, 0.0
    cost = max(machines.seconds_on_link(part), exchange.software_s * part)
    for unit in range(2 * units):  # the second half counts: in the first one lines fill up
        worker = unit % workers
        computed = free[worker] + passes[worker].seconds
        sent = max(_move(lines, machines, worker, server, computed, cost, workers, back=False)
                   for server in range(servers))  # fmt: skip
        own = exchange.server_update_s / servers + rest_s
        moved = max(lines.use([f"server {server}"], sent, own) for server in range(servers))
        free[worker] = max(
            _move(lines, machines, worker, server, moved, cost, workers, back=True)
            for server in range(servers)
        )
        taken[worker] += 1
        if unit == units - 1:
            ends = max(free)
    step = max(0.0, max(free) - ends)
    each = sum(one.seconds for one in passes) / workers * units / workers
    passes_s = min(step, each)
    return StepParts(passes_s, 0.0, step - passes_s)


def _in_a_ring(machines: Machines, passes: Sequence[WorkerPass], exchange: BucketExchange) -> float:
    """When the last bucket is summed everywhere."""
    lines, workers = Timeline(), len(passes)
    hosts = sorted({machines.host_of(worker) for worker in range(workers)})
    used = [f"{way} {host}" for host in hosts for way in ("out", "in")]
    across = len(hosts) > 1
    done = 0.0
    for number, bucket in enumerate(exchange.buckets):
        last = number == len(exchange.buckets) - 1
        ready = max(_full(each, 1.0 if last else bucket.at) for each in passes)
        on_link = machines.seconds_on_link(_leaving(bucket.size, workers, hosts)) if across else 0.0
        takes = max(on_link, bucket.size * exchange.software_s)
        takes += bucket.messages * machines.latency_s if across else 0.0
        done = lines.use(used, ready, takes)
    return done


def _in_two_phases(
    machines: Machines, passes: Sequence[WorkerPass], exchange: BucketExchange
) -> float:
    """When the last bucket is decoded everywhere: what is encoded cannot be added up on its way.

    Each owner decodes and adds up a bucket's segments when they are there, then sends their sum,
    and decodes those of the others. A core does this, in the order of the buckets.
    """
    lines, workers = Timeline(), len(passes)
    hosts = sorted({machines.host_of(worker) for worker in range(workers)})
    used = [f"{way} {host}" for host in hosts for way in ("out", "in")] if len(hosts) > 1 else []
    parts, arrived = list[tuple[float, float]](), list[float]()
    for number, bucket in enumerate(exchange.buckets):
        last = number == len(exchange.buckets) - 1
        ready = max(_full(each, 1.0 if last else bucket.at) for each in passes)
        on_link = 0.0
        if used:
            on_link = machines.seconds_on_link(_leaving(bucket.size, workers, hosts))
            on_link += bucket.messages * machines.latency_s
        parts.append((on_link / 2, bucket.size * exchange.software_s / 2))
        arrived.append(lines.use(used, ready, on_link / 2))
    gathered = list[float]()
    for (on_link, software), there in zip(parts, arrived, strict=True):
        summed = lines.use(["core"], there, software)
        gathered.append(lines.use(used, summed, on_link))
    ends = [lines.use(["core"], there, software)
            for (_, software), there in zip(parts, gathered, strict=True)]  # fmt: skip
    return max(ends, default=0.0)


def _leaving(size: float, workers: int, hosts: Sequence[int]) -> float:
    """Bytes over the link of a host: with several workers on it, their sums go once."""
    if len(hosts) >= workers or workers < 2:
        return size
    whole = size * workers / (2 * (workers - 1))
    return 2 * (len(hosts) - 1) / len(hosts) * whole


def _by_servers(
    machines: Machines, passes: Sequence[WorkerPass], exchange: BucketExchange
) -> float:
    """When the last worker has the last parameters."""
    lines, workers, servers = Timeline(), len(passes), exchange.servers
    *early, last = exchange.buckets  # which leaves after the passes
    buckets = [*early, last._replace(at=1.0)]
    segments = [each for bucket in buckets for each in _segments(bucket, servers)]
    whole = sum(segment.size for segment in segments) or 1.0
    ends = 0.0
    arrived: list[list[float]] = []
    for segment in segments:
        cost = _cost(machines, exchange, segment.size / servers)
        there = [0.0] * servers
        for worker, server in _in_turns(workers, servers):
            ready = _full(passes[worker], segment.at)
            pushed = _move(lines, machines, worker, server, ready, cost, workers, back=False)
            there[server] = max(there[server], pushed)
        arrived.append(there)
    for segment, there in zip(segments, arrived, strict=True):
        cost = _cost(machines, exchange, segment.size / servers)
        takes = exchange.server_update_s / servers * segment.size / whole
        moved = [lines.use([f"server {n}"], ready, takes) for n, ready in enumerate(there)]
        for worker, server in _in_turns(workers, servers):
            ready = moved[server]
            back = _move(lines, machines, worker, server, ready, cost, workers, back=True)
            ends = max(ends, back)
    return ends


def _segments(bucket: FullBucket, servers: int) -> list[FullBucket]:
    """Cut a bucket as servers do, each of which sends one segment back while others still come."""
    many = min(SEGMENTS, max(1, math.ceil(bucket.size / servers / SEGMENT_BYTES)))
    return [bucket._replace(size=bucket.size / many)] * many


def _cost(machines: Machines, exchange: BucketExchange, size: float) -> float:
    """Seconds of a message between a worker and a server."""
    return max(machines.seconds_on_link(size), exchange.software_s * size)


def _in_turns(workers: int, servers: int) -> Iterator[tuple[int, int]]:
    """All pairs of a worker and a server, so that neighbours begin with different servers."""
    for turn in range(servers):
        for worker in range(workers):
            yield worker, (worker + turn) % servers


def _move(
    lines: Timeline,
    machines: Machines,
    worker: int,
    server: int,
    ready: float,
    seconds: float,
    workers: int,
    *,
    back: bool,
) -> float:
    """When a message between a worker and a server is there; the server's line takes one at a time.

    Servers come after the workers in the order in which hosts are given processes.
    """
    mine, theirs = machines.host_of(worker), machines.host_of(workers + server)
    source, target = (theirs, mine) if back else (mine, theirs)
    line = f"server {server} {'sends' if back else 'gets'}"
    if source == target:
        return lines.use([line], ready, seconds if machines.link is None else 0.0)
    sent = lines.use([line, f"out {source}", f"in {target}"], ready, seconds)
    return sent + machines.latency_s


def _full(one: WorkerPass, at: float) -> float:
    """When a worker has all gradients of a bucket."""
    return one.seconds - one.last_s * (1 - at)
