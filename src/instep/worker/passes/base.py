"""How one worker computes what it was dealt of a step: `Compute`, which a training is given.

There are four: one pass for each micro-batch (`ordinary.py`), passes that see the global batch
(`whole_batch.py`), passes of a replica that is a mesh (`on_mesh.py`), and the participants of a
round (`rounds/rounds.py`). In an own loop the user runs the passes, and only `Dealt` is asked.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from instep.comm.base import Comm
from instep.data.loader import Read, Skipped, Slice
from instep.data.order import Position
from instep.engine.assignment import NOTHING_FINISHED, Finished
from instep.engine.passes import Share
from instep.engine.step.agreement import Weighed


class Results(NamedTuple):
    """Results of this worker's passes of a step."""

    losses: Mapping[int, Weighed]
    """By the number of the pass."""
    skipped: list[Skipped]
    """Samples that could not be read."""


class Dealt:
    """One worker's part of a step, where each pass reads its samples once."""

    whole = False
    """Whether all micro-batches of a worker are run as one pass."""

    def slices(self, share: Share) -> Iterable[Slice]:
        """Slices to read for a step, in order."""
        return (part.samples for part in share.passes)

    def samples(self, share: Share) -> int:
        """How many samples of a step this worker computes, and tells."""
        return sum(part.size for part in share.passes if not part.repeats)

    def finished(self, comm: Comm) -> Finished:
        """Find what members have already computed of the next step; all members call it.

        Raises:
            PeerError: a member went away.
        """
        return NOTHING_FINISHED


class Compute(Dealt, ABC):
    """Runs the passes of one worker; gradients go to its engine."""

    def begin(self, comm: Comm) -> None:  # most talk to nobody
        """Get ready for the steps of a generation with these members."""

    @abstractmethod
    def run(self, where: Position, share: Share, reads: Iterator[Read], step: int) -> Results:
        """Run this worker's passes of a step, or of its next turn.

        Args:
            where: the samples of the step.
            share: what of them this worker computes.
            reads: gives the samples of `slices`, in order.
            step: its number, by which draws are keyed.

        Raises:
            PeerError: another worker was lost, or the members have changed.
        """
