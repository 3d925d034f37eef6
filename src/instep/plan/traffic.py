"""Bytes that one process sends for one commit, by closed forms.

S is the payload of all gradients or parameters, N the workers, K the servers:

- ring all-reduce, and a two-phase exchange with a codec: 2 (N-1)/N S
- parameter servers: a worker S, a server N S/K
- a round: an all-reduce of S, whatever the number of local steps

Ways in: `sent_by_worker`, `sent_by_server`, `rescaled`, `CODED`.
"""

from __future__ import annotations

from instep.job.sync.tables import STRATEGY_ROWS

RING = frozenset(name for name, row in STRATEGY_ROWS.items() if not row.served)
"""Strategies in which all workers sum together."""

EXCHANGES = {
    name: "server_sync" if row.leased else "all_reduce"
    for name, row in STRATEGY_ROWS.items()
    if row.leased or row.rounds is not None
}
"""Strategies that exchange as another one does, whose crews show how."""

CODED = {
    "none": 1.0,
    "bfloat16": 0.5,
    "float16": 0.5,
    "int8": 0.251,
    "int4": 0.141,
    "sign": 0.032,
    "top_k": 0.0125,
}
"""Bytes with a codec, over those without, where no crew has counted them."""


def sent_by_worker(strategy: str, size: float, workers: int) -> float:
    """Bytes of one worker for one commit.

    Args:
        strategy: its name.
        size: bytes of what is summed, as they are on the wire.
        workers: how many take part.
    """
    if strategy not in RING:
        return size
    return 2 * (workers - 1) / workers * size


def sent_by_server(size: float, workers: int, servers: int) -> float:
    """Bytes of one server for one commit: its part to each worker."""
    return workers * size / servers


def rescaled(strategy: str, sent: float, measured_with: int, workers: int) -> float:
    """Bytes of a worker among so many, by what was measured with another number of them."""
    if strategy not in RING or measured_with < 2:
        return sent
    whole = sent_by_worker(strategy, 1.0, measured_with)
    return sent / whole * sent_by_worker(strategy, 1.0, workers)
