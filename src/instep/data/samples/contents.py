"""The content of a sample as one number, and which samples of an epoch have theirs recorded.

The content is a hash of the sample as the dataset returned it, before augmentation and
collation. It does not depend on how the sample was read: alone, with others, or as a row of
a batch, where a number has become a tensor and a tuple a list.
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


class Selection:
    """Which samples of an epoch are recorded: the same ones whichever process reads them.

    Args:
        samples: in the dataset.
        seed: of the job.
        which: all, or one of each window of 256 in the epoch's order, chosen by a keyed draw;
            in large datasets the windows are larger, so that an epoch records about 512.
    """

    def __init__(self, samples: int, seed: int, which: Literal["sample", "all"]) -> None:
        self._samples, self._seed, self._all = samples, seed, which == "all"
        self._one_in = max(_ONE_IN, samples // _MOST)

    def __call__(self, epoch: int, first: int, stop: int) -> list[int]:
        """The recorded ones among positions [first, stop) of an epoch, counted from `first`."""
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
    """A file of the contents that one worker trained on, as `events.CONTENTS`.

    A sample may be in it several times: a step that was not committed is repeated.
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


class SliceContents:
    """Collects the contents of samples of one slice while they are read.

    Args:
        wanted: indices of the samples whose content is collected.
    """

    def __init__(self, wanted: Iterable[int]) -> None:
        self._wanted = frozenset(wanted)
        self.found: list[list[int]] = []
        """[index, content] of each."""

    def add(self, index: int, sample: Any) -> None:
        """A sample was read. A type without a content is no error; the audit counts those."""
        if index in self._wanted:
            with suppress(Exception):  # a type of the user's may raise anything
                self.found.append([index, content_of(sample)])

    def add_rows(self, indices: Indices, batch: Any) -> None:
        """The same for samples that were read as one batch, which has no rows if it is None."""
        if not self._wanted or batch is None:
            return
        rows = [(row, index) for row, index in enumerate(indices.tolist()) if index in self._wanted]
        for (_, index), sample in zip(rows, rows_of(batch, [row for row, _ in rows]), strict=False):
            self.add(index, sample)


def content_of(sample: Any) -> int:
    """The content of a sample as a number of 63 bits.

    Raises:
        Exception: it refers to itself, or its type raises when it is inspected.
    """
    digest = hashlib.blake2b(digest_size=8)
    _feed(digest.update, sample)
    return int.from_bytes(digest.digest(), "little") >> 1


def rows_of(batch: Any, wanted: Iterable[int]) -> list[Any]:
    """Rows of a batch; none if something in it has no rows."""
    with suppress(TypeError, IndexError, KeyError):
        return [_row(batch, row) for row in wanted]
    return []


def _row(batch: Any, row: int) -> Any:
    if isinstance(batch, Mapping):
        return {name: _row(part, row) for name, part in batch.items()}
    if isinstance(batch, list | tuple) and not isinstance(batch[0], str | bytes | int | float):
        return [_row(part, row) for part in batch]
    return batch[row]


def _feed(take: Take, node: Any) -> None:
    """Feed `take` the bytes that distinguish this value from all others, whatever its container."""
    if isinstance(node, torch.Tensor):
        _feed_tensor(take, node)
    elif isinstance(node, int) and node.bit_length() > 63:  # larger than any integer of numpy
        take(f"{node}\0".encode())
    elif isinstance(node, np.ndarray | np.generic | bool | int | float | complex):
        _feed_array(take, np.asarray(node))
    elif isinstance(node, str | bytes | type(None)):
        take(f"{type(node).__name__} {node!r}\0".encode("utf-8", "backslashreplace"))
    elif isinstance(node, Enum):  # it and its class refer to each other
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
    except (TypeError, RuntimeError):  # bfloat16, sparse, on a device
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
