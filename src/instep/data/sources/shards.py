"""Samples that `instep prepare` has made, as a dataset. What they are is in `data/shards/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import DataError

if TYPE_CHECKING:
    from instep.data.shards.dataset import Shards


def shards(
    folder: str | Path,
    columns: Sequence[str] | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
) -> Shards:
    """The samples of a prepared folder, in their order.

    Args:
        folder: what `instep prepare --to` was given.
        columns: names of those that samples are to have; all by default.
        transform: called with each sample, a dict of tensors, text and bytes; gives what the
            dataset returns.

    Raises:
        DataError: the folder has no manifest, or no such column; or pyarrow is not installed.
    """
    try:
        from instep.data.shards.dataset import Shards
    except ModuleNotFoundError as error:
        raise DataError(
            f"shards need the package {error.name}: pip install 'instep[data]'."
        ) from None
    return Shards(folder, columns, transform)
