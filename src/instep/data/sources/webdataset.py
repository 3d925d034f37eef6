"""Tar files of WebDataset with random access: an index says where each sample lies."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from glob import glob
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from instep.data.sources.files import State, check_state
from instep.data.sources.tar_fields import decoded
from instep.data.sources.tar_index import Index, index_of
from instep.errors import DataError, near_miss, one_line
from instep.words import folder_contents


class TarSamples(Dataset[Any]):
    """The samples of tar files, in their order; each file is a shard.

    Args:
        files: and the index of each.
        columns: fields that every sample is to have; None for those that each has.
        transform: called with each sample, a dict; gives what the dataset returns.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, Index]],
        columns: Sequence[str] | None,
        transform: Callable[[dict[str, Any]], Any] | None,
    ) -> None:
        self.files, self.columns, self.transform = list(files), columns, transform
        self.shard_sizes = [len(index.keys) for _, index in files]
        """Samples of each file."""
        self._starts = np.concatenate([[0], np.cumsum(self.shard_sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        """Read one sample.

        Raises:
            IndexError: there is no such sample.
            DataError: it cannot be read or decoded, or lacks a column.
        """
        place = range(len(self))[index]
        number = int(np.searchsorted(self._starts, place, "right")) - 1
        sample = self._sample(number, place - int(self._starts[number]))
        return sample if self.transform is None else self.transform(sample)

    def _sample(self, number: int, record: int) -> dict[str, Any]:
        path, index = self.files[number]
        key = index.keys[record]
        members = {field: place for field, *place in index.members(record)}
        sample: dict[str, Any] = {"__key__": key}
        wanted = list(members) if self.columns is None else self.columns
        fields = [field for field in wanted if field != "__key__"]
        for field in fields:
            if field not in members:
                said = near_miss(field, members)
                raise DataError(f"{path}, sample {key!r} has no {field!r}. {said}")
        found = _read(path, index.state, [members[field] for field in fields])
        for field, data in zip(fields, found, strict=True):
            try:
                sample[field] = decoded(field, data)
            except Exception as error:  # of whatever kind its decoder has
                raise DataError(
                    f"{path}, sample {key!r}: {field!r} cannot be decoded: {one_line(error)}."
                ) from error
        return sample if self.columns is None else {name: sample[name] for name in self.columns}


def _read(path: Path, state: State, places: Sequence[Sequence[int]]) -> list[bytes]:
    """Read the bytes at some (offset, size) of a file that is as it was."""
    try:
        with open(path, "rb", buffering=0) as file:
            check_state(path, state, file.fileno())
            found = [os.pread(file.fileno(), size, offset) for offset, size in places]
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    if [len(data) for data in found] != [size for _, size in places]:
        raise DataError(f"{path} is shorter than it was: it has changed. Start again.")
    return found


def webdataset(
    paths: str | Path | Sequence[str | Path],
    columns: Sequence[str] | None = None,
    transform: Callable[[dict[str, Any]], Any] | None = None,
) -> TarSamples:
    """The samples of WebDataset's tar files: members of one key are one sample.

    Args:
        paths: a tar file, a pattern as "train-*.tar" or a folder of them, or several in their
            order.
        columns: fields that samples are to have, as ["jpg", "cls"]; all by default. "__key__" is
            the name of a sample.
        transform: called with each sample, a dict from extensions to values; gives what the
            dataset returns.

    Raises:
        DataError: there is no such file, or it is damaged or compressed; later, a sample that
            cannot be decoded or lacks a column.
    """
    named = [paths] if isinstance(paths, str | Path) else list(paths)
    files = [path for each in named for path in _found(Path(each))]
    if not files:
        raise DataError("the list of tar files is empty: give at least one.")
    return TarSamples([(path, index_of(path)) for path in files], columns, transform)


def _found(path: Path) -> list[Path]:
    """Find the files of a path, a folder, or a pattern."""
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix == ".tar")
        if not found:
            raise DataError(f"{path} holds no .tar file. {folder_contents(path)}")
        return found
    if any(sign in path.name for sign in "*?[") and not path.exists():
        matches = sorted(map(Path, glob(str(path))))
        if not matches:
            raise DataError(f"no file matches {path}. {folder_contents(path.parent)}")
        return matches
    return [path]
