"""Files of tokens: which formats there are, and where their tokens and documents lie.

- `.bin` with an `.idx` beside it, as Megatron writes: the `.idx` has the type and the documents;
- `.bin` that begins with the header of llm.c;
- any other: numbers of one type and nothing else, as nanoGPT writes;
- `.npy`, numpy's own, of one axis.

Only headers and `.idx` are read here. Way in: `token_file`.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from instep.data.order import Indices
from instep.data.sources.files import State, state_of
from instep.errors import DataError
from instep.plain_file import check_plain

_MEGATRON = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1)
_MEGATRON_TYPES = dict(enumerate(("u1", "i1", "<i2", "<i4", "<i8", "<f8", "<f4", "<u2"), 1))
_LLM_C = {(20240520, 1): "<u2", (20240801, 7): "<u4"}
"""Maps (magic, version) to the type of a token."""
_LLM_C_HEADER = 256 * 4


class TokenFile(NamedTuple):
    """Where the tokens of a file lie."""

    path: Path
    dtype: np.dtype[Any]
    offset: int
    """The byte of the first token."""
    tokens: int
    begins: Indices | None = None
    """[documents] int64, ascending: the first token of each; None if the file does not say."""
    state: State = (0, 0)
    """Size and time of change that the file had."""

    def open(self) -> np.ndarray[Any, Any]:
        """[tokens] of its dtype, mapped into memory."""
        return np.memmap(self.path, self.dtype, "r", self.offset, (self.tokens,))


def token_file(path: Path, dtype: str | None) -> TokenFile:
    """Look at a file.

    Args:
        path: of it; the suffix says the format.
        dtype: type of a token, for a `.bin` that does not say it; None for uint16.

    Raises:
        DataError: it cannot be read, is damaged, or has tokens of another type.
    """
    try:
        check_plain(path)
        state = state_of(path)
        found = _numpy(path) if path.suffix == ".npy" else _binary(path, dtype)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error
    if found.dtype.kind not in "iu" or found.dtype == np.uint64:
        raise DataError(
            f"{path} has {found.dtype.name}: tokens are whole numbers of up to 63 bits."
        )
    if dtype is not None and np.dtype(dtype).newbyteorder("<") != found.dtype.newbyteorder("<"):
        raise DataError(
            f"{path} says itself that its tokens are {found.dtype.name}, and dtype = {dtype!r} was "
            "given. Leave dtype out."
        )
    return found._replace(state=state)


def _numpy(path: Path) -> TokenFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is no .npy file of numbers, or damaged: {error}.") from error
    if not isinstance(array, np.memmap) or array.ndim != 1:
        raise DataError(f"{path} has shape {list(array.shape)}: one axis of tokens is wanted.")
    return TokenFile(path, array.dtype, array.offset, len(array))


def _binary(path: Path, dtype: str | None) -> TokenFile:
    index, size = path.with_suffix(".idx"), path.stat().st_size
    if path.suffix == ".bin" and index.exists():
        return _megatron(path, index, size)
    with open(path, "rb") as file:
        head = file.read(_LLM_C_HEADER)
    words = struct.unpack("<3i", head[:12]) if len(head) == _LLM_C_HEADER else (0, 0, 0)
    if kind := _LLM_C.get(words[:2]):
        found = TokenFile(path, np.dtype(kind), _LLM_C_HEADER, words[2])
        _check_size(path, size, _LLM_C_HEADER + words[2] * found.dtype.itemsize, "its header says")
        return found
    type_ = np.dtype(dtype or "uint16").newbyteorder("<")
    if size % type_.itemsize:
        raise DataError(
            f"{path} has {size:,} bytes, no multiple of {type_.itemsize}: it is truncated, or its "
            f"tokens are not {type_.name} (say so with dtype)."
        )
    return TokenFile(path, type_, 0, size // type_.itemsize)


def _megatron(path: Path, index: Path, size: int) -> TokenFile:
    """The index: header, type, counts; lengths and places of sequences; where documents begin."""
    check_plain(index)
    data, head = index.read_bytes(), len(_MEGATRON)
    if data[:head] != _MEGATRON or len(data) < head + 17:
        raise DataError(
            f"{index} begins with {data[:9]!r}: an index of Megatron, version 1, is expected. "
            f"If it does not belong to {path.name}, move it elsewhere."
        )
    code, sequences, bounds = struct.unpack_from("<BQQ", data, head)
    if code not in _MEGATRON_TYPES:
        raise DataError(f"{index} has the type {code}: 1 to {len(_MEGATRON_TYPES)} are known.")
    at, dtype = head + 17, np.dtype(_MEGATRON_TYPES[code])
    wanted = at + sequences * 12 + bounds * 8
    if len(data) not in (wanted, wanted + sequences):  # a byte more for each of several kinds
        raise DataError(
            f"{index} has {len(data):,} bytes: {wanted:,} are expected for {sequences:,} sequences "
            f"and {bounds:,} bounds of documents. It is truncated or damaged."
        )
    lengths = np.frombuffer(data, "<i4", sequences, at).astype(np.int64)
    places = np.frombuffer(data, "<i8", sequences, at + sequences * 4)
    documents = np.frombuffer(data, "<i8", bounds, at + sequences * 12)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    if (lengths < 0).any() or not np.array_equal(places, ends[:-1] * dtype.itemsize):
        raise DataError(f"{index} has sequences that do not lie behind each other. It is damaged.")
    if bounds and (documents[0] or documents[-1] != sequences or (np.diff(documents) < 0).any()):
        raise DataError(f"{index} has documents that are not its sequences. It is damaged.")
    _check_size(path, size, int(ends[-1]) * dtype.itemsize, f"{index.name} says")
    return TokenFile(path, dtype, 0, int(ends[-1]), ends[documents[:-1]])


def _check_size(path: Path, size: int, wanted: int, who: str) -> None:
    if size != wanted:
        raise DataError(
            f"{path} has {size:,} bytes: {wanted:,} are expected, as {who}. It is truncated or "
            "damaged."
        )
