"""One way's price: measured crews and passes, brought to the hosts and links that are asked for.

A crew that took steps of this very way on this machine is taken as it is; what a link adds is
simulated. Another number of workers, or hosts with cores of their own, is scaled by the passes that
were measured, and its interval is wider. Ways in: `Measurements`, `price`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from instep.plan import steps
from instep.plan.intervals import is_seen, width
from instep.plan.machine import ACKNOWLEDGED, BURST_S, HostLink, Machines
from instep.plan.measured import CrewFigures, JobFigures, ProbedMachine
from instep.plan.memory import worker_bytes
from instep.plan.steps import BucketExchange, FullBucket, StepParts, WorkerPass
from instep.plan.traffic import CODED, EXCHANGES, RING, rescaled, sent_by_server
from instep.plan.ways import TrainingWay


class Measurements(NamedTuple):
    """All that was measured."""

    job: JobFigures
    crews: Sequence[CrewFigures]
    probed: ProbedMachine
    learned: float = 1.0
    """How many times as long steps of earlier runs were as was planned."""
    batch: float = 1.0
    """How many times as large the global batch is."""

    def in_place_of(self, crews: Sequence[CrewFigures]) -> Measurements:
        """Put crews in place of those of the same ways."""
        keys = {each.key for each in crews}
        return self._replace(crews=[*(e for e in self.crews if e.key not in keys), *crews])

    def crew(self, way: TrainingWay, workers: int) -> CrewFigures | None:
        """The crew of a strategy with so many workers, or with the nearest number above 1."""
        exchange = EXCHANGES.get(way.strategy, way.strategy)
        alike = [
            each
            for each in self.crews
            if not each.failed
            and not each.mesh
            and each.strategy == exchange
            and each.codec in (way.codec, "none")
            and (each.workers > 1 or way.servers or workers == 1)
        ]
        coded = [each for each in alike if each.codec == way.codec]
        alike = coded or alike
        return min(
            alike,
            key=lambda each: (
                abs(math.log(each.workers / workers)),
                abs(each.servers - way.servers),
            ),
            default=None,
        )

    def computing(self, beside: int) -> CrewFigures | None:
        """The crew whose processes had as much of the cores as so many on a host."""
        plain = [
            each
            for each in self.crews
            if not (each.failed or each.mesh) and each.codec == "none" and each.strategy in RING
        ]
        return min(plain, key=lambda each: abs(math.log(each.workers / beside)), default=None)


class Priced(NamedTuple):
    """The price of a way."""

    way: TrainingWay
    parts: StepParts
    """Seconds of a commit."""
    wide: float
    """How far the true time may be away, as a share of it."""
    sent_bytes: float
    """Bytes of a worker, for a commit."""
    sent_by_server: float
    worker_bytes: int
    """Resident memory of a worker; 0 where it is not known."""
    server_bytes: int
    commit_samples: int
    step_samples: int
    measured: bool
    """Whether a crew of this very way took steps."""

    @property
    def seconds(self) -> float:
        """Time for as many samples as a step of the job has."""
        return self.parts.seconds * self.step_samples / self.commit_samples

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return self.seconds * (1 - self.wide)

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return self.seconds * (1 + self.wide)


def price(way: TrainingWay, known: Measurements, machines: Machines) -> Priced | None:
    """Price a way.

    Returns:
        None where nothing that was measured says what it costs.
    """
    if machines.emulated:
        machines = machines._replace(hosts=min(machines.hosts, way.workers))
    if way.mesh:
        return _on_mesh(way, known, machines)
    job, beside = known.job, machines.beside(way.workers)
    base = known.computing(beside)
    if base is None:
        return None
    own = known.crew(way, way.workers)
    if own is None and way.workers > 1 and not job.trained_bytes:
        return None  # nobody knows what a loop of the user's own would send
    exact = own is not None and own.key == way.key
    exact = exact and beside == way.workers and known.batch == 1.0
    scale = _scale(known, machines, base, beside, -(-job.micro_batches // way.workers))
    if exact and own is not None:  # its own passes, beside its own exchange
        base, scale = own, 1.0
    size = own.sent_bytes if own is not None else _plain_bytes(way, job)
    if own is not None:
        size = rescaled(way.strategy, size, own.workers, way.workers)
        if own.codec != way.codec:
            size *= CODED.get(way.codec, 1.0)
    exchange = _exchange(way, own, size, machines)
    batch = max(1, round(job.global_batch * known.batch))
    parts = _simulated(way, known, machines, base, scale, exchange)
    if known.learned != 1.0:
        parts = parts.times(known.learned)
    return Priced(
        way,
        parts,
        width(
            parts,
            base,
            own,
            known.crews,
            known.probed,
            machines,
            exact=exact,
            formula=_by_formula(way, own),
        ),
        0.0 if way.is_plain else size,
        sent_by_server(size, way.workers, way.servers) if way.servers else 0.0,
        worker_bytes(way.codec, own or base, job.trained_bytes),
        own.server_bytes if own is not None else 0,
        way.samples or batch,
        batch,
        exact,
    )


def _on_mesh(way: TrainingWay, known: Measurements, machines: Machines) -> Priced | None:
    """A mesh costs what its own crew took, and what it sent comes on top where that had no link.

    How much of that passes hide is not known, nor is another number of processes.
    """
    own = next((each for each in known.crews if each.key == way.key and not each.failed), None)
    if own is None or known.batch != 1.0:
        return None
    rest = max(0.0, own.whole_s - own.slowest_s - own.wire_s - own.update_s)
    wire, extra = own.wire_s, 0.0
    if not is_seen(own, machines) and machines.hosts > 1:
        extra = machines.seconds_on_link(own.sent_bytes)
    waits = own.slowest_s - own.passes_s
    parts = StepParts(own.passes_s, waits, wire + extra, own.update_s, rest)
    wide = width(parts, own, own, known.crews, known.probed, machines, exact=True, formula=False)
    batch = known.job.global_batch
    return Priced(
        way,
        parts.times(known.learned),
        min(0.9, wide + extra / parts.seconds / 2),
        own.sent_bytes,
        0.0,
        own.worker_bytes,
        0,
        batch,
        batch,
        True,
    )


def _scale(
    known: Measurements, machines: Machines, base: CrewFigures, beside: int, share: float
) -> float:
    """How many times as long a worker computes so many micro-batches as one of the crew did its."""
    job, cores = known.job, machines.cores
    mine = job.seconds_of_share(share, batch=known.batch)
    theirs = job.seconds_of_share(-(-job.micro_batches // base.workers))
    crowd = max(beside, cores) / max(base.workers, cores) if beside != base.workers else 1.0
    return mine / theirs * crowd if theirs > 0 else 1.0


def _by_formula(way: TrainingWay, own: CrewFigures | None) -> bool:
    """Whether no crew exchanged as this way does."""
    if way.is_plain:
        return False
    return own is None or (own.strategy, own.codec) != (way.strategy, way.codec)


def _plain_bytes(way: TrainingWay, job: JobFigures) -> float:
    """Bytes of a worker, where no crew has counted them."""
    return rescaled(way.strategy, float(job.trained_bytes), 2, way.workers)


def _exchange(
    way: TrainingWay, own: CrewFigures | None, size: float, machines: Machines
) -> BucketExchange:
    """The buckets with their bytes, and software as slow as the crew's was without a link."""
    shares = own.buckets if own is not None and own.buckets else ()
    messages = 2.0 * (way.workers - 1) if not way.servers else 1.0
    buckets = [FullBucket(size * each.share, each.at, messages) for each in shares]
    buckets = buckets or [FullBucket(size, 1.0, messages)]
    encoded = way.codec != "none" and not way.servers
    exchange = BucketExchange(buckets, servers=way.servers, encoded=encoded)
    if own is None or own.workers < 2:
        return exchange
    mine = rescaled(way.strategy, size, way.workers, own.workers)
    as_crew = exchange._replace(
        buckets=[each._replace(size=each.size / size * mine) for each in buckets]
        if size
        else buckets,
        servers=own.servers,
    )
    fitted = (_on_its_links if own.bits_per_s else _without_links)(own, as_crew)
    return fitted._replace(buckets=buckets, servers=way.servers)


