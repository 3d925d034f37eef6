"""DiLoCo: many local steps with optimizers that are kept, then one step of Nesterov's momentum.

Douillard et al. 2023 (arXiv:2311.08105). The gradient of the outer step is how far the mean of the
participants came, backwards.
"""

from __future__ import annotations

from instep.comm.codecs.base import Codec
from instep.sync.rounds.averaging import Averaging
from instep.sync.rounds.outer import Momentum, Outer, number


def diloco(
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    bucket_mb: float = 8.0,
    codec: Codec | None = None,
    encode_vectors: bool = False,
) -> Averaging:
    """Averaging with an outer step of Nesterov's momentum.

    Args:
        outer_lr: learning rate of the outer step.
        outer_momentum: of the outer step; 0 for none.
        bucket_mb, codec, encode_vectors: as for averaging.

    Raises:
        SpecError: an option is refused.
    """
    lr = number("outer_lr", outer_lr)
    momentum = number("outer_momentum", outer_momentum, below=1)
    outer = Outer(Momentum(lr, momentum, nesterov=True))
    return Averaging(bucket_mb=bucket_mb, codec=codec, encode_vectors=encode_vectors, outer=outer)
