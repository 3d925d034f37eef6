"""The loader that a loop of one's own iterates over, in place of the user's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from instep.worker.own.as_loader import AsLoader
from instep.worker.own.loop import OwnLoop


class OwnLoader(AsLoader):
    """Iterates over this worker's batches of the next epoch; iterate again for the one after."""

    def __init__(self, loop: OwnLoop, dataset: Any) -> None:
        super().__init__(dataset)
        self._loop = loop

    @property
    def batch_size(self) -> int:
        """As of `AsLoader`."""
        return self._loop.largest()

    def __iter__(self) -> Iterator[Any]:
        return self._loop.epoch()

    def __len__(self) -> int:
        return self._loop.length()
