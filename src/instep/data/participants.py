"""Which participants are in a round, and what each takes of its own data: pure arithmetic.

Both follow from the job and the number of the round, so all workers, a resumed run and the
audit come to the same. Way in: `Sampling`, and `OwnRounds` where participants have data of
their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from instep.data.order import Indices, Position, keys, steps_in_epoch
from instep.data.partition.regions import offsets_of
from instep.data.shard_sizes import Lot
from instep.job.spec import JobSpec

OF_SAMPLING = 7
"""What a key is drawn for: which participants are in a round."""

_BLOCK = 1 << 16
"""Keys that are drawn at once."""

Drawn = np.ndarray[Any, np.dtype[np.bool_]]


class Sampling:
    """Draws the participants of each round.

    Args:
        seed: of the job.
        participants: of the job.
        count: how many are in a round.
    """

    def __init__(self, seed: int, participants: int, count: int) -> None:
        self.participants, self.count = participants, count
        self._seed, self._rounds = seed, max(1, _BLOCK // participants)
        self._before = [np.zeros(participants, np.int64)]  # by block
        self._block: tuple[int, Drawn] = (-1, np.empty((0, participants), np.bool_))  # its number

    @classmethod
    def of_job(cls, job: JobSpec) -> Sampling:
        """Who is in each round of a job."""
        return cls(job.seed, job.sync.participants, job.sync.taking_part)

    def of(self, step: int) -> list[int]:
        """Participants of round `step`, from 1, in their order."""
        if self.count == self.participants:
            return list(range(self.participants))
        number, place = divmod(step - 1, self._rounds)
        found: list[int] = np.flatnonzero(self._drawn(number)[place]).tolist()
        return found

    def rounds(self, step: int) -> Indices:
        """In how many of the first `step` rounds each participant has been: [participants]."""
        if self.count == self.participants:
            return np.full(self.participants, step, np.int64)
        number, place = divmod(step, self._rounds)
        while len(self._before) <= number:
            last = len(self._before) - 1
            self._before.append(self._before[last] + self._drawn(last).sum(0))
        return self._before[number] + (self._drawn(number)[:place].sum(0) if place else 0)

    def _drawn(self, number: int) -> Drawn:
        """Who is in each round of a block: those with the smallest keys."""
        cached, drawn = self._block
        if cached == number:
            return drawn
        steps = 1 + number * self._rounds + np.arange(self._rounds)
        every = keys(self._seed, OF_SAMPLING, steps[:, None], np.arange(self.participants))
        drawn = np.zeros(every.shape, np.bool_)
        smallest = np.argpartition(every, self.count, axis=1)[:, : self.count]
        np.put_along_axis(drawn, smallest, True, axis=1)
        self._block = number, drawn
        return drawn


class OwnRounds:
    """What participants take in each round where each has data, and epochs, of its own.

    In a round, a participant takes the next `portion` of its epoch, and what is left of it
    at its end.

    Args:
        sizes: samples of each participant, 1 or more.
        portion: samples, 1 or more.
        sampling: draws who is in a round.
        lots: where the samples of each stand, if that is of a meaning (`data.parts`).
    """

    def __init__(
        self,
        sizes: Sequence[int] | Indices,
        portion: int,
        sampling: Sampling,
        lots: Sequence[Lot] = (),
    ) -> None:
        self.sizes: Indices = np.asarray(sizes, np.int64)
        self.offsets, self.portion = offsets_of(self.sizes), portion
        """Where the region of each begins; what it takes in a round."""
        self.samples, self.lots = int(self.offsets[-1]), lots
        self._sampling, self._epoch = sampling, -(-self.sizes // portion)

    @classmethod
    def of_job(
        cls, job: JobSpec, sizes: Sequence[int] | Indices, lots: Sequence[Lot] = ()
    ) -> OwnRounds:
        """What participants with so many samples take in each round of a job."""
        portion = job.per_commit.global_batch // job.per_commit.micro_batches
        return cls(sizes, portion, Sampling.of_job(job), lots)

    def who(self, step: int) -> list[int]:
        """Participants of round `step`, from 1, in their order."""
        return self._sampling.of(step)

    def of(self, step: int) -> list[Position]:
        """What each participant of round `step`, from 1, takes of its region; in their order."""
        who = self.who(step)
        epochs, places = np.divmod(self._sampling.rounds(step - 1)[who], self._epoch[who])
        begins = self.offsets[:-1][who]
        first = begins + places * self.portion
        stop = np.minimum(first + self.portion, begins + self.sizes[who])
        columns = epochs.tolist(), first.tolist(), stop.tolist()
        return [Position(*each) for each in zip(*columns, strict=True)]

    def epochs(self, step: int) -> Indices:
        """How many of its own epochs each has finished after round `step`: [participants]."""
        return self._sampling.rounds(step) // self._epoch

    def where(self, step: int, own: Sequence[Position]) -> Position:
        """What the participants of a round take together, as a global batch of the job.

        The job's epochs are as many rounds as would take all samples if every participant had
        as many.
        """
        batch = self.portion * self._sampling.count
        epoch, number = divmod(step - 1, steps_in_epoch(self.samples, batch))
        first = number * batch
        return Position(epoch, first, first + sum(each.stop - each.first for each in own))

    def rounds(self, step: int) -> Indices:
        """In how many of the first `step` rounds each participant has been: [participants]."""
        return self._sampling.rounds(step)
