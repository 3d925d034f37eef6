"""Averaging that ends a round with a step of an optimizer: Adagrad, Adam, Yogi or momentum.

The gradient of that step is how far the mean of the participants came, backwards (Reddi et al.
2021, arXiv:2003.00295).
"""

from __future__ import annotations

from instep.comm.codecs.base import Codec
from instep.errors import SpecError, near_miss
from instep.sync.rounds.averaging import Averaging
from instep.sync.rounds.outer import Adaptive, Momentum, Outer, number

RULES = ("adagrad", "adam", "yogi", "momentum")


def fedopt(
    *,
    rule: str = "adam",
    outer_lr: float | None = None,
    outer_momentum: float | None = None,
    outer_beta2: float = 0.99,
    tau: float = 1e-3,
    bucket_mb: float = 8.0,
    codec: Codec | None = None,
    encode_vectors: bool = False,
) -> Averaging:
    """Averaging with an outer optimizer.

    Args:
        rule: one of `RULES`.
        outer_lr: its learning rate; 1 for momentum and 0.1 for the others if left out.
        outer_momentum: beta 1 of the paper; 0 for adagrad and 0.9 for the others if left out.
        outer_beta2: how slowly `adam` and `yogi` forget squares.
        tau: added to the root of the squares; a smaller one adapts more.
        bucket_mb, codec, encode_vectors: as for averaging.

    Raises:
        SpecError: an option is refused.
    """
    if rule not in RULES:
        raise SpecError(f"sync.options.rule = {rule!r}. {near_miss(str(rule), RULES)}")
    rate = 1.0 if rule == "momentum" else 0.1
    lr = number("outer_lr", rate if outer_lr is None else outer_lr)
    usual = 0.0 if rule == "adagrad" else 0.9
    momentum = number(
        "outer_momentum", usual if outer_momentum is None else outer_momentum, below=1
    )
    beta2, tau = number("outer_beta2", outer_beta2, below=1), number("tau", tau, least=1e-12)
    chosen = (
        Momentum(lr, momentum) if rule == "momentum" else Adaptive(rule, lr, momentum, beta2, tau)
    )
    outer = Outer(chosen)
    return Averaging(bucket_mb=bucket_mb, codec=codec, encode_vectors=encode_vectors, outer=outer)
