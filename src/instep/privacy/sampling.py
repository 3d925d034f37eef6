"""Which samples a private step has, drawn from the run's secret.

A step has a fixed number of places, more than it has samples on average, so that nothing that is
written of a run says how many samples a step had: `position` counts places. A place without a
sample is `NOTHING`. An epoch is a number of steps that the job fixes.

- `Allocation` puts each sample into one step of each epoch, drawn uniformly and independently.
- `Poisson` puts each sample into each step with the same probability, independently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from instep.errors import DataError
from instep.job.privacy import places_of, steps_of
from instep.privacy.keys import derived, words

Indices = np.ndarray[Any, np.dtype[np.int64]]

NOTHING = -1
"""Content of a place that has no sample."""


class PrivateSampling(ABC):
    """The samples of every step.

    Args:
        samples: of the dataset.
        batch: that a step is to have, on average at most.
        secret: of the run.

    An object is an `AnyOrder` of `data/order.py` over places.
    """

    gaps = True
    """Whether some places have no sample, and are below 0 among the indices."""

    def __init__(self, samples: int, batch: int, secret: bytes) -> None:
        self.samples = samples
        self.steps = steps_of(samples, batch)
        """Steps of an epoch."""
        self.planned = samples / self.steps
        """Samples of a step on average: what sums are divided by."""
        self.places = places_of(samples, batch)
        """Room of a step, in samples."""
        self._secret = secret
        self._epoch = (-1, np.empty((0, 0), np.int64))  # read once: threads may share it

    @property
    def positions(self) -> int:
        """Places of an epoch."""
        return self.steps * self.places

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """Samples at places [first, stop) of an epoch, [stop - first] int64.

        Raises:
            DataError: a step drew more samples than it has places for, of which the probability
                is below 1e-15.
        """
        assert 0 <= first <= stop <= self.positions, f"places {first} to {stop}"
        known, laid_out = self._epoch
        if known != epoch:
            laid_out = self._laid_out(epoch)
            self._epoch = epoch, laid_out
        found: Indices = laid_out.reshape(-1)[first:stop].copy()
        return found

    def of_step(self, epoch: int, number: int) -> Indices:
        """The samples of a step of an epoch; both count from 0."""
        first = number * self.places
        found = self.indices(epoch, first, first + self.places)
        chosen: Indices = found[found != NOTHING]
        return chosen

    def _laid_out(self, epoch: int) -> Indices:
        """[steps, places]: the samples of each step, spread evenly over its places."""
        found = np.full((self.steps, self.places), NOTHING, np.int64)
        for step, chosen in enumerate(self._steps_of(derived(self._secret, "sampling", epoch))):
            if len(chosen) > self.places:
                raise DataError(
                    f"a step drew more than {self.places} samples where {self.planned:.0f} are "
                    "expected: that is as good as impossible. Begin a new run."
                )
            found[step, np.arange(len(chosen)) * self.places // max(1, len(chosen))] = chosen
        return found

    @abstractmethod
    def _steps_of(self, key: bytes) -> list[Indices]:
        """The samples of each step of an epoch, in a random order."""


class Allocation(PrivateSampling):
    """Each sample in one step of each epoch.

    Each sample draws 64 bits. Sorted by them, samples stand in a uniformly random order, and the
    step of a sample is the part of the range that its bits lie in.
    """

    def _steps_of(self, key: bytes) -> list[Indices]:
        drawn = words(key, 0, self.samples)
        order = np.argsort(drawn, kind="stable")
        bounds = [(number << 64) // self.steps for number in range(1, self.steps)]
        cuts = np.searchsorted(drawn[order], np.array(bounds, np.uint64))
        return np.split(order, cuts)


class Poisson(PrivateSampling):
    """Each sample in each step with one probability: an epoch has samples twice, and not at all."""

    def _steps_of(self, key: bytes) -> list[Indices]:
        # the largest of the words that stand for "in this step"
        limit = np.uint64(min((1 << 64) // self.steps, (1 << 64) - 1))
        found = []
        for step in range(self.steps):
            drawn = words(derived(key, "step", step), 0, self.samples)
            chosen = np.flatnonzero(drawn < limit)
            found.append(chosen[np.argsort(drawn[chosen], kind="stable")])
        return found


SAMPLINGS: dict[str, type[PrivateSampling]] = {"allocation": Allocation, "poisson": Poisson}
"""By what `privacy.sampling` says."""