def _without_links(own: CrewFigures, exchange: BucketExchange) -> BucketExchange:
    """The exchange with as many seconds of software for each byte as make it as long as the
    crew's own was, beside those that a message takes."""
    passes = [WorkerPass(own.slowest_s, own.last_s)] * own.workers
    exchange = exchange._replace(fixed_s=min(own.small_s, own.wire_s))

    def wire(each: float) -> float:
        slower = exchange._replace(software_s=each)
        return steps.in_lockstep(Machines(), passes, slower).wire

    if wire(0.0) >= own.wire_s:
        return exchange
    low, high = 0.0, 1e-12
    while wire(high) < own.wire_s and high < 1.0:
        low, high = high, 2 * high
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if wire(middle) < own.wire_s else (low, middle)
    return exchange._replace(software_s=high)


def _on_its_links(own: CrewFigures, exchange: BucketExchange) -> BucketExchange:
    """The exchange as long as that of a crew on links was.

    What links do not explain is no time of each byte: the bytes were on a link meanwhile, and a
    faster one would carry them sooner. It is what acknowledgements take of a link, and for the
    rest the same at each rate: software that nothing hides, or a burst that passed at once.
    """
    passes = [WorkerPass(own.slowest_s, own.last_s)] * own.workers
    here = Machines(own.hosts, link=HostLink(own.bits_per_s), emulated=True)
    least = steps.in_lockstep(here, passes, exchange).wire
    if least <= 0:
        return exchange._replace(fixed_s=own.wire_s)
    more = own.wire_s - least
    scaled = min(more, ACKNOWLEDGED * least) if more > 0 else min(0.0, more + BURST_S)
    return exchange._replace(stretch=1 + scaled / least, fixed_s=more - scaled)


