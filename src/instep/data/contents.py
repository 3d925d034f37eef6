"""What a sample holds, as one number; and which samples of an epoch have theirs recorded.

The number is taken of a sample as the dataset returned it, before augmentation
and collation. It does not depend on how it was read: alone, among others, or as
a row of a batch, where a number has become a tensor and a tuple a list.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from instep.data.order import Indices, key
from instep.events import CONTENTS, Appender, cut_torn_record

Flags = np.ndarray[Any, np.dtype[np.bool_]]

_OF_CONTENT = 3
_MOST, _ONE_IN = 512, 64
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class Chosen:
    """Which samples of an epoch are recorded: the same ones whoever reads them.

    Args:
        samples: of the dataset.
        seed: of the job.
        which: all, or a keyed sample: 1 in 64, or as much less as makes about 512 an epoch.
    """

    def __init__(self, samples: int, seed: int, which: Literal["sample", "all"]) -> None:
        self._seed, self._all = seed, which == "all"
        one_in = max(_ONE_IN, samples // _MOST)
        self._below = np.uint64((1 << 64) // one_in)

    def __call__(self, epoch: int, indices: Indices) -> Flags:
        """[count] bool, for [count] indices."""
        if self._all:
            return np.ones(len(indices), np.bool_)
        words = indices.astype(np.uint64)
        words += np.uint64(key(self._seed, _OF_CONTENT, epoch))
        words *= _SPREAD
        words ^= words >> np.uint64(32)
        words *= _SPREAD
        flags: Flags = words < self._below
        return flags


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


def content_of(sample: Any) -> int:
    """The content of a sample as a number of 63 bits.

    Raises:
        Exception: what it holds has no end (it refers to itself), or cannot be looked at.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in _parts(sample):
        digest.update(part)
    return int.from_bytes(digest.digest(), "little") >> 1


def noted(index: int, sample: Any) -> list[list[int]]:
    """[index, content] of a sample, alone in a list; an empty one where nothing can be told of it.

    Training goes on with any type of sample; the audit says how many were not recorded.
    """
    try:
        return [[index, content_of(sample)]]
    except Exception:  # whatever a type of the user's raises when it is looked at
        return []


def rows_of(batch: Any, rows: Iterator[int] | list[int]) -> list[Any] | None:
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


def _parts(node: Any) -> Iterator[bytes | memoryview]:
    """The bytes that tell this value from all others, types of containers apart."""
    if isinstance(node, torch.Tensor):
        yield from _of_tensor(node)
    elif isinstance(node, int) and node.bit_length() > 63:  # numpy has no such number
        yield f"{node}\0".encode()
    elif isinstance(node, np.ndarray | np.generic | bool | int | float | complex):
        yield from _of_array(np.asarray(node))
    elif isinstance(node, str | bytes | type(None)):
        yield f"{type(node).__name__} {node!r}\0".encode("utf-8", "backslashreplace")
    elif isinstance(node, Enum):  # which refers to its class, and that to it
        yield f"{type(node).__name__}.{node.name}\0".encode("utf-8", "backslashreplace")
    elif isinstance(node, Mapping):
        yield b"{"
        for name in sorted(node, key=str):
            yield f"{name!s}\0".encode("utf-8", "backslashreplace")
            yield from _parts(node[name])
        yield b"}"
    elif isinstance(node, list | tuple):
        yield b"["
        for part in node:
            yield from _parts(part)
        yield b"]"
    elif hasattr(node, "__array__") or hasattr(node, "__array_interface__"):  # as a PIL image
        yield from _of_array(np.asarray(node))
    elif hasattr(node, "__dict__") and vars(node):
        yield from _parts(vars(node))
    else:
        yield f"{type(node).__module__}.{type(node).__qualname__}\0".encode()


def _of_tensor(tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    if tensor.layout != torch.strided or tensor.is_quantized:
        tensor = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    yield f"{str(plain.dtype).removeprefix('torch.')} {list(plain.shape)}\0".encode()
    if plain.numel():
        yield plain.reshape(-1).view(torch.uint8).numpy().data


def _of_array(array: np.ndarray[Any, Any]) -> Iterator[bytes | memoryview]:
    if array.dtype.hasobject:
        yield from _parts(array.tolist())
        return
    yield f"{array.dtype.name} {list(array.shape)}\0".encode()
    yield np.ascontiguousarray(array).tobytes()
