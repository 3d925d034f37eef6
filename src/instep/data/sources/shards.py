"""Samples that `instep prepare` has made, as a dataset. What they are is in `data/shards/`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.errors import DataError
from instep.words import is_url, shown_url

if TYPE_CHECKING:
    from instep.data.shards.dataset import Shards


def shards(
    folder: str | Path,
    columns: Sequence[str] | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
    *,
    source: str | Path | None = None,
    cache: int | None = None,
    **options: Any,
) -> Shards:
    """The samples of a prepared folder, in their order.

    Args:
        folder: what `instep prepare --to` was given; or a URL of it that fsspec reads, as
            "s3://bucket/reviews".
        columns: names of those that samples are to have; all by default.
        transform: called with each sample, a dict of tensors, text and bytes; gives what the
            dataset returns.
        source: a URL, or a folder that all hosts see, with the files that are not in `folder`. With
            `data.parts` it stands in for a lost host.
        cache: bytes of shards of URLs that this host keeps; by default what `data.cache_gb` says.
        options: of fsspec's file system, as `anon=True`.

    Raises:
        DataError: the folder has no manifest, or no such column; or pyarrow is not installed.
    """
    try:
        from instep.data.shards.dataset import Shards
        from instep.data.shards.urls.remote import Remote
    except ModuleNotFoundError as error:
        raise DataError(
            f"shards need the package {error.name}: pip install 'instep[data]'."
        ) from None
    remote = Remote(str(folder), cache, options) if is_url(str(folder)) else None
    also = Remote(_url(source), cache, options) if source is not None else None
    if remote is not None and also is not None:
        name = shown_url(str(folder))
        raise DataError(f"{name} and a source are given: leave the source out, or name a folder.")
    return Shards(folder, columns, transform, remote, also)


def _url(source: str | Path) -> str:
    return str(source) if is_url(str(source)) else f"file://{Path(source).absolute()}"
