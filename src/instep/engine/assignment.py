"""Who computes what in one generation: the units of each step, dealt alike by all members.

The units are fixed by the job (`passes.py`), and the deal follows from figures that every
member has (`dealing.py`), so nobody has to be asked. What was dealt is what the ledger
records for a commit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from instep.comm.protocol.messages import Form
from instep.data.batches import Batches
from instep.data.dealing import deal
from instep.data.order import Position
from instep.data.participants import OwnRounds
from instep.engine.dealing import Dealing, Speeds
from instep.engine.passes import (
    Near,
    Share,
    deal_units,
    part_of,
    parts_of,
    positions_of,
    ranges_of,
    share_of,
    share_of_own,
    share_of_these,
    stretches,
)
from instep.events import Kind
from instep.job.mesh import MeshSpec
from instep.job.train import TrainSpec

ONE_RANK = MeshSpec()
"""A replica in one process."""


class Finished(NamedTuple):
    """Units of a step that was begun in an earlier generation, and need no second computing."""

    step: int
    holders: Mapping[int, int]
    """The rank that holds it, by number of the unit."""


NOTHING_FINISHED = Finished(0, {})


def finished(step: int, held: Sequence[Iterable[int]]) -> Finished:
    """Who gives which of the units that are computed already.

    Args:
        step: that they are of.
        held: the numbers that each rank has computed; of several the lowest rank gives it.
    """
    ranks = reversed(list(enumerate(held)))
    return Finished(step, {unit: rank for rank, units in ranks for unit in units})


class Lockstep:
    """All members take each step together.

    Args:
        form: the generation.
        train: says how many micro-batches a commit has.
        batches: what each takes.
        by_speed: whether a slow worker is dealt less, or a slow replica.
        finished: what is computed already.
        mesh: of a replica. Work is dealt to replicas, and each is known by its first rank; the
            ranks of one compute at the same time.
        own: what participants take of data of their own; None where they have none.
        unit: how many micro-batches a replica is dealt as one; its `shard` ranks have one each. Or
            one, which all of them share (`JobSpec.unit`).
        near: of a dataset in parts; None where all members have all samples.
    """

    def __init__(
        self,
        form: Form,
        train: TrainSpec,
        batches: Batches,
        *,
        by_speed: bool,
        finished: Finished = NOTHING_FINISHED,
        mesh: MeshSpec = ONE_RANK,
        unit: int | None = None,
        own: OwnRounds | None = None,
        near: Near | None = None,
    ) -> None:
        self.form = form
        """The generation, as its members see it."""
        self._train, self._batches, self._own = train, batches, own
        self.workers = [member for member in form.members if member not in form.servers]
        """By rank; servers have the ranks behind them, and no work."""
        stay = {unit: n for unit, n in finished.holders.items() if self._stays(n)}
        self._finished = finished._replace(holders=stay)
        self._ranks = len(self.workers)
        self._mesh, self._unit = mesh, mesh.shard if unit is None else unit
        self._working = [n for n in range(self._ranks) if self._stays(n) and n % mesh.ranks == 0]
        even = bool(form.draining)
        counts_of = None
        if near is not None:
            near = near._replace(held=near.held[: self._ranks])
            counts_of = partial(near.usual, batches.size, working=self._working)
        self.dealing = Dealing(
            self._ranks // mesh.ranks, by_speed=by_speed and not even, counts_of=counts_of
        )
        """Of replicas: of each worker, where it is one."""
        self._near = near
        self._done: tuple[int, int, Position, Speeds | None] | None = None

    def _stays(self, rank: int) -> bool:
        """Whether it stays after this generation: one that leaves has handed its state over."""
        return self.workers[rank] not in self.form.draining

    def plan(
        self, first: int, last: int, *, merge: bool, whole: bool = False
    ) -> Iterator[tuple[Position, Share]]:
        """The global batch of each step from `first` to `last`, and this rank's share of it.

        Args:
            first, last: steps.
            merge: whether micro-batches that follow each other are one pass.
            whole: whether all of a member are.
        """
        speeds, replica = self.dealing.speeds, self.form.rank - self.form.rank % self._mesh.ranks
        for step in range(first, last + 1):
            if self._own is not None:
                own = self._own.of(step)
                where = self._own.where(step, own)
                yield where, share_of_own(where, own, self._units(step, len(own), speeds)[replica])
                continue
            where = self._batches.of(step)
            parts = self._parts(step, where)
            if (dealt := self._scattered(step, where, parts, speeds)) is not None:
                finishes = step == self._finished.step
                most = -(-parts // len(self._working)) if merge and not finishes else 1
                yield where, share_of_these(where, parts, dealt[replica], most)
                continue
            if replica not in self._working:
                yield where, Share([], where.stop, where.stop)
                continue
            share = share_of(
                where,
                parts,
                len(self._working),
                self._working.index(replica),
                merge=merge,
                speeds=speeds,
                whole=whole,
                shard=self._unit,
            )
            yield where, self._within_replica(where, parts, share)

    def _parts(self, step: int, where: Position) -> int:
        """How many micro-batches a step has."""
        return parts_of(where, self._train, self._batches.size_of(step))

    def _within_replica(self, where: Position, parts: int, share: Share) -> Share:
        """This rank's part of each pass of its replica."""
        if self._unit == 1:
            return share
        place = self._mesh.coordinate(self.form.rank).shard
        passes = [part_of(where, parts, each, self._mesh.shard, place) for each in share.passes]
        return share._replace(passes=passes)

    def _around_finished(
        self, step: int, where: Position, parts: int, speeds: Speeds | None
    ) -> list[list[int]]:
        """The units of each rank: those that it holds, and its share of those that nobody does."""
        holders = self._finished.holders
        missing = [number for number in range(parts) if number not in holders]
        units = [[n for n in range(parts) if holders.get(n) == r] for r in range(self._ranks)]
        if self._near is not None:
            more = self._near.units(step, where, parts, self._working, speeds, holders)
            return [sorted(held + dealt) for held, dealt in zip(units, more, strict=True)]
        for rank, part in zip(
            self._working, deal(len(missing), len(self._working), speeds), strict=True
        ):
            units[rank] = sorted([*units[rank], *(missing[n] for n in part)])
        return units

    def _scattered(
        self, step: int, where: Position, parts: int, speeds: Speeds | None
    ) -> list[list[int]] | None:
        """The units of each rank, where they are no range for each."""
        if step == self._finished.step:
            return self._around_finished(step, where, parts, speeds)
        if self._near is None:
            return None
        return self._near.units(step, where, parts, self._working, speeds)

    def _units(self, step: int, parts: int, speeds: Speeds | None) -> list[list[int]]:
        """The units of each rank, where each unit is a participant with data of its own."""
        where = self._batches.of(step)
        if step == self._finished.step:
            return self._around_finished(step, where, parts, speeds)
        if self._near is not None:
            return self._near.units(step, where, parts, self._working, speeds)
        dealt = dict(zip(self._working, deal(parts, len(self._working), speeds), strict=True))
        return [list(dealt.get(rank, ())) for rank in range(self._ranks)]

    def prepared(self, course: int, step: int, where: Position) -> None:
        """All units of a step have been computed, as they were dealt."""
        self._done = course, step, where, self.dealing.speeds

    def records(self) -> list[tuple[int, ...]]:
        """Who computed what in the last step that was prepared: records of `LEDGER`, one for
        each worker; none before the first."""
        if self._done is None:
            return []
        course, step, where, speeds = self._done
        if self._own is not None:
            return list(self._records_of_own(self._own, *self._done))
        form, parts = self.form, self._parts(step, where)
        if (scattered := self._scattered(step, where, parts, speeds)) is not None:
            return [
                (step, where.epoch, course, form.generation, worker, Kind.RANGE, unit, *range_)
                for worker, units in zip(self.workers, scattered, strict=True)
                for unit, *range_ in _stretches(where, parts, units)
            ]
        dealt = deal_units(parts, len(self._working), speeds, self._unit)
        units = dict(zip(self._working, dealt, strict=True))
        nothing = range(parts, parts)
        told = step, where.epoch, course, form.generation
        return [
            (*told, worker, Kind.RANGE, unit.start, *positions_of(where, unit, parts))
            for worker, unit in zip(
                self.workers, (units.get(n, nothing) for n in range(self._ranks)), strict=True
            )
        ]

    def _records_of_own(
        self, own: OwnRounds, course: int, step: int, where: Position, speeds: Speeds | None
    ) -> Iterator[tuple[int, ...]]:
        """The same, with a record for each participant; an empty one for a worker without."""
        parts, generation = own.of(step), self.form.generation
        nothing = len(parts), Position(where.epoch, where.stop, where.stop)
        dealt, away = self._units(step, len(parts), speeds), set(range(len(parts)))
        for worker, units in zip(self.workers, dealt, strict=True):
            away -= set(units)
            for unit, (epoch, *range_) in [(n, parts[n]) for n in units] or [nothing]:
                yield (step, epoch, course, generation, worker, Kind.RANGE, unit, *range_)
        for unit in sorted(away):
            epoch, *range_ = parts[unit]
            yield (step, epoch, course, generation, self.workers[0], Kind.AWAY, unit, *range_)

    def _ranges(self, where: Position, parts: int, speeds: Speeds | None) -> list[tuple[int, int]]:
        """Positions [first, stop) of each rank; empty for one that drains."""
        ranges = ranges_of(where, parts, len(self._working), speeds, self._unit)
        working = dict(zip(self._working, ranges, strict=True))
        return [working.get(rank, (where.stop, where.stop)) for rank in range(self._ranks)]

    def measured(self, where: Position, seconds: Sequence[float]) -> str:
        """Take in how long each rank computed for a committed step.

        A replica is as fast as its slowest rank.

        Returns:
            Why the next is dealt otherwise, in a word; empty where it is not.
        """
        assert self._done is not None, "a committed step was prepared"
        if not self.dealing.watches:
            return ""
        step, ranks = self._done[1], self._mesh.ranks
        parts = self._parts(step, where)
        firsts = range(0, self._ranks, ranks)  # who has what its replica has
        if self._own is not None:
            each = [stop - first for _, first, stop in self._own.of(step)]
            parts = len(each)
            units = self._units(step, parts, self.dealing.speeds)
            samples = [sum(each[unit] for unit in units[n]) for n in firsts]
        elif self._near is not None and step != self._finished.step:
            dealt = self._scattered(step, where, parts, self.dealing.speeds) or []
            cuts = [[positions_of(where, range(u, u + 1), parts) for u in each] for each in dealt]
            samples = [sum(high - low for low, high in each) for each in cuts]
        else:
            ranges = self._ranges(where, parts, self.dealing.speeds)
            samples = [ranges[n][1] - ranges[n][0] for n in firsts]
        slowest = [max(seconds[n : n + ranks]) for n in firsts]
        return self.dealing.after_step(slowest, samples, -(-parts // self._unit))

    @property
    def is_fastest(self) -> bool | None:
        """Whether this rank is dealt most of a whole step, the first of several; None where all are
        dealt evenly."""
        if self.dealing.speeds is None:
            return None
        counts, _ = self.dealt()
        return counts.index(max(counts)) == self.form.rank

    def dealt(self) -> tuple[list[int], list[float]]:
        """For each of `workers`: how many micro-batches of a whole step it has from now on, and the
        speed by which; ranks of one replica have the same."""
        dealing, every = self.dealing, range(self._ranks)
        counts, speeds = dealing.counts(dealing.speeds), dealing.speeds or [1.0] * self._ranks
        ranks = self._mesh.ranks
        return [counts[n // ranks] for n in every], [speeds[n // ranks] for n in every]


def _stretches(where: Position, parts: int, units: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First unit and positions of each stretch of units that follow each other; one if empty."""
    for stretch in stretches(units):
        yield (stretch.start, *positions_of(where, stretch, parts))
    if not units:
        yield parts, where.stop, where.stop
