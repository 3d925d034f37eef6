"""A folder of shards as a map-style dataset: samples are dicts of tensors, text and bytes.

Files are mapped into memory when a process first reads from them, so a dataset object is small
wherever it is sent. Samples that are read together are gathered column by column, and each is a
view of what was gathered: it may be changed. Way in: `Shards`.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from instep.data.shards.columns import Column
from instep.data.shards.manifest import NAME, Manifest, Shard, read_manifest
from instep.data.shards.remote import Remote
from instep.data.shards.views import Array, View
from instep.data.shards.writer import ShardFile
from instep.errors import DataError, near_miss

MOST_OPEN = 512
"""Files that one process has mapped at a time."""


class Shards(torch.utils.data.Dataset[Any]):
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
        self.folder, self.transform = folder if remote else Path(folder), transform
        self._remote = remote
        read = partial(remote.small, NAME) if remote else None
        self.manifest: Manifest = read_manifest(folder, read)
        known = {column.name: column for column in self.manifest.columns}
        for name in columns or ():
            if name not in known:
                raise DataError(f"{folder} has no column {name!r}. {near_miss(name, known)}")
        self.columns: list[str] = list(known if columns is None else columns)
        counts = [shard.samples for shard in self.manifest.shards]
        self._starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        self._open: OrderedDict[int, ShardFile] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": OrderedDict()}  # each process maps files itself

    def __len__(self) -> int:
        return self.manifest.samples

    @property
    def shard_sizes(self) -> list[int]:
        """Samples of each file, in their order."""
        return [shard.samples for shard in self.manifest.shards]

    def __getitem__(self, index: int) -> Any:
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples at once.

        Raises:
            IndexError: there is no such sample.
            DataError: a file is missing or damaged.
        """
        wanted = np.asarray(indices, np.int64)
        count = self.manifest.samples
        wanted = np.where(wanted < 0, wanted + count, wanted)
        if wanted.size and (wanted.min() < 0 or wanted.max() >= count):
            bad = next(i for i in indices if not -count <= i < count)
            raise IndexError(f"sample {bad} of {count}")
        places = list(self._places(wanted))
        chosen = [c for c in self.manifest.columns if c.name in set(self.columns)]
        at = {column.name: number for number, column in enumerate(self.manifest.columns)}
        gathered = {c.name: _gathered(c, places, at[c.name], len(wanted)) for c in chosen}
        names = self.columns
        samples = [{name: gathered[name][row] for name in names} for row in range(len(wanted))]
        return samples if self.transform is None else [self.transform(s) for s in samples]

    def column(self, name: str) -> Array | list[str]:
        """The values of one column of all samples, without reading the others.

        Returns:
            [samples] of numbers as they are stored, or [samples, ...] of arrays; a list of text.

        Raises:
            DataError: there is no such column, or its samples differ in length.
        """
        known = {column.name: number for number, column in enumerate(self.manifest.columns)}
        if name not in known:
            raise DataError(f"{self.folder} has no column {name!r}. {near_miss(name, known)}")
        column = self.manifest.columns[known[name]]
        if column.kind == "text":
            return [text for part in self._parts(known[name]) for text in _texts(part)]
        if column.ragged:
            raise DataError(
                f"column {name!r} of {self.folder} is {column}: samples differ in length."
            )
        parts = [part.data for part in self._parts(known[name])]
        if not parts:
            return np.empty((0, *column.row_shape), column.element)
        return np.concatenate(parts)

    def _parts(self, at: int) -> Iterator[View]:
        for number in range(len(self.manifest.shards)):
            file = self._file(number)
            for batch in range(len(file.starts) - 1):
                yield file.views(batch)[at]

    def _file(self, number: int) -> ShardFile:
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

    def _places(self, wanted: Array) -> Iterator[tuple[Array, list[View], Array]]:
        """Where samples lie: of each record batch which of `wanted`, its views, and rows in it."""
        shards = np.searchsorted(self._starts, wanted, "right") - 1
        for number in np.unique(shards).tolist():
            file = self._file(number)
            mine = np.flatnonzero(shards == number)
            rows = wanted[mine] - self._starts[number]
            batches = np.searchsorted(file.starts, rows, "right") - 1
            for batch in np.unique(batches).tolist():
                here = batches == batch
                yield mine[here], file.views(batch), rows[here] - file.starts[batch]


def _gathered(
    column: Column, places: list[tuple[Array, list[View], Array]], at: int, count: int
) -> Any:
    """The values of a column for `count` samples, to be indexed by sample."""
    if not column.ragged:
        values = np.empty((count, *column.shape), column.element)
        for mine, views, rows in places:
            values[mine] = views[at].data[rows]
        return _tensor(values)
    found: list[Any] = [None] * count
    for mine, views, rows in places:
        view = views[at]
        for place, row in zip(mine.tolist(), rows.tolist(), strict=True):
            found[place] = _value(column, view.row(row))
    return found


def _value(column: Column, value: Array) -> Any:
    if column.kind == "text":
        return value.tobytes().decode()
    if column.kind == "bytes":
        return value.tobytes()
    if column.kind == "image":
        return _image(value.tobytes())
    return _tensor(value.copy())


def _tensor(values: Array) -> torch.Tensor:
    """A tensor of the values; those of float64 in torch's default type, as a model has them."""
    found = torch.from_numpy(values)
    return found.to(torch.get_default_dtype()) if found.dtype == torch.float64 else found


def _image(data: bytes) -> torch.Tensor:
    """[3, height, width] uint8."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


def _texts(view: View) -> list[str]:
    data, bounds = view.data.tobytes(), (view.offsets.tolist() if view.offsets is not None else [])
    return [data[a:b].decode() for a, b in pairwise(bounds)]
