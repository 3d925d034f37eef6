"""The shards that a dataset stands in: how many samples each has, in their order.

A dataset says so in `shard_sizes`. Those of a `Subset` of it, such as a side of a split, follow
where its samples stand in their order. Ways in: `shard_sizes`, `shards_or_blocks`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.order import Indices
from instep.errors import DataError

Lot = tuple[Indices, Indices]
"""Some samples, by where they stand: the numbers of shards, and how many are in each of these."""

MOST_BLOCKS = 1 << 16
"""Blocks that a dataset without shards is cut into, at most."""


def shard_sizes(dataset: Any) -> Indices | None:
    """Samples of each shard of a dataset, [shards] int64; None where it does not say.

    Raises:
        DataError: what it says is not the number of samples of each.
    """
    said = getattr(dataset, "shard_sizes", None)
    if said is not None:
        return _checked(said, dataset)
    inner, indices = getattr(dataset, "dataset", None), getattr(dataset, "indices", None)
    if inner is None or indices is None or (sizes := shard_sizes(inner)) is None:
        return None
    chosen = indices if isinstance(indices, range) else np.asarray(indices)
    in_order = len(chosen) == len(dataset) and (
        chosen.step > 0 if isinstance(chosen, range) else _ascending(chosen)
    )
    return sizes_within(sizes, chosen) if in_order else None


def sizes_within(sizes: Indices, chosen: Indices | range) -> Indices:
    """How many of some samples are in each shard: [shards] int64.

    Args:
        sizes: samples of each shard.
        chosen: indices of samples, ascending.
    """
    ends = np.cumsum(sizes)
    if isinstance(chosen, range):  # which may be of more samples than memory holds
        before = np.clip(-((chosen.start - ends) // chosen.step), 0, len(chosen))
    else:
        before = np.searchsorted(chosen, ends)
    return np.diff(before, prepend=0).astype(np.int64)


def lot_of(sizes: Indices, chosen: Indices | range) -> Lot:
    """The shards that some samples are in; arguments as in `sizes_within`."""
    found = sizes_within(sizes, chosen)
    shards = np.flatnonzero(found)
    return shards, found[shards]


def shards_or_blocks(dataset: Any, samples: int, window: int, lanes: int = 1) -> Indices:
    """Samples of each shard; of each block where there are too few shards to go through in turn.

    Args:
        dataset: of whatever kind.
        samples: its length, 1 or more.
        window: of the order, cut into lanes; a lane's is a block, if there are not too many.
        lanes: of the order.
    """
    sizes = shard_sizes(dataset)
    few = sizes is None or np.count_nonzero(sizes) < max(lanes, 2)
    return blocks(samples, window // lanes) if sizes is None or few else sizes


def blocks(samples: int, each: int) -> Indices:
    """Samples of each block; the last one may have fewer."""
    size = max(each, -(-samples // MOST_BLOCKS))
    return np.diff(np.append(np.arange(0, samples, size), samples))


def _ascending(indices: Any) -> bool:
    return indices.ndim == 1 and indices.dtype.kind in "iu" and bool((np.diff(indices) > 0).all())


def _checked(said: Any, dataset: Any) -> Indices:
    kind, sizes = type(dataset).__name__, np.asarray(said)
    if sizes.ndim != 1 or sizes.dtype.kind not in "iu" or (sizes < 0).any():
        raise DataError(
            f"{kind}.shard_sizes is {str(said)[:60]}: a list of whole numbers is wanted, the "
            "samples of each shard, in the order of the dataset. Leave it out if it has no shards."
        )
    if int(sizes.sum()) != len(dataset):
        raise DataError(
            f"{kind}.shard_sizes has {int(sizes.sum()):,} samples together, and the dataset has "
            f"{len(dataset):,}: the samples of each shard are wanted, in the order of the dataset. "
            "Leave shard_sizes out if it has no shards."
        )
    return sizes.astype(np.int64)
