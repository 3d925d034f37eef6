"""A folder of shards as a map-style dataset.

Files are mapped into memory when a process first reads from them, so a dataset object is small
wherever it is sent. How samples are made of their rows is in `rows.py`. Rows of a file that is not
here come from another host of the run (`peers.py`), or from a `source`. Way in: `Shards`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from instep.data.shards.hosts import peers
from instep.data.shards.hosts.sent_rows import taken
from instep.data.shards.manifest import NAME, Manifest, Shard, read_manifest
from instep.data.shards.rows import Rows
from instep.data.shards.urls.remote import Remote
from instep.data.shards.views import Array, View
from instep.data.shards.writer import ShardFile
from instep.errors import DataError
from instep.words import shown_url

MOST_KEPT = 128
"""Files: if a read has rows of more, pages of none stay with this process."""

MOST_OPEN = 512
"""Files that one process has mapped at a time."""


class Shards(Rows):
    """The samples of a prepared folder, in their order.

    Args:
        folder: what `instep prepare --to` was given.
        columns: names of those that samples are to have; all by default.
        transform: called with each sample, a dict; gives what the dataset returns.
        remote: where the folder is, if it is a URL.
        source: where files are that are not in the folder.

    Raises:
        DataError: the folder has no manifest, or no such column.
    """

    def __init__(
        self,
        folder: str | Path,
        columns: Sequence[str] | None = None,
        transform: Callable[[dict[str, Any]], Any] | None = None,
        remote: Remote | None = None,
        source: Remote | None = None,
    ) -> None:
        name = shown_url(str(folder))
        self.folder = name if remote else Path(folder)
        self._remote, self._source = remote, source
        read = partial(remote.small, NAME) if remote else None
        if source and not (Path(folder) / NAME).exists():
            read = partial(source.small, NAME)
        self.manifest: Manifest = read_manifest(name, read)
        counts = [shard.samples for shard in self.manifest.shards]
        super().__init__(name, self.manifest.columns, counts, columns, transform)
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # each process maps files itself

    @property
    def shard_sizes(self) -> list[int]:
        """Samples of each file, in their order."""
        return [shard.samples for shard in self.manifest.shards]

    @property
    def held(self) -> bytes:
        """Which files are in the folder: a bit for each, the first one the lowest of the first.

        Raises:
            DataError: one of them has another size than the manifest says.
        """
        found = bytearray(-(-len(self.manifest.shards) // 8))
        for number, shard in enumerate(self.manifest.shards if self._remote is None else ()):
            path = Path(self.folder) / shard.file
            with suppress(FileNotFoundError):
                if path.stat().st_size != shard.bytes:
                    self.file(number)  # says what is wrong
                found[number // 8] |= 1 << number % 8
        return bytes(found)

    @property
    def reads_elsewhere(self) -> bool:
        """Whether another place than the folder has all files."""
        return self._remote is not None or self._source is not None

    def local_file(self, number: int) -> ShardFile | None:
        """A file of the folder, for another host; None if it is not here."""
        if self._remote is not None:
            return None
        shard = self.manifest.shards[number]
        path = Path(self.folder) / shard.file
        return ShardFile(path, shard.bytes) if path.exists() else None

    def elsewhere(
        self, number: int, rows: Array | None, columns: Sequence[int]
    ) -> list[View] | None:
        """Rows of a file from another host of the run; None if it is in the folder, or has to be
        read from the source.

        Raises:
            DataError: no host that answers has it.
        """
        shard, run = self.manifest.shards[number], peers.present
        if run is None or self._remote is not None or number in self._open:
            return None
        if (Path(self.folder) / shard.file).exists():
            return None
        count = shard.samples if rows is None else len(rows)
        known, pauses_s = self.manifest.columns, () if self._source else peers.PAUSES_S
        found = run.rows(self.manifest.sha256, number, rows, known, columns, count, pauses_s)
        if found is None and self._source is None:
            why = f" ({run.wrong})" if run.wrong else ""
            raise DataError(
                f"{shard.file} is not in {self.folder} of this host, and no host of the run that "
                f"answers has it{why}. Copy it to one of them; or give shards() a source, so that "
                "a lost host does not end a run. Then: instep resume"
            )
        return None if found is None else self._by_number(columns, found)

    def _by_number(self, columns: Sequence[int], found: Sequence[View]) -> list[View]:
        """Views of some columns as those of all; others hold nothing."""
        views = [View(np.empty(0, np.uint8))] * len(self.manifest.columns)
        for at, view in zip(columns, found, strict=True):
            views[at] = view
        return views

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

    def copied(
        self, number: int, rows: Array, columns: Sequence[int], files: int
    ) -> list[View] | None:
        """Rows of a file whose neighbours are not read ahead, nor its pages kept if files are many.

        Pages around a row count as memory of this process, 64 KB for each column.
        """
        file = self.file(number)
        file.reads_here_and_there()
        if files <= MOST_KEPT:
            return None
        found = taken(file, rows, columns)
        file.let_go()
        return self._by_number(columns, found)

    def _opened(self, shard: Shard) -> ShardFile:
        remote = self._remote or self._source
        local = Path(self.folder) / shard.file
        if remote is None or (self._remote is None and local.exists()):
            return ShardFile(local, shard.bytes)
        while True:
            path = remote.path(shard)
            try:
                return ShardFile(path, shard.bytes)
            except DataError:
                if path.exists():
                    raise  # else another process has made room in the meantime
