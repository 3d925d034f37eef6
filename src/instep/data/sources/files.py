"""Parts that the sources share: types, and reading by index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from instep.data.order import Indices

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

Sample = tuple[Tensor, Tensor]
"""(inputs, target)."""


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
