"""Batches to compare: micro-batches, and all their samples as one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from instep.data.loader import Read
from instep.parallel.nested import tensors_in
from instep.worker.trial.compared.layers import rows_alike


class Spot(NamedTuple):
    """Neighbouring micro-batches of an epoch, and all their samples as one batch."""

    parts: tuple[Any, ...]
    """Two or more."""
    whole: Any
    sizes: tuple[int, ...]
    """Samples of each part."""
    made_up: bool = False
    """Whether the run has no micro-batch of such a size: a model may refuse it."""
    loss_alone: bool = False
    """Whether losses are compared, and no gradients."""

    def each(self) -> Iterator[tuple[Any, int]]:
        """Yield each part and the whole, with its samples."""
        yield from zip(self.parts, self.sizes, strict=True)
        yield self.whole, sum(self.sizes)

    def made_otherwise(self) -> bool:
        """Whether a sample of the whole is another one than in its part."""
        apart = [tensors_in(part) for part in self.parts]
        return rows_alike(apart, tensors_in(self.whole), 0.0) is False


class OtherSize(NamedTuple):
    """A size that micro-batches of the run have."""

    size: int
    read: Callable[[], Read]
    """Reads one."""
    words: str
    """Which ones have it, and the remedy if it is refused."""