def _simulated(
    way: TrainingWay,
    known: Measurements,
    machines: Machines,
    base: CrewFigures,
    scale: float,
    exchange: BucketExchange,
) -> StepParts:
    """A commit of the way."""
    job = known.job
    rest = max(0.0, base.whole_s - base.slowest_s - base.wire_s - base.update_s)
    uneven = base.slowest_s / base.passes_s if base.passes_s else 1.0
    if way.leased:
        one = base.passes_s * scale / -(-job.micro_batches // way.workers)
        passes = [WorkerPass(one / machines.speed_of(w), 0.0) for w in range(way.workers)]
        exchange = exchange._replace(server_update_s=job.part_update_s)
        return steps.leased(
            machines, passes, exchange.buckets[0].size if len(exchange.buckets) == 1 else
            sum(each.size for each in exchange.buckets), job.micro_batches, exchange, rest_s=rest,
        )  # fmt: skip
    if way.local_steps:
        return _round(way, known, machines, base, scale, exchange, rest)
    shares = _dealt(way, known, machines, base, scale)
    passes = [WorkerPass(each, base.last_s * scale) for each in shares]
    if uneven > 1 and len(passes) > 1 and not machines.speeds:
        passes[0] = passes[0]._replace(seconds=base.slowest_s * scale, last_s=base.last_s * scale)
        quick = (len(passes) * base.passes_s - base.slowest_s) / (len(passes) - 1) * scale
        passes[1:] = [each._replace(seconds=max(quick, each.last_s)) for each in passes[1:]]
    return steps.in_lockstep(machines, passes, exchange, update_s=base.update_s, rest_s=rest)


def _dealt(
    way: TrainingWay, known: Measurements, machines: Machines, base: CrewFigures, scale: float
) -> list[float]:
    """Seconds that each worker computes: evenly dealt, or by the speeds of their hosts."""
    if way.workers == 1:
        return [base.slowest_s * scale / machines.speed_of(0)]
    if not machines.speeds:
        return [base.passes_s * scale] * way.workers
    parts, beside = known.job.micro_batches, machines.beside(way.workers)
    takes = [
        base.passes_s * _scale(known, machines, base, beside, share) if share else 0.0
        for share in range(parts + 1)
    ]
    speeds = [machines.speed_of(worker) for worker in range(way.workers)]
    taken = [0] * way.workers
    for _ in range(parts):
        taken[min(range(way.workers), key=lambda w: (takes[taken[w] + 1] / speeds[w], w))] += 1
    return [takes[n] / speed for n, speed in zip(taken, speeds, strict=True)]


def _round(
    way: TrainingWay,
    known: Measurements,
    machines: Machines,
    base: CrewFigures,
    scale: float,
    exchange: BucketExchange,
    rest: float,
) -> StepParts:
    job = known.job
    whole = base.passes_s * scale / job.seconds_of_share(-(-job.micro_batches // way.workers))
    local = job.seconds_of(way.samples / way.participants / way.local_steps) * whole
    mine = -(-way.participants // way.workers) * way.local_steps * (local + base.update_s)
    passes = [WorkerPass(mine / machines.speed_of(w), 0.0) for w in range(way.workers)]
    return steps.in_round(machines, passes, exchange, update_s=base.update_s, rest_s=rest)
