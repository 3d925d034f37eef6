"""Which participants a private round has, and which of their samples they take in it.

A round has places, as a private step has (`sampling.py`), and each place has room for what one
participant takes in a round. A place without a participant, and room that a participant does not
fill at the end of its epoch, hold nothing. Participants go through their own samples epoch by
epoch, each with an order of its own, whoever else is in a round. Way in: `DrawnParticipants`.
"""

from __future__ import annotations

import numpy as np

from instep.data.partition.regions import Regions
from instep.privacy.sampling import NOTHING, Indices, PrivateSampling


class DrawnParticipants:
    """An order of samples, of rounds whose participants are drawn.

    Args:
        drawn: draws the participants of each round.
        regions: the samples of each.
        portion: how many one takes in a round, at most.
    """

    gaps = True
    """Whether some positions have no sample, and are below 0 among the indices."""

    def __init__(self, drawn: PrivateSampling, regions: Regions, portion: int) -> None:
        self._drawn, self._regions, self._portion = drawn, regions, portion
        self._before = {0: np.zeros(drawn.samples, np.int64)}
        """Rounds that each participant was in before an epoch, by epoch; threads share it, and
        write the same."""
        self._known = (-1, -1, self._before[0])  # read once: threads may share it

    @property
    def positions(self) -> int:
        """Positions of an epoch."""
        return self._drawn.positions * self._portion

    def of(self, step: int) -> list[int]:
        """Participants at the places of round `step`, from 1; below 0 where there is none."""
        epoch, number = divmod(step - 1, self._drawn.steps)
        first = number * self._drawn.places
        found: list[int] = self._drawn.indices(epoch, first, first + self._drawn.places).tolist()
        return found

    def indices(self, epoch: int, first: int, stop: int) -> Indices:
        """Samples at positions [first, stop) of an epoch, [stop - first] int64."""
        found = np.full(stop - first, NOTHING, np.int64)
        low, high = first // self._portion, -(-stop // self._portion)
        for place, participant in enumerate(self._drawn.indices(epoch, low, high).tolist(), low):
            if participant == NOTHING:
                continue
            samples = self._taken(participant, epoch, place // self._drawn.places)
            at = place * self._portion
            begin, end = max(first, at), min(stop, at + len(samples))
            if begin < end:
                found[begin - first : end - first] = samples[begin - at : end - at]
        return found

    def _taken(self, participant: int, epoch: int, number: int) -> Indices:
        """The samples that a participant takes in a round of an epoch."""
        rounds = int(self._rounds(epoch, number)[participant])
        size = int(self._regions.sizes[participant])
        own, place = divmod(rounds, -(-size // self._portion))
        begin = int(self._regions.offsets[participant])
        first = begin + place * self._portion
        return self._regions.indices(own, first, min(first + self._portion, begin + size))

    def _rounds(self, epoch: int, number: int) -> Indices:
        """In how many rounds each participant was before this one."""
        known = self._known
        if known[:2] != (epoch, number):
            for one in range(len(self._before), epoch + 1):
                self._before[one] = self._before[one - 1] + self._uses(one - 1, self._drawn.steps)
            known = epoch, number, self._before[epoch] + self._uses(epoch, number)
            self._known = known
        return known[2]

    def _uses(self, epoch: int, rounds: int) -> Indices:
        """In how many of the first rounds of an epoch each participant is."""
        some = self._drawn.indices(epoch, 0, rounds * self._drawn.places)
        return np.bincount(some[some != NOTHING], minlength=self._drawn.samples)
