"""Several datasets that a job trains on in shares: `[[data.sources]]`.

They follow each other in one dataset, and each is a class by itself in `balance.ClassOrder`: an
epoch has a planned number of positions of each, and takes the next stretch of its circle. Nothing
is kept for a sample. Ways in: `JoinedSources`, `SourceMembers`, `planned_shares`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset

from instep.data.balance import Members, Numbers
from instep.data.order import Indices


class JoinedSources(ConcatDataset[Any]):
    """Datasets one after the other, with a name for each."""

    def __init__(self, sources: Mapping[str, Any]) -> None:
        super().__init__(list(sources.values()))
        self.names = list(sources)

    @property
    def sizes(self) -> Indices:
        """Samples of each."""
        return np.diff([0, *self.cumulative_sizes]).astype(np.int64)


def are_sources(given: Any) -> bool:
    """Whether this is a dict of map-style datasets, and not one of columns."""
    if not isinstance(given, dict) or not given:
        return False
    columns = (list, tuple, str, dict, np.ndarray, torch.Tensor)
    return all(
        isinstance(name, str)
        and not isinstance(each, columns)
        and hasattr(each, "__getitem__")
        and hasattr(each, "__len__")
        for name, each in given.items()
    )


class SourceMembers(Members):
    """The samples of each source, which follow each other.

    Args:
        sizes: of the sources, 1 or more each.
    """

    def __init__(self, sizes: Indices) -> None:
        self.samples, self.counts = int(sizes.sum()), sizes
        self._begins = np.cumsum(sizes) - sizes
        self._circles = {}

    def _find(self, each: int, places: Indices) -> Indices:
        found: Indices = places + self._begins[each]
        return found


def planned_shares(sizes: Indices, weights: Numbers, ends: list[bool]) -> Indices:
    """Positions of each source in an epoch, [sources] int64.

    Args:
        sizes: samples of each.
        weights: of the samples of each among those of all, above 0.
        ends: whether an epoch has each sample of it once at most; the first source to be exhausted
            ends the epoch. Where none ends, an epoch has as many positions as there are samples.

    Returns:
        Whole numbers in proportion to the weights, rounded to the nearest or by one more or less.
    """
    shares = weights / weights.sum()
    total = int((sizes / shares)[ends].min() + 1e-6) if any(ends) else int(sizes.sum())
    planned: Indices = np.floor(total * shares + 1e-9).astype(np.int64)
    left = np.argsort(planned - total * shares, kind="stable")[: total - int(planned.sum())]
    planned[left] += 1
    most = np.where(ends, sizes, np.iinfo(np.int64).max)
    return np.minimum(planned, most)
