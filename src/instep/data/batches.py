"""Which positions each commit of a job takes: pure arithmetic.

A commit is a step, or a whole round of a strategy with rounds; with `start_after` the first ones
are steps and the others rounds. Where steps are not of one size, a `StepSizes` cuts each epoch.
It follows from the job and the commit's number, so all workers, a
resumed run, the audit and the report come to the same. Way in: `Batches.of_job`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from instep.data.order import Position, position, steps_in_epoch
from instep.data.step_sizes import StepSizes
from instep.job.spec import JobSpec


@dataclass(frozen=True)
class Batches:
    """The global batch of each commit, counted from 1 over all epochs.

    Args:
        samples: positions of an epoch.
        size: positions of a commit; the last one of an epoch takes what is left.
        early: how many commits come first, of `early_size`. Where they end within an epoch, its
            others begin there.
        sizes: what cuts epochs into commits of unequal size; then `size` is only what they have
            about, and none is early.
    """

    samples: int
    size: int
    early: int = 0
    early_size: int = 1
    sizes: StepSizes | None = None

    @classmethod
    def of_job(cls, job: JobSpec, samples: int, sizes: StepSizes | None = None) -> Batches:
        """Those of a job whose epochs have so many positions.

        Args:
            job: decides how large commits are.
            samples: of the training set, where each is taken once.
            sizes: what cuts epochs, where commits are not of one size.
        """
        early, early_size = job.start_after, job.train.global_batch
        return cls(samples, job.per_commit.global_batch, early, early_size, sizes)

    @property
    def turn(self) -> tuple[int, int]:
        """Epoch and position at which the early commits end."""
        epoch, number = divmod(self.early, steps_in_epoch(self.samples, self.early_size))
        return epoch, number * self.early_size

    def is_early(self, epoch: int, first: int) -> bool:
        """Whether an early commit takes a position of an epoch."""
        return (epoch, first) < self.turn

    def size_of(self, number: int) -> int:
        """Positions of a commit that is not the last one of an epoch."""
        return self.early_size if number <= self.early else self.size

    def of(self, number: int) -> Position:
        """What a commit takes."""
        if self.sizes is not None:
            return self.sizes.of(*divmod(number - 1, self.sizes.steps))
        if number <= self.early:
            return position(number, self.samples, self.early_size)
        epoch, begin = self.turn
        first = begin + (number - self.early - 1) * self.size
        if first < self.samples:
            return Position(epoch, first, min(first + self.size, self.samples))
        rest = position(number - self.early - self._in_turn, self.samples, self.size)
        return rest._replace(epoch=epoch + 1 + rest.epoch)

    def table(self, first: int, last: int) -> NDArray[np.int64]:
        """Take `of` for commits `first` to `last`: epoch, begin and end of each, [commits, 3]."""
        if self.early or self.sizes is not None:
            rows = [self.of(number) for number in range(first, last + 1)]
            return np.array(rows, np.int64).reshape(-1, 3)
        index, steps = np.arange(first - 1, last, dtype=np.int64), self.per_epoch
        begin = index % steps * self.size
        return np.stack([index // steps, begin, np.minimum(begin + self.size, self.samples)], 1)

    @property
    def _in_turn(self) -> int:
        """Commits in the epoch in which the early ones end, after those."""
        return steps_in_epoch(self.samples - self.turn[1], self.size)

    @property
    def per_epoch(self) -> int:
        """Commits of an epoch in which none is early."""
        return (
            self.sizes.steps if self.sizes is not None else steps_in_epoch(self.samples, self.size)
        )

    def in_steps(self, job: JobSpec) -> Batches:
        """Cut the same epochs into steps of `train.global_batch`, where a commit may be a round."""
        return replace(self, size=job.train.global_batch, early=0)

    def in_epochs(self, epochs: int) -> int:
        """Commits of the first so many epochs, 1 or more."""
        if self.sizes is not None:
            return epochs * self.sizes.steps
        after = epochs - self.turn[0] - 1
        if after < 0:
            return epochs * steps_in_epoch(self.samples, self.early_size)
        return self.early + self._in_turn + after * steps_in_epoch(self.samples, self.size)

    def length(self, job: JobSpec) -> int:
        """Commits of a whole run of a job; 0 while neither they nor the samples are known."""
        return job.train.steps or (self.in_epochs(job.train.passes) if self.samples else 0)

    def positions(self, epoch: int) -> int:
        """Positions of an epoch."""
        return self.samples if self.sizes is None else self.sizes.positions(epoch)

    def due(self, last: int) -> Sequence[int]:
        """Positions of each epoch that the first `last` commits take."""
        if self.samples < 1 or last < 1:
            return []
        epoch, _, stop = self.of(last)
        return [*map(self.positions, range(epoch)), stop]

    def taken(self, number: int) -> int:
        """How many samples the first so many commits take."""
        where = self.of(number)
        if self.sizes is None:
            return where.epoch * self.samples + where.stop
        return sum(self.due(number))

    def ends_epoch(self, number: int) -> bool:
        """Whether a commit is the last one of its epoch."""
        if self.sizes is not None:
            return number % self.sizes.steps == 0
        return self.of(number).stop == self.samples

    def epochs(self, last: int) -> int:
        """How many epochs end with the first `last` commits."""
        return self.of(last).epoch + self.ends_epoch(last)
