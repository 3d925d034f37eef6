"""Which samples the trial compares: neighbouring micro-batches of an epoch, and all as one batch.

The first ones tell most, since a large model is tried in few places: a pair of equal micro-batches;
then an uneven pair, of the smaller last batch of an epoch if there is one. (A weight that ignores
the number of samples, such as the `len` of a tuple, is right for micro-batches of equal size.)
Then whole steps as three and as two workers have them, because a loss may compare samples only if
there are many; and pairs from all over the epoch. Of these as many as ten steps have room for,
counted in samples: so they are the same on every machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from instep.data.batches import Batches
from instep.data.loader import Slice
from instep.data.order import Position
from instep.engine.passes import parts_of, share_of
from instep.job.spec import JobSpec
from instep.job.train import TrainSpec

MOST, LEAST = 8, 2
"""Places that are tried at most, and in any case."""

STEPS, WIDE, ALONE = 10, 5.0, 1 / 3
"""Steps of one process that all passes may take; how many times as long as in float32 a pass in
float64 takes at most (3.2 to 4.5 were measured); and what of a pass its loss alone takes."""

_EFFORT, _TINY, _READS = 6e8, 3e6, 1024
"""More places are tried than in any case while the effort (parameters times numbers in a batch)
stays below the first in all, and the samples that are read below the third. Below the second a
pass takes as long in float64 as in float32, since calls take longer than what they compute."""

_SHORT = 8
"""A part of a made-up place has at most this part of a global batch, so that it takes little."""


class SpotPlace(NamedTuple):
    """Neighbouring slices of an epoch, and their union."""

    parts: tuple[Slice, ...]
    made_up: bool = False
    """Whether no step of the job has a part of such a size."""
    loss_alone: bool = False
    """Whether losses are compared, and no gradients."""

    @property
    def reads(self) -> int:
        """Samples that are read."""
        return 2 * (self.whole.stop - self.whole.first)

    @property
    def whole(self) -> Slice:
        """All their samples."""
        return self.parts[0]._replace(stop=self.parts[-1].stop)

    @property
    def slices(self) -> tuple[Slice, ...]:
        """What is read: the parts, and the whole."""
        return (*self.parts, self.whole)


class Places:
    """Of one job.

    Args:
        job: decides how batches are cut.
        batches: what each commit takes.
    """

    def __init__(self, job: JobSpec, batches: Batches) -> None:
        self._train, self._samples = job.train, batches.samples
        self._batches = batches.in_steps(job)
        self.steps = self._batches.per_epoch
        rounds = job.sync.rounds is not None  # their steps have other sizes
        last = self.steps if rounds else min(self.steps, batches.length(job))
        self._last = last if 1 < last == self.steps else 1
        """The step with the smallest batch."""

    def compared(self) -> list[SpotPlace]:
        """The places to compare, in the order of what they tell."""
        first, last = self.micro_batches(1), self.micro_batches(self._last)
        if len(first) < 2:
            return []
        few = [SpotPlace((first[0], first[1])), self._uneven(last if len(last) > 1 else first)]
        wholes = [self.shares(1, 3), self.shares(self._last, 2)] if len(first) > 2 else []
        more = [
            self._pair(1 + number * self.steps // (MOST - 3), 2 * number, uneven=number % 2 == 0)
            for number in range(1, MOST - 3)
        ]
        order = [*few, *wholes[:1], *more[:1], *wholes[1:], *more[1:]]
        places: dict[Slice, SpotPlace] = {}
        for place in order:
            if place is not None:
                places.setdefault(place.whole, place)
        return list(places.values())[: min(MOST, 2 * len(first))]

    def affordable(self, places: list[SpotPlace], effort: float) -> list[SpotPlace]:
        """The first ones of these, and of the others as many as there is time for.

        Args:
            places: in the order of what they tell.
            effort: parameters times numbers in the batch of the first of these.
        """
        found, wide = places[:LEAST], 1.0 if effort <= _TINY else WIDE
        left = STEPS * self._train.global_batch - self._in_any_case(wide)
        left -= sum(_work(place, wide) for place in found)
        reads = _READS - sum(place.reads for place in found)
        for place in places[LEAST : int(_EFFORT / max(effort, 1.0))]:
            if _work(place, wide) <= left and place.reads <= reads:
                found.append(place)
                left, reads = left - _work(place, wide), reads - place.reads
        return found

    def _in_any_case(self, wide: float) -> float:
        """Samples of the passes beside, if they passed in float32: of the first, of it again, and
        of another as the first; the loss of one of each other size; with global batch
        normalisation that of a step as several workers have it."""
        first, *_ = self.micro_batches(1)
        size, step = first.stop - first.first, 2 * self._train.global_batch
        alone = sum(self.sizes()) - size + (step if self._train.batch_norm == "global" else 0)
        return size + wide * (2 * size + ALONE * alone)

    def micro_batches(self, step: int) -> list[Slice]:
        """The micro-batches of a step, in order."""
        return list(_cut(self._train, self._at(step)))

    @staticmethod
    def step(train: TrainSpec, where: Position) -> SpotPlace:
        """All micro-batches of a step."""
        return SpotPlace(tuple(_cut(train, where)))

    def shares(self, step: int, workers: int) -> SpotPlace | None:
        """What so many workers have of a step, each in one pass; None if there are not so many."""
        where = self._at(step)
        parts = parts_of(where, self._train)
        dealt = [
            share_of(where, parts, workers, n, merge=False, whole=True) for n in range(workers)
        ]
        slices = [part.samples for share in dealt for part in share.passes]
        return SpotPlace(tuple(slices), loss_alone=True) if len(slices) > 1 else None

    def sizes(self) -> dict[int, Slice]:
        """Each size that a micro-batch of the job has, and one such micro-batch."""
        every = [*self.micro_batches(1), *self.micro_batches(self._last)]
        return {each.stop - each.first: each for each in reversed(every)}

    def cut_in_words(self, part: Slice) -> str:
        """How the step was cut that a micro-batch is of."""
        batch, size = self._train.global_batch, part.stop - part.first
        step = 1 if part.first < self._at(1).stop else self._last
        micro_batches = self.micro_batches(step)
        samples = micro_batches[-1].stop - micro_batches[0].first
        which = "a batch" if samples == batch else "the last batch of an epoch"
        full = self._samples // batch * batch
        leave_out = (
            f"leave samples out, so that every batch is full (torch.utils.data.Subset(dataset, "
            f"range({full}))); or "
            if 0 < full < self._samples and samples < batch
            else ""
        )
        return (
            f"on a micro-batch of {size}: {which} has {samples} samples, and is cut into "
            f"{len(micro_batches)} micro-batches. Have it take any number of samples; or "
            f"{leave_out}run each batch as one pass, with workers = 1 and train.micro_batches = 1"
        )

    def _at(self, step: int) -> Position:
        return self._batches.of(step)

    def _pair(self, step: int, place: int, *, uneven: bool) -> SpotPlace | None:
        parts = self.micro_batches(min(step, self.steps))
        if len(parts) < 2:
            return None
        place %= len(parts) - 1
        pair = SpotPlace((parts[place], parts[place + 1]))
        return self._uneven(list(pair.parts)) if uneven else pair

    def _uneven(self, parts: list[Slice]) -> SpotPlace:
        """Neighbours of different size: those of the job, or else one is made shorter."""
        sizes = [part.stop - part.first for part in parts]
        short = max(4, self._train.global_batch // _SHORT)
        for place, (size, other) in enumerate(itertools.pairwise(sizes)):
            if size != other and size + other <= 2 * short + 2:
                return SpotPlace((parts[place], parts[place + 1]))
        first, second = parts[:2]
        size = min(sizes[0], short)
        first = first._replace(stop=first.first + size)
        if size > 2:  # layers may refuse one sample
            second = second._replace(first=first.stop, stop=first.stop + (size + 1) // 2)
        elif len(parts) > 2:
            second = second._replace(stop=second.stop + 1)
        made_up = not {part.stop - part.first for part in (first, second)} <= set(self.sizes())
        return SpotPlace((first, second), made_up=made_up)


def _cut(train: TrainSpec, where: Position) -> Iterator[Slice]:
    every = share_of(where, parts_of(where, train), 1, 0, merge=False)
    return (part.samples for part in every.passes)


def _work(place: SpotPlace, wide: float) -> float:
    """Of all its passes: so many samples would pass in float32 meanwhile."""
    return wide * place.reads * (ALONE if place.loss_alone else 1.0)
