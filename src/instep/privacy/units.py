"""Samples or participants: what is drawn into the steps of a private run, and how many of them."""

from __future__ import annotations

from typing import NamedTuple

from instep.job.privacy import steps_of
from instep.job.spec import JobSpec


class Units(NamedTuple):
    """Units that a private job protects."""

    number: int
    """Samples, or participants."""
    size: int
    """Units of a step or round, about."""
    positions: int
    """Positions of an epoch's order that the place of one has."""

    @classmethod
    def of_job(cls, job: JobSpec, samples: int) -> Units:
        """Units of a job that trains on so many samples."""
        if not job.privacy.of_participants:
            return cls(samples, job.train.global_batch, 1)
        commit = job.per_commit
        portion = commit.global_batch // commit.micro_batches
        return cls(job.sync.participants, job.sync.taking_part, portion)

    @property
    def in_epoch(self) -> int:
        """Steps of an epoch."""
        return steps_of(self.number, self.size)

    @property
    def taken(self) -> float:
        """Samples that a step takes on average; of participants at most."""
        return self.number / self.in_epoch * self.positions
