"""How shards become parts: neighbours in the manifest, as many samples in each as shards allow.

It depends on the dataset and the number of parts alone. Ways in: `cut`, `in_parts`,
`parts_order`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from instep.data.order import Indices
from instep.data.parts.order import PartsOrder
from instep.data.shard_sizes import shard_sizes
from instep.errors import DataError
from instep.job.spec import JobSpec
from instep.words import plural


def cut(sizes: Indices, parts: int) -> list[int]:
    """Where parts begin and end, as [parts + 1] numbers of shards.

    Args:
        sizes: samples of each shard, 0 or more.
        parts: 1 or more, and at most as many as shards.

    Returns:
        Ascending; each part has a shard, and no other cut at shards is nearer to even parts.
    """
    assert 1 <= parts <= len(sizes), f"{parts} parts of {len(sizes)} shards"
    ends = np.concatenate([[0], np.cumsum(sizes)])
    bounds = [0]
    for number in range(1, parts):
        wanted = int(ends[-1]) * number / parts
        at = int(np.argmin(np.abs(ends - wanted)))
        bounds.append(min(max(at, bounds[-1] + 1), len(sizes) - parts + number))
    return [*bounds, len(sizes)]


def in_parts(dataset: Any, parts: int) -> tuple[Indices, list[int]]:
    """Samples of each shard of a dataset, and its parts, as `cut` gives them; those of a side of it
    are the same shards.

    Raises:
        DataError: it has no shards, or fewer than parts.
    """
    whole = dataset
    while getattr(whole, "shard_sizes", None) is None and hasattr(whole, "dataset"):
        whole = whole.dataset
    sizes, all_sizes = shard_sizes(dataset), shard_sizes(whole)
    if sizes is None or all_sizes is None:
        raise DataError(
            f"data.parts = {parts}, and the training set ({type(whole).__name__}) does not say "
            "which shards it stands in: read a prepared folder with instep.data.sources.shards, or "
            "give the dataset shard_sizes. Leave data.parts out if all hosts have all data."
        )
    if parts > len(sizes):
        raise DataError(
            f"data.parts = {parts}, and the training set has {plural(len(sizes), 'shard')}: a part "
            f"is one or more. Set data.parts to at most {len(sizes)}, or prepare smaller shards "
            "(--shard-mb, or prepare.shard_mb)."
        )
    return sizes, cut(all_sizes, parts)


def part_of_each(dataset: Any, parts: int) -> Indices:
    """The part that each sample of a dataset is in: [samples] int64.

    Raises:
        DataError: as `in_parts`.
    """
    sizes, bounds = in_parts(dataset, parts)
    return np.repeat(np.repeat(np.arange(parts), np.diff(bounds)), sizes)


def parts_order(job: JobSpec, dataset: Any) -> PartsOrder:
    """The order of a job that has `data.parts`, of its training set.

    Raises:
        DataError: as `in_parts`.
    """
    return PartsOrder.of_job(job, *in_parts(dataset, job.data.parts))
