"""DiLoCo: many local steps with optimizers that are kept, then one step of Nesterov's momentum.

Douillard et al. 2023 (arXiv:2311.08105). The gradient of the outer step is how far the mean of the
participants came, backwards. With fragments, parameters agree a part at a time (`streaming.py`).
"""

from __future__ import annotations

from instep.comm.codecs.base import Codec
from instep.sync.rounds.averaging import Averaging
from instep.sync.rounds.outer import Momentum, Outer, number
from instep.sync.rounds.streaming import Streaming


def diloco(
    *,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    fragments: int = 1,
    delay: int = 0,
    mixing: float = 0.5,
    bucket_mb: float = 8.0,
    codec: Codec | None = None,
    encode_vectors: bool = False,
) -> Averaging | Streaming:
    """Averaging with an outer step of Nesterov's momentum.

    Args:
        outer_lr: learning rate of the outer step.
        outer_momentum: of the outer step; 0 for none.
        fragments: how many parts of the parameters agree one after the other; 1 for all at once.
        delay: local steps that participants take while a fragment is under way.
        mixing: with a delay: how much of its own values a participant keeps when it takes up a
            fragment; the rest is the agreed ones.
        bucket_mb, codec, encode_vectors: as for averaging.

    Raises:
        SpecError: an option is refused.
    """
    lr = number("outer_lr", outer_lr)
    momentum = number("outer_momentum", outer_momentum, below=1)
    mixing = number("mixing", mixing, below=1)
    outer = Outer(Momentum(lr, momentum, nesterov=True))
    if fragments > 1:
        return Streaming(
            fragments=fragments,
            outer=outer,
            delay=delay,
            mixing=mixing,
            codec=codec,
            encode_vectors=encode_vectors,
        )
    return Averaging(bucket_mb=bucket_mb, codec=codec, encode_vectors=encode_vectors, outer=outer)
