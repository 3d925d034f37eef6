"""Text as windows of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from instep.data.order import Indices
from instep.data.sources.files import BatchDataset, Bytes, State, check_state, state_of
from instep.errors import DataError
from instep.words import folder_contents, listed


class TextWindows(BatchDataset):
    """Windows of bytes, each with the same window one byte later as its target.

    Sample `i` is (inputs [length] int64, target [length] int64), where target is
    inputs shifted by one; windows do not overlap.

    Args:
        data: all bytes.
        length: of a window.
        mapped: the file that they are mapped from, and how it was; None if they are in memory.
    """

    def __init__(self, data: Bytes, length: int, mapped: tuple[Path, State] | None = None) -> None:
        self.data, self.length, self._mapped = data, length, mapped

    def __len__(self) -> int:
        return (len(self.data) - 1) // self.length

    def batch_of(self, indices: Indices) -> list[Tensor]:
        """[inputs, targets], each [count, length] int64, of [count] indices."""
        if self._mapped is not None:
            check_state(*self._mapped)
        places = (indices * self.length)[:, np.newaxis] + np.arange(self.length + 1)
        windows = self.data[places]
        return [torch.tensor(part, dtype=torch.int64) for part in (windows[:, :-1], windows[:, 1:])]


def text(
    paths_or_folder: str | Path | Sequence[str | Path], length: int, pattern: str = "*.py"
) -> TextWindows:
    """Text as bytes, for models that predict the next one; the vocabulary is 256.

    Args:
        paths_or_folder: a file, which is memory-mapped; several files, joined
            in their order; or a folder, searched recursively for `pattern`, joined
            in the order of their names.
        length: bytes of a window, 1 or more.
        pattern: of file names, where a folder is given.

    Raises:
        DataError: no file, one that cannot be read, or too little text.
    """
    if length < 1:
        raise DataError(f"length = {length}: a window needs 1 byte or more.")
    paths = _text_paths(paths_or_folder, pattern)
    try:
        data: Bytes
        mapped = None
        if len(paths) == 1 and (state := state_of(paths[0]))[0] > 0:
            mapped = paths[0], state
            data = np.memmap(paths[0], np.uint8, "r")
        else:
            data = np.concatenate([np.fromfile(path, np.uint8) for path in paths])
    except OSError as error:
        raise DataError(f"{error.filename} cannot be read: {error.strerror}.") from error
    if len(data) <= length:
        raise DataError(
            f"{listed(paths, 1)}: {len(data)} bytes, and one window of length {length} needs "
            f"{length + 1}. Give more text, or a smaller length."
        )
    return TextWindows(data, length, mapped)


def _text_paths(given: str | Path | Sequence[str | Path], pattern: str) -> list[Path]:
    if not isinstance(given, str | Path):
        paths = [Path(path) for path in given]
        if not paths:
            raise DataError("the list of text files is empty: give at least one.")
        return paths
    root = Path(given)
    if not root.is_dir():
        return [root]
    paths = sorted(path for path in root.rglob(pattern) if path.is_file())
    if not paths:
        raise DataError(f"{root} holds no file that matches {pattern!r}. {folder_contents(root)}")
    return paths
