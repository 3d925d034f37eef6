"""Mean of clipped participants with noise: DP-FedAvg (McMahan et al. 2018, arXiv:1710.06963).

Every participant counts the same, however many samples it has, and the sum is divided by how many
a round has on average, never by how many came: so a participant changes a round by what it gives
and by nothing else. Noise is added once, to the sum of all, by each worker alike; where sums are
masked, to the sum that was opened. What a round publishes is recorded first (`released.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.privacy.grid import Grid
from instep.privacy.secure.clipped import ClippedMean, Gift
from instep.privacy.sums import PrivateSums
from instep.sync.all_reduce import AllReduce
from instep.sync.sums import Sums


class PrivateMean(ClippedMean):
    """Sums whole numbers of participants, masked perhaps, and adds noise to the sum.

    Args:
        grid: of the sums; its `clip` limits how far a participant comes.
        make: the sums of these parameters.
        write: called on each rank with round and tag of each sum, before it uses anything of it.
        participants, least, job, bucket_mb: as for `ClippedMean`.
    """

    def __init__(
        self,
        grid: Grid,
        make: Callable[[Sequence[Tensor]], PrivateSums],
        write: Callable[[int, bytes], None],
        participants: int,
        *,
        least: int,
        job: bytes,
        bucket_mb: float,
    ) -> None:
        super().__init__(grid.clip, participants, least=least, job=job, bucket_mb=bucket_mb)
        self._unit = grid.unit
        self._make, self._write = make, write

    def _sums_on_grid(self, parameters: Sequence[Parameter]) -> Sums:
        self._private = self._make(parameters)
        return self._private

    def figures(self, here: Mapping[int, Gift]) -> tuple[float, float]:
        """Note whose parts are summed; nothing is told of losses, nor of weights.

        Raises:
            WorkerError: as `ClippedMean.figures`.
            PeerError: a rank went away.
        """
        if self.sealed:
            silent = {
                of: gift._replace(weight=float(gift.weight > 0), total=0.0, samples=1.0)
                for of, gift in here.items()
            }
            super().figures(silent)
            if self.void:  # noise on a sum of nobody would be a second content
                raise self._opened_before(self._participants)
        else:
            self._come = self._giving(here)
        return 0.0, 0.0

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor | None:
        """Exchange as `ClippedMean` does; then choose the noise of the round."""
        AllReduce.begin_pass(self, 1.0, last=False)
        for slot, parameter in enumerate(self._parameters):  # a round of nobody has noise too
            AllReduce.gradient(self, slot, torch.zeros_like(parameter, dtype=torch.int32))
        agreed = super().exchange(notes)
        assert all(self._agreed), "a round without participants has zeros"
        views = [self._home[slot][1] for slot in range(len(self._parameters))]
        number = self._attempt.number
        self._write(number, self._private.seal(number, views))
        return agreed
