"""Averaging whose participants are drawn back to where the round began.

Li et al. 2020 (arXiv:1812.06127): a participant trains on its loss and `mu / 2` times the squared
distance of its parameters from those of the round, so that it does not go far from the others. The
gradient of that is added in each local step (`worker/rounds/round_update.py`); the rest is
averaging.
"""

from __future__ import annotations

from instep.comm.codecs.base import Codec
from instep.sync.rounds.averaging import Averaging
from instep.sync.rounds.outer import number


def fedprox(
    *,
    mu: float = 0.01,
    bucket_mb: float = 8.0,
    codec: Codec | None = None,
    encode_vectors: bool = False,
) -> Averaging:
    """Averaging with a proximal term.

    Args:
        mu: how strongly participants are drawn back; 0 is averaging.
        bucket_mb, codec, encode_vectors: as for averaging.

    Raises:
        SpecError: an option is refused.
    """
    return Averaging(
        bucket_mb=bucket_mb, codec=codec, encode_vectors=encode_vectors, pull=number("mu", mu)
    )
