"""A safetensors file, or several with an index, held open to read tensors or boxes of them.

Only what is asked for is read. Names that are one tensor, and codes of 8 bits that scales decode,
are known here; models are not. Way in: `OpenFile`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from instep.errors import CheckpointError
from instep.state.boxes import Box, whole
from instep.state.files.model_file import HASH_KEY
from instep.state.files.scaled import REMEDY, WeightScale, block_beside, refuse_undecoded, scales_of
from instep.state.files.sharded import open_model
from instep.state.snapshot import TYPES, raw_bytes

FACTS = ("format", "step", "job", "parameters_sha256", HASH_KEY)
"""Entries of a model file's header that are no ties: a parameter may be named like their values.

If one of them is a tie as well, nothing is lost: the model knows its own ties.
"""

_PIECE_BYTES = 4 << 20
"""How much is read at once, or one row, where it cannot be read to where it belongs."""


class OpenFile:
    """A safetensors file, or those of an index, held open: own names, and those tied to them.

    An entry of its metadata that maps an unknown name to a tensor's name is a
    tie, as `safetensors.torch.save_model` writes it.

    Args:
        path: of the file.
        facts: names of entries that are facts about the file, and no ties.
    """

    def __init__(self, path: Path, facts: Container[str] = ()) -> None:
        self._file = open_model(path)
        self._path, self.names = path, dict.fromkeys(self._file.entries)
        self._scales: dict[str, WeightScale] = {}
        self.tied = {
            alias: kept
            for alias, kept in self._file.metadata.items()
            if kept in self.names and alias not in self.names and alias not in facts
        }

    def __enter__(self) -> OpenFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.__exit__(None, None, None)

    def find(self, name: str) -> str | None:
        """The file's own name for `name`, or None."""
        return name if name in self.names else self.tied.get(name)

    def scales_of(self, wanted: Container[str]) -> dict[str, tuple[str, ...]]:
        """As of `scaled.py`: weights that are codes, and the names of what decodes them."""
        return scales_of(self._file.entries, wanted)

    def decode(self, scales: Mapping[str, Sequence[str]]) -> None:
        """Have these weights be decoded by their scales, from here on.

        Raises:
            CheckpointError: scales do not fit their weight.
        """
        block = block_beside(self._path) if scales else None
        for name, (scale, *zero) in scales.items():
            try:
                found = WeightScale(
                    self.tensor(scale),
                    self._file.entries[name].shape,
                    self.tensor(zero[0]) if zero else None,
                    block,
                )
            except ValueError as error:
                raise CheckpointError(
                    f"{self._path}: {name!r} cannot be decoded by {scale!r}: {error}. {REMEDY}"
                ) from error
            self._scales[name] = found

    def refuse_undecoded(
        self, left: Iterable[str], loaded: Iterable[str], decoded: Iterable[str]
    ) -> None:
        """As of `scaled.py`: refuse a file in which other weights are codes too."""
        refuse_undecoded(self._path, self._file.entries, left, loaded, decoded)

    def like(self, name: str) -> Tensor:
        """A tensor of the same shape and type, without values."""
        like = self._stored(name)
        return like.float() if name in self._scales else like

    def _stored(self, name: str) -> Tensor:
        dtype, shape, *_ = self._file.entries[name]
        if dtype not in TYPES:
            raise CheckpointError(
                f"{self._path}: {name} cannot be read: it is {dtype}, which torch does not have."
            )
        return torch.empty(shape, dtype=TYPES[dtype], device="meta")

    def tensor(self, name: str, device: torch.device | str = "cpu") -> Tensor:
        """The whole of it."""
        like = self.like(name)
        read = torch.empty(like.shape, dtype=like.dtype)
        self.copy(name, read, whole(like.shape))
        return read.to(device)

    @torch.no_grad()
    def copy(self, name: str, into: Tensor, box: Box) -> None:
        """Copy a box of a tensor; only the rows that it lies in are read, some at a time.

        Args:
            name: in the file.
            into: [box], of any type of the same kind, on any device.
            box: as of `state/boxes.py`.
        """
        if not into.numel():
            return
        like, scale = self._stored(name), self._scales.get(name)
        shape, dtype = (like.shape or (1,)), like.dtype
        box = box or ((0, 1),)
        into = into.view(1) if into.dim() == 0 else into
        (first, stop), *others = box
        row = dtype.itemsize * math.prod(shape[1:])
        inner = tuple(slice(*each) for each in others)
        direct = (
            into.dtype == dtype
            and scale is None
            and into.device.type == "cpu"
            and into.is_contiguous()
            and all(each == (0, size) for each, size in zip(others, shape[1:], strict=True))
        )
        if direct:
            self._file.read(name, raw_bytes(into).numpy().data, first * row)
            return
        some = max(1, _PIECE_BYTES // row)
        for at in range(first, stop, some):
            part = into[at - first : at - first + some]
            read = torch.empty(len(part), *shape[1:], dtype=dtype)
            self._file.read(name, raw_bytes(read).numpy().data, at * row)
            read = read if scale is None else scale.decode(read, at)
            part.copy_(read[(slice(None), *inner)])

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        mine, theirs = self._file.entries[one], self._file.entries[other]
        if mine[:2] != theirs[:2]:
            return False
        for at in range(0, mine.size, _PIECE_BYTES):
            count = min(_PIECE_BYTES, mine.size - at)
            both = bytearray(count), bytearray(count)
            for name, data in zip((one, other), both, strict=True):
                self._file.read(name, memoryview(data), at)
            if both[0] != both[1]:
                return False
        return True
