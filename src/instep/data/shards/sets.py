"""The prepared folders that a dataset is made of.

Importing this does not import pyarrow, which a run without shards need not have.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from instep.data.shards.dataset import Shards


def sets_in(dataset: Any) -> Iterator[Shards]:
    """Look for them in a dataset, and in those that it has in `dataset` and `datasets`."""
    module = sys.modules.get("instep.data.shards.dataset")
    if module is None:  # nobody can have made one
        return
    while dataset is not None and not isinstance(dataset, module.Shards):
        for each in getattr(dataset, "datasets", ()):
            yield from sets_in(each)
        dataset = getattr(dataset, "dataset", None)
    if dataset is not None:
        yield dataset
