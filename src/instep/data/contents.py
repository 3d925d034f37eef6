"""What a sample holds, as one number; and which samples of an epoch have theirs recorded.

The number is taken of a sample as the dataset returned it, before augmentation
and collation. It does not depend on how it was read: alone, among others, or as
a row of a batch, where a number has become a tensor and a tuple a list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from instep.data.order import Indices, key
from instep.events import CONTENTS, Appender, cut_torn_record

Take = Callable[[bytes | memoryview], None]

_OF_CONTENT = 3
_MOST, _ONE_IN = 512, 256


class Chosen:
    """Which samples of an epoch are recorded: the same ones whoever reads them.

    Args:
        samples: of the dataset.
        seed: of the job.
        which: all, or a keyed sample: of each 256 that follow each other in the epoch's order
            one, or of as many more as makes about 512 an epoch.
    """

    def __init__(self, samples: int, seed: int, which: Literal["sample", "all"]) -> None:
        self._samples, self._seed, self._all = samples, seed, which == "all"
        self._one_in = max(_ONE_IN, samples // _MOST)

    def __call__(self, epoch: int, first: int, stop: int) -> list[int]:
        """Of positions [first, stop) of an epoch, those that are recorded, counted from `first`."""
        if self._all:
            return list(range(stop - first))
        windows = range(first // self._one_in, -(-stop // self._one_in))
        places = [self._place(epoch, window) - first for window in windows]
        return [place for place in places if 0 <= place < stop - first]

    def _place(self, epoch: int, window: int) -> int:
        begin = window * self._one_in
        size = min(self._one_in, self._samples - begin)  # the last may be short
        return begin + _draw(self._seed, epoch, window) % size


@lru_cache(maxsize=16)  # batches that follow each other share a window
def _draw(seed: int, epoch: int, window: int) -> int:
    return key(seed, _OF_CONTENT, epoch, window)


class Record:
    """A file of what one worker was given to train on, as `events.CONTENTS`.

    One sample may stand there several times: a step that was not committed is
    done again.
    """

    def __init__(self, path: Path) -> None:
        cut_torn_record(path, CONTENTS)
        self._file = Appender(path)

    def add(self, epoch: int, contents: list[Any]) -> None:
        """Append [index, content] of samples of an epoch."""
        self._file.write(np.array([(epoch, *each) for each in contents], CONTENTS).tobytes())

    def close(self) -> None:
        """Nothing more is written; a second call does nothing."""
        self._file.close()


class Contents:
    """What is told of the samples of one slice while they are read.

    Args:
        wanted: indices of those of which it is.
    """

    def __init__(self, wanted: Iterable[int]) -> None:
        self._wanted = frozenset(wanted)
        self.found: list[list[int]] = []
        """[index, content] of each."""

    def note(self, index: int, sample: Any) -> None:
        """A sample was read. Training goes on with any type; the audit says how many lack."""
        if index in self._wanted:
            with suppress(Exception):  # whatever a type of the user's raises when looked at
                self.found.append([index, content_of(sample)])

    def note_rows(self, indices: Indices, batch: Any) -> None:
        """The same for samples that were read as one batch; None where none was."""
        if not self._wanted or batch is None:
            return
        named = enumerate(indices.tolist())
        rows = {row: index for row, index in named if index in self._wanted}
        samples = rows_of(batch, list(rows))
        if samples is not None:
            for index, sample in zip(rows.values(), samples, strict=True):
                self.note(index, sample)


def content_of(sample: Any) -> int:
    """The content of a sample as a number of 63 bits.

    Raises:
        Exception: what it holds has no end (it refers to itself), or cannot be looked at.
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest.update, sample)
    return int.from_bytes(digest.digest(), "little") >> 1


def rows_of(batch: Any, rows: list[int]) -> list[Any] | None:
    """Samples of a batch by their place in it; None where it has something without rows."""
    try:
        return [_row(batch, row) for row in rows]
    except (TypeError, IndexError, KeyError):
        return None


def _row(batch: Any, row: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _row(part, row) for name, part in batch.items()}
    if isinstance(batch, list | tuple) and not isinstance(batch[0], str | bytes | int | float):
        return [_row(part, row) for part in batch]
    return batch[row]


def _feed(take: Take, node: Any) -> None:
    """Give on the bytes that tell this value from all others, types of containers apart."""
    if isinstance(node, torch.Tensor):
        _feed_tensor(take, node)
    elif isinstance(node, int) and node.bit_length() > 63:  # numpy has no such number
        take(f"{node}\0".encode())
    elif isinstance(node, np.ndarray | np.generic | bool | int | float | complex):
        _feed_array(take, np.asarray(node))
    elif isinstance(node, str | bytes | type(None)):
        take(f"{type(node).__name__} {node!r}\0".encode("utf-8", "backslashreplace"))
    elif isinstance(node, Enum):  # which refers to its class, and that to it
        take(f"{type(node).__name__}.{node.name}\0".encode("utf-8", "backslashreplace"))
    elif isinstance(node, Mapping):
        take(b"{")
        for name in sorted(node, key=str):
            take(f"{name!s}\0".encode("utf-8", "backslashreplace"))
            _feed(take, node[name])
        take(b"}")
    elif isinstance(node, list | tuple):
        take(b"[")
        for part in node:
            _feed(take, part)
        take(b"]")
    elif hasattr(node, "__array__") or hasattr(node, "__array_interface__"):  # as a PIL image
        _feed_array(take, np.asarray(node))
    elif hasattr(node, "__dict__") and vars(node):
        _feed(take, vars(node))
    else:
        take(f"{type(node).__module__}.{type(node).__qualname__}\0".encode())


def _feed_tensor(take: Take, tensor: torch.Tensor) -> None:
    try:
        array = tensor.detach().numpy()
    except (TypeError, RuntimeError):  # which numpy has not: bfloat16, sparse, on a device
        pass
    else:
        _feed_array(take, array)
        return
    if tensor.layout != torch.strided or tensor.is_quantized:
        tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    take(f"{str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}\0".encode())
    if plain.numel():
        take(plain.reshape(-1).view(torch.uint8).numpy().data)


def _feed_array(take: Take, array: np.ndarray[Any, Any]) -> None:
    if array.dtype.hasobject:
        _feed(take, array.tolist())
        return
    take(_form(array.dtype, array.shape))
    take(array.tobytes())


@lru_cache(maxsize=256)
def _form(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return f"{dtype.name} {list(shape)}\0".encode()
