"""Secrets cut into shares, of which some together give the secret and fewer say nothing of it.

Shamir 1979 (doi:10.1145/359168.359176): the secret is the value at 0 of a random polynomial, and
shares are its values at 1, 2, 3, ...
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping

PRIME = 2**521 - 1
"""Above each secret of 256 bits; numbers are counted modulo it."""

SHARE_BYTES = 66

SECRET_BYTES = 32


def split(secret: bytes, count: int, least: int) -> list[bytes]:
    """Cut a secret into shares.

    Args:
        secret: of 32 bytes.
        count: of shares.
        least: how many of them give the secret; at most `count`.

    Returns:
        [count] of `SHARE_BYTES` each; share n is for `join` that of n + 1.
    """
    assert len(secret) == SECRET_BYTES, "256 bits"
    assert 1 <= least <= count, "as many as there are"
    whole = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(least - 1))]
    return [_value(whole, place).to_bytes(SHARE_BYTES, "big") for place in range(1, count + 1)]


def _value(polynomial: list[int], place: int) -> int:
    found = 0
    for factor in reversed(polynomial):
        found = (found * place + factor) % PRIME
    return found


def join(shares: Mapping[int, bytes]) -> bytes | None:
    """The secret that shares give together.

    Args:
        shares: by number, from 1; as many as `split` was told.

    Returns:
        32 bytes; None if these are not shares of one secret.
    """
    total = 0
    for place, share in shares.items():
        above, below = 1, 1
        for other in shares:
            if other != place:
                above, below = above * -other % PRIME, below * (place - other) % PRIME
        total += int.from_bytes(share, "big") * above * pow(below, -1, PRIME)
    total %= PRIME
    return total.to_bytes(SECRET_BYTES, "big") if total >> 8 * SECRET_BYTES == 0 else None
