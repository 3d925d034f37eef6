"""A server updates the parameters with each gradient as it arrives; nobody waits for anybody.

As in DistBelief (Dean et al. 2012), but over leased micro-batches: one gradient of one micro-batch
is one update (`leases.py` says who computes which; `server/` runs it). A gradient may have
been computed with parameters that other updates have moved meanwhile; its *lag* is how many. Two
options answer to that: smaller steps for late gradients (Zhang et al. 2016, arXiv:1511.05950), and
delay compensation (Zheng et al. 2017, arXiv:1609.08326).

With a codec gradients are encoded, and what goes back is by how much a worker's parameters differ
from those of the server (`server/coding.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from instep.comm.codecs.base import Codec
from instep.errors import SpecError
from instep.sync.base import NothingOfItsOwn, Price
from instep.sync.gathering import check_switch
from instep.sync.servers.pushes import check_codec


class ServerAsync(NothingOfItsOwn):
    """An update for each micro-batch, in the order in which a server numbers them.

    Args:
        compensation: how much of the estimated change of a gradient, since its parameters were
            sent, is added to it; 0 for nothing. The estimate is gradient * gradient * (parameters
            now - parameters then).
        slow_late: divide the learning rate of an update by its lag, where that is above 1.
        encode_vectors: encode also parameters of fewer than two dimensions.
        codec: how gradients, and what comes back, look on the wire; None sends them as they are.

    Raises:
        SpecError: an option is refused.
    """

    staleness: int | None = None
    """How many steps a micro-batch may be ahead; None for no bound."""

    def __init__(
        self,
        *,
        compensation: float = 0.0,
        slow_late: bool = False,
        encode_vectors: bool = False,
        codec: Codec | None = None,
    ) -> None:
        numeric = isinstance(compensation, int | float) and not isinstance(compensation, bool)
        if not (numeric and 0 <= compensation < math.inf):
            raise SpecError(
                f"sync.options.compensation = {compensation!r}: it is a factor of 0 or more. Leave "
                "it out for no compensation; 0.04 is a value to begin with."
            )
        check_switch("slow_late", slow_late)
        check_switch("encode_vectors", encode_vectors)
        if codec is not None:
            check_codec(codec)
        self.compensation, self._slow_late = compensation, slow_late
        self.codec, self.encode_vectors = codec, encode_vectors

    def rate(self, lag: int) -> float:
        """What the learning rate is multiplied by, for a gradient of this lag."""
        return 1.0 / max(1, lag) if self._slow_late else 1.0

    @torch.no_grad()
    def compensate(self, gradient: Tensor, now: Tensor, then: Tensor) -> None:
        """Estimate, in place, what the gradient would be now.

        Args:
            gradient: computed with the parameters `then`.
            now, then: parameters, shaped like it; only read.
        """
        gradient.add_(gradient * gradient * (now - then), alpha=self.compensation)

    # ---- a generation of the server, which is alone in it

    def start(self, *_: Any, **__: Any) -> None:
        """Nothing is laid out: connections come and go."""

    def abandon(self) -> None:
        """Nothing is staged: an update is committed as soon as it is made."""

    def stop(self) -> None:
        """Nothing to let go of."""

    def state(self) -> dict[str, Tensor]:
        """Nothing is remembered from one update to the next."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take up."""

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """A worker sends one gradient for each micro-batch."""
        return Price(parameter_bytes, 1)
