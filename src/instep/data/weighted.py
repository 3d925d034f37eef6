"""Batches whose samples count differently: the weight of each travels with them.

A batch with weights is a dict of two items, as anything that goes between processes is made of
dicts, lists and tensors. Ways in: `SampleWeights`, `with_weights`, `without_weights`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from instep.data.class_codes import CountedCodes
from instep.data.order import AnyOrder, Indices

_BATCH, _WEIGHTS = "instep.batch", "instep.weights"


class SampleWeights:
    """How much each sample counts.

    Args:
        classes: [classes] float64, what a sample of each class counts.
        codes: looks up the class of each sample.
    """

    def __init__(self, classes: np.ndarray[Any, np.dtype[np.float64]], codes: CountedCodes) -> None:
        self.classes, self._codes = classes, codes

    def of(self, indices: Indices) -> Tensor:
        """Those of some samples, [count] float64."""
        return torch.from_numpy(self.classes[self._codes.of(indices)])


class HowSampled(NamedTuple):
    """An order of samples, and how each of them is taken."""

    order: AnyOrder | None = None
    """Left out: the job's own."""
    weights: SampleWeights | None = None
    """How much each sample counts, if they do not all count the same: batches have it."""
    repeats_alone: bool = False
    """Whether only a sample that comes again in an epoch is augmented."""

    @classmethod
    def of(cls, order: AnyOrder | HowSampled | None) -> HowSampled:
        """One of an order alone."""
        return order if isinstance(order, HowSampled) else cls(order)


def with_weights(batch: Any, weights: Tensor) -> dict[str, Any]:
    """A batch, and what each of its samples counts."""
    return {_BATCH: batch, _WEIGHTS: weights}


def without_weights(batch: Any) -> tuple[Any, Tensor | None]:
    """The batch itself, and what its samples count; None where all count the same."""
    if type(batch) is dict and batch.keys() == {_BATCH, _WEIGHTS}:
        return batch[_BATCH], batch[_WEIGHTS]
    return batch, None
