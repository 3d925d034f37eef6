"""Wishes of torch's samplers: read off a sampler, whose class says what its fields mean.

A subclass may do anything, and is none of them. It decides nothing, and knows no orders. Ways in:
`sampler_of`, `wishes_of`, `draws_of`.
"""

from __future__ import annotations

from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
from torch.utils.data import BatchSampler, RandomSampler, WeightedRandomSampler

Weights = np.ndarray[Any, np.dtype[np.float64]]


class Wishes(NamedTuple):
    """Weights that say how often samples are to come."""

    weights: Weights
    """[samples], those of the sampler and no copy."""
    positions: int
    """In an epoch."""

    @property
    def digest(self) -> int:
        """Hash of them, 32 bits."""
        return crc32(self.weights.tobytes(), self.positions)


class EpochDraws(NamedTuple):
    """How many samples to draw for each epoch."""

    positions: int
    """In an epoch."""
    weights: Weights | None = None
    """[samples], by which they are drawn, none twice in an epoch; None where all count the same,
    and a sample comes again once the others have come."""

    @property
    def digest(self) -> int:
        """Hash of them, 32 bits."""
        return Wishes(np.empty(0) if self.weights is None else self.weights, self.positions).digest


def kind_of(sampler: Any) -> type:
    """Its class; torch's for what torchdata's `StatefulDataLoader` has in the place of that."""
    kind = type(sampler)
    if kind.__module__ != "torchdata.stateful_dataloader.sampler":
        return kind
    return {"BatchSampler": BatchSampler, "RandomSampler": RandomSampler}.get(kind.__name__, kind)


def sampler_of(loader: Any) -> Any:
    """The sampler; a batch sampler that the user gave has its own."""
    batches = loader.batch_sampler
    return batches.sampler if kind_of(batches) is BatchSampler else loader.sampler


def wishes_of(sampler: Any, dataset: Any) -> Wishes | None:
    """Wishes of a `WeightedRandomSampler` that draws with replacement; None for any other."""
    if type(sampler) is not WeightedRandomSampler or not sampler.replacement:
        return None
    weights = _weights(sampler)
    return Wishes(weights, sampler.num_samples) if len(weights) == len(dataset) else None


def draws_of(sampler: Any, dataset: Any) -> EpochDraws | None:
    """Draws of a `WeightedRandomSampler` without replacement, or of a `RandomSampler` that does
    not take each sample once; None for any other."""
    if type(sampler) is WeightedRandomSampler and not sampler.replacement:
        weights = _weights(sampler)
        return EpochDraws(sampler.num_samples, weights) if len(weights) == len(dataset) else None
    if kind_of(sampler) is not RandomSampler or len(sampler.data_source) != len(dataset):
        return None
    once = not sampler.replacement and sampler.num_samples == len(dataset)
    return None if once else EpochDraws(sampler.num_samples)


def _weights(sampler: WeightedRandomSampler) -> Weights:
    weights: Weights = sampler.weights.detach().double().cpu().numpy()
    return weights
