"""How named tensors lie in a slot of a memory file: the layout as JSON, then the tensors.

It knows no file and no commit. Way in: `host_memory.py:HostMemory`.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import torch

from instep.errors import CheckpointError

LENGTH = struct.Struct("<Q")
_ALIGNED = 64


_WHOLE, _PAGES, _PAGE = 1 << 22, 8, 4096
"""A checksum is over all bytes of a slot up to this size; of more, over one page in so many."""


class TensorSpec(NamedTuple):
    """What one tensor of a layout looks like."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class TensorSlot(NamedTuple):
    """The tensors of a slot, as views of its memory."""

    head: bytes
    tensors: dict[str, torch.Tensor]
    words: torch.Tensor
    """[n] int64: all of it."""

    def checksum(self) -> int:
        """Sums weighted by their place, as they cost less than the copy before. A slot that another
        process writes differs in whole tensors, so one page in a few of a large slot tells."""
        words, page = self.words, _PAGE // 8
        large = len(words) > _WHOLE // 8
        row = _PAGES * page if large else page
        whole = len(words) // row * row
        pages = words[:whole].view(-1, row)[:, :page]
        sums = [pages.sum(1), words[whole:]]
        if not large:  # finer: tensors that lie in one page
            sums.append(pages.sum(0))
        every = torch.cat(sums)
        return int((every * torch.arange(1, 2 * len(every), 2)).sum())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def bytes_of(head: bytes, layout: Mapping[str, TensorSpec]) -> int:
    """Bytes of a slot."""
    sizes = [torch.Size(shape).numel() * dtype.itemsize for shape, dtype in layout.values()]
    return _aligned(len(head)) + sum(map(_aligned, sizes))


def mapped(memory: mmap.mmap, head: bytes, layout: Mapping[str, TensorSpec]) -> TensorSlot:
    """The slot of this layout in memory of `bytes_of` bytes."""
    tensors, place = {}, _aligned(len(head))
    for name, (shape, dtype) in layout.items():
        empty = torch.empty(shape, dtype=dtype, device="meta")
        count = empty.numel()
        tensors[name] = (
            torch.frombuffer(memory, dtype=dtype, count=count, offset=place).view(shape)
            if count
            else torch.empty(shape, dtype=dtype)
        )
        place += _aligned(count * dtype.itemsize)
    return TensorSlot(head, tensors, torch.frombuffer(memory, dtype=torch.int64))


def encoded(layout: Mapping[str, TensorSpec]) -> bytes:
    """A layout as it is written before its tensors."""
    rows = [
        (name, str(dtype).removeprefix("torch."), shape) for name, (shape, dtype) in layout.items()
    ]
    body = msgspec.json.encode(rows)
    return LENGTH.pack(len(body)) + body


def decoded(head: bytes) -> dict[str, TensorSpec]:
    """The layout that `encoded` wrote."""
    rows = msgspec.json.decode(head[LENGTH.size :])
    return {name: TensorSpec(tuple(shape), getattr(torch, dtype)) for name, dtype, shape in rows}


def check_layout(found: Mapping[str, TensorSpec], wanted: Mapping[str, TensorSpec]) -> None:
    """Raise CheckpointError if the tensors that were found are others than those wanted."""
    for name in {**wanted, **found}:
        here, there = (_said(each.get(name)) for each in (found, wanted))
        if here != there:
            raise CheckpointError(
                f"the memory that a worker left on this host has {name!r} as {here}, and this "
                f"worker needs {there}: it was another model or strategy. Resume the run."
            )


def _said(spec: TensorSpec | None) -> str:
    if spec is None:
        return "nothing"
    return f"{str(spec.dtype).removeprefix('torch.')} {list(spec.shape)}"
