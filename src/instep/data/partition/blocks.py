"""Even blocks: samples that stand together in the dataset belong together."""

from __future__ import annotations

from instep.data.order import Indices, micro_batch


def blocks(
    samples: int,
    participants: int,
    *,
    column: Indices | None = None,
    skew: float = 0.0,
    seed: int = 0,
) -> list[range]:
    """Cut a dataset into blocks; their sizes differ by one at most."""
    return [range(*micro_batch(0, samples, n, participants)) for n in range(participants)]
