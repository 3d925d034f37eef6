"""Files as a stream of windows of bytes, which never has all of them in memory."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info


class Windows(IterableDataset[tuple[Tensor, Tensor]]):
    """Gives (bytes, the byte after each), windows of files one after the other.

    A part of the stream has every n-th file, as each process of a `DataLoader` would have. It can
    say where it is, so that a run that is resumed reads no file from its start.
    """

    def __init__(self, files: list[Path], length: int) -> None:
        self.files, self.length = files, length
        self.place, self.start = {"file": 0, "byte": 0}, {"file": 0, "byte": 0}

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        mine = self.files[info.id :: info.num_workers] if info else self.files
        self.place, self.start = self.start, {"file": 0, "byte": 0}
        while self.place["file"] < len(mine):
            number, first = self.place["file"], self.place["byte"]
            content = mine[number].read_bytes()
            for begin in range(first, len(content) - self.length, self.length):
                window = content[begin : begin + self.length + 1]
                text = torch.tensor(list(window))
                self.place = {"file": number, "byte": begin + self.length}
                yield text[:-1], text[1:]
            self.place = {"file": number + 1, "byte": 0}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.place)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = dict(state)
