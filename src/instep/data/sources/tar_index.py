"""Index of a tar file: where each record lies, found once and kept by the host.

An index is kept in `INSTEP_CACHE` (default `~/.cache/instep`) under a hash of the file's path,
size and time of change; one that cannot be written is made again by the next process. Way in:
`index_of`.
"""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from instep.data.order import Indices
from instep.data.raw.tar import records_of
from instep.data.shards.urls.remote import cache
from instep.data.sources.files import State, state_of
from instep.errors import DataError
from instep.plain_file import check_plain, read_plain, replace_plain

_FORMAT = 2


class Index(NamedTuple):
    """Records of one file, in their order."""

    keys: list[str]
    starts: Indices
    """[records + 1]: where the members of each begin below."""
    fields: list[str]
    """Names that members have, each once."""
    field: Indices
    """[members]: which of `fields`."""
    offset: Indices
    """[members]: first byte in the file."""
    size: Indices
    """[members]: bytes."""
    state: State
    """Size and time of change that the file had."""

    def members(self, record: int) -> list[tuple[str, int, int]]:
        """(field, offset, size) of each member of a record."""
        chosen = slice(int(self.starts[record]), int(self.starts[record + 1]))
        numbers = zip(
            self.field[chosen].tolist(),
            self.offset[chosen].tolist(),
            self.size[chosen].tolist(),
            strict=True,
        )
        return [(self.fields[field], offset, size) for field, offset, size in numbers]


def index_of(path: Path) -> Index:
    """Read the index of a tar file, from the cache of this host if it is there.

    Raises:
        DataError: the file cannot be read, is damaged or compressed, or a record in it is bad.
    """
    try:
        check_plain(path)
        with open(path, "rb") as file:
            head, state = file.read(4), state_of(file.fileno())
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    if head[:2] == b"\x1f\x8b" or head == b"\x28\xb5\x2f\xfd":
        raise DataError(
            f"{path} is compressed, so no sample can be read without all before it. Decompress it."
        )
    if not state[0]:
        raise DataError(f"{path} is empty: a tar file is expected.")
    kept = _kept(path, state)
    with suppress(OSError, msgspec.MsgspecError, ValueError):
        return _decoded(read_plain(kept), state)
    found = _made(path, state)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_plain(kept, _encoded(found))
    return found


def _kept(path: Path, state: State) -> Path:
    said = f"{_FORMAT} {path.resolve()} {state[0]} {state[1]}"
    return cache() / "tars" / hashlib.sha256(said.encode(errors="surrogateescape")).hexdigest()[:32]


def _made(path: Path, state: State) -> Index:
    keys, starts, members = list[str](), [0], list[tuple[int, int, int]]()
    known = dict[str, int]()
    for key, stored in records_of(path):
        keys.append(key)
        for each in stored:
            members.append((known.setdefault(each.field, len(known)), each.offset, each.size))
        starts.append(len(members))
    table = np.array(members, np.int64).reshape(-1, 3)
    field, offset, size = table.T.copy()
    return Index(keys, np.array(starts, np.int64), list(known), field, offset, size, state)


def _encoded(index: Index) -> bytes:
    arrays = [
        array.astype("<i8").tobytes()
        for array in (index.starts, index.field, index.offset, index.size)
    ]
    return msgspec.msgpack.encode([index.keys, index.fields, *arrays])


def _decoded(data: bytes, state: State) -> Index:
    keys, fields, *arrays = msgspec.msgpack.decode(
        data, type=tuple[list[str], list[str], bytes, bytes, bytes, bytes]
    )
    starts, field, offset, size = (np.frombuffer(array, "<i8").astype(np.int64) for array in arrays)
    if len(starts) != len(keys) + 1 or {*map(len, (field, offset, size))} != {int(starts[-1])}:
        raise ValueError("damaged")
    return Index(keys, starts, fields, field, offset, size, state)
