"""A folder of shards as a map-style dataset.

Files are mapped into memory when a process first reads from them, so a dataset object is small
wherever it is sent. How samples are made of their rows is in `rows.py`. Way in: `Shards`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from instep.data.shards.manifest import NAME, Manifest, Shard, read_manifest
from instep.data.shards.remote import Remote
from instep.data.shards.rows import Rows
from instep.data.shards.writer import ShardFile
from instep.errors import DataError

MOST_OPEN = 512
"""Files that one process has mapped at a time."""


class Shards(Rows):
    """The samples of a prepared folder, in their order.

    Args:
        folder: what `instep prepare --to` was given.
        columns: names of those that samples are to have; all by default.
        transform: called with each sample, a dict; gives what the dataset returns.
        remote: where the folder is, if it is a URL.

    Raises:
        DataError: the folder has no manifest, or no such column.
    """

    def __init__(
        self,
        folder: str | Path,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        remote: Remote | None = None,
    ) -> None:
        self.folder = folder if remote else Path(folder)
        self._remote = remote
        read = partial(remote.small, NAME) if remote else None
        self.manifest: Manifest = read_manifest(folder, read)
        counts = [shard.samples for shard in self.manifest.shards]
        super().__init__(str(folder), self.manifest.columns, counts, columns, transform)
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # each process maps files itself

    @property
    def shard_sizes(self) -> list[int]:
        """Samples of each file, in their order."""
        return [shard.samples for shard in self.manifest.shards]

    def file(self, number: int) -> ShardFile:
        """A shard, mapped into memory."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.manifest.shards[number]
        found = self._opened(shard)
        if found.columns != self.manifest.columns or len(found) != shard.samples:
            raise DataError(f"{found.path} is not of this manifest. Run instep prepare again.")
        self._open[number] = found
        if len(self._open) > MOST_OPEN:
            self._open.popitem(last=False)
        return found

    def _opened(self, shard: Shard) -> ShardFile:
        if self._remote is None:
            return ShardFile(Path(self.folder) / shard.file, shard.bytes)
        while True:
            path = self._remote.path(shard)
            try:
                return ShardFile(path, shard.bytes)
            except DataError:
                if path.exists():
                    raise  # else another process has made room in the meantime
