"""Parts that the sources share: types, reading by index, and whether a file is as it was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from instep.data.order import Indices
from instep.errors import DataError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

State = tuple[int, int]
"""Size and time of change of a file."""

Sample = tuple[Tensor, Tensor]
"""(inputs, target)."""


def state_of(file: int | Path) -> State:
    """Look at a file, by its path or its descriptor.

    Raises:
        OSError: it is not there.
    """
    about = os.stat(file)
    return about.st_size, about.st_mtime_ns


def check_state(path: Path, before: State, file: int | None = None) -> None:
    """Refuse a file that is not as it was: samples of two versions would be mixed.

    Args:
        path: of it; what is gone, and was mapped into memory, is as it was.
        before: how it was.
        file: its descriptor, if it is open.

    Raises:
        DataError: its size or its time of change is another.
    """
    with suppress(FileNotFoundError):
        if state_of(path if file is None else file) != before:
            raise DataError(
                f"{path} has changed since it was opened. Start again, and leave it as it is "
                "meanwhile."
            )


class BatchDataset:
    """A map-style dataset that reads single samples by way of `batch_of`."""

    def __len__(self) -> int:
        raise NotImplementedError

    def batch_of(self, indices: Indices) -> list[Tensor]:
        """[inputs, targets, ...], each with a first axis of [count] indices."""
        raise NotImplementedError

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        (sample,) = self.__getitems__([index])
        return sample

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        """Samples by index, for torch's own loader."""
        rows = [range(len(self))[index] for index in indices]
        return list(zip(*self.batch_of(np.asarray(rows, dtype=np.int64)), strict=True))
