"""Ranks all ways, and finds from which rate or batch on several machines pay.

Way in: `search`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from instep.plan.machine import HostLink, Machines
from instep.plan.measured import CrewFigures
from instep.plan.pricing import Measurements, Priced, price
from instep.plan.ways import TrainingWay

PAYS = 1.05
"""How many times as fast as one worker a way has to be to count as one that pays."""

_RATES = (1e6, 1e12)
"""Bits a second between which a rate is looked for."""

_BATCHES = 64.0
"""How many times as large or small a batch is looked at."""


class Ranking(NamedTuple):
    """Everything that a plan says."""

    same: list[Priced]
    """Ways with the result of one machine, the fastest first."""
    other: list[Priced]
    """Ways with another result, in no order of merit."""
    unpriced: list[TrainingWay]
    fits: Sequence[Priced]
    """Those of `same` that fit into memory."""
    alone: Priced | None
    """One worker."""
    break_even_rate: float | None
    """Bits a second from which on the best way with several workers pays; None: at none, or there
    is no link."""
    break_even_batch: int | None
    """Samples of a step from which on it pays; None: at none that was looked at."""
    next_gain: float | None
    """How many times as fast as the best way one with more workers is; None: there is none."""
    break_even_measured: bool = False
    """Whether crews have taken steps near that rate."""
    batches: bool = True
    """Whether other batches were looked at; not where passes of one size alone were measured."""

    @property
    def best(self) -> Priced | None:
        """The fastest way with the same result that fits."""
        return self.fits[0] if self.fits else None

    @property
    def pays(self) -> bool:
        """Whether several workers are worth it."""
        best, alone = self.best, self.alone
        return bool(best and alone and best is not alone and alone.seconds >= PAYS * best.seconds)

    @property
    def rival(self) -> Priced | None:
        """The fastest way with the same result that has several workers."""
        return next((each for each in self.fits if each.way.workers > 1), None)

    @property
    def undecided(self) -> list[Priced]:
        """The best way, and those whose intervals reach into its own."""
        best = self.best
        return [each for each in self.fits if best is not None and each.low <= best.high]


def search(
    ways: Iterable[TrainingWay],
    known: Measurements,
    machines: Machines,
    *,
    memory_bytes: int = 0,
    near: Sequence[CrewFigures] = (),
) -> Ranking:
    """Price and rank.

    Args:
        ways: candidates.
        known: what was measured.
        machines: where they would run.
        memory_bytes: of a host; 0: without a limit.
        near: crews of one worker and of the best way with several, near the rate from which on it
            pays: that rate follows from these, in place of the others of the same ways.
    """
    same, other, unpriced = list[Priced](), list[Priced](), list[TrainingWay]()
    for way in ways:
        priced = price(way, known, machines)
        if priced is None:
            unpriced.append(way)
        else:
            (same if way.same else other).append(priced)
    same.sort(key=lambda each: (each.seconds, each.way.processes))
    fits = [each for each in same if missing_bytes(each, machines, memory_bytes) <= 0]
    alone = next((each for each in same if each.way.is_plain), None)
    found = Ranking(same, other, unpriced, fits, alone, None, None, None)
    rival = found.rival
    if rival is None or alone is None:
        return found
    more = [e for e in fits if found.best and e.way.workers > found.best.way.workers]
    gain = max((found.best.seconds / e.seconds for e in more), default=None) if found.best else None
    batches = len(known.job.passes) > 1 and not rival.way.mesh
    measured = any(each.key == rival.way.key for each in near)
    there = known.in_place_of(near) if measured else known
    return found._replace(
        batches=batches,
        break_even_measured=measured,
        break_even_rate=_rate(rival.way, alone.way, there, machines),
        break_even_batch=_batch(rival.way, alone.way, known, machines) if batches else None,
        next_gain=gain,
    )


def missing_bytes(priced: Priced, machines: Machines, memory_bytes: int) -> int:
    """How much memory the fullest host lacks; 0 or less: it fits."""
    if not memory_bytes:
        return 0
    workers = machines.beside(priced.way.workers)
    servers = priced.way.servers if machines.emulated else -(-priced.way.servers // machines.hosts)
    return workers * priced.worker_bytes + servers * priced.server_bytes - memory_bytes


def ratio(way: TrainingWay, alone: TrainingWay, known: Measurements, machines: Machines) -> float:
    """How many times as fast as one worker a way is."""
    mine, theirs = price(way, known, machines), price(alone, known, machines)
    return theirs.seconds / mine.seconds if mine and theirs and mine.seconds else 0.0


def _rate(
    way: TrainingWay, alone: TrainingWay, known: Measurements, machines: Machines
) -> float | None:
    """The rate from which on it pays."""
    if machines.link is None or machines.hosts == 1:
        return None
    link = machines.link

    def pays(log: float) -> bool:
        there = machines._replace(link=HostLink(math.exp(log), link.latency_s))
        return ratio(way, alone, known, there) >= 1.0

    found = _first(pays, *map(math.log, _RATES))
    return math.exp(found) if found is not None else None


def _batch(
    way: TrainingWay, alone: TrainingWay, known: Measurements, machines: Machines
) -> int | None:
    """The global batch from which on it pays."""

    def pays(log: float) -> bool:
        return ratio(way, alone, known._replace(batch=math.exp(log)), machines) >= 1.0

    found = _first(pays, -math.log(_BATCHES), math.log(_BATCHES))
    batch = known.job.global_batch
    return max(1, math.ceil(math.exp(found) * batch)) if found is not None else None


def _first(holds: Callable[[float], bool], low: float, high: float) -> float | None:
    """The least value for which something holds that holds from there on; None if it never does."""
    if not holds(high):
        return None
    if holds(low):
        return low
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
