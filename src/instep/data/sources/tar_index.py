"""Index of a tar file: where each record lies, found once and kept by the host.

An index is kept in `INSTEP_CACHE` (default `~/.cache/instep`) under a hash of the file's path,
size and time of change; one that cannot be written is made again by the next process. Way in:
`index_of`.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from instep.data.order import Indices
from instep.data.raw.tar import records_of
from instep.data.shards.urls.remote import cache
from instep.errors import DataError
from instep.plain_file import check_plain, read_plain, replace_plain

_FORMAT = 1


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
        about = os.stat(path)
        with open(path, "rb") as file:
            head = file.read(4)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    if head[:2] == b"\x1f\x8b" or head == b"\x28\xb5\x2f\xfd":
        raise DataError(
            f"{path} is compressed, so no sample can be read without all before it. Decompress it."
        )
    if not about.st_size:
        raise DataError(f"{path} is empty: a tar file is expected.")
    kept = _kept(path, about)
    with suppress(OSError, msgspec.MsgspecError, ValueError):
        return _decoded(read_plain(kept))
    found = _made(path)
    with suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        replace_plain(kept, _encoded(found))
    return found


def _kept(path: Path, about: os.stat_result) -> Path:
    said = f"{_FORMAT} {path.resolve()} {about.st_size} {about.st_mtime_ns}"
    return cache() / "tars" / hashlib.sha256(said.encode(errors="surrogateescape")).hexdigest()[:32]


def _made(path: Path) -> Index:
    keys, starts, members = list[str](), [0], list[tuple[int, int, int]]()
    fields = dict[str, int]()
    for key, stored in records_of(path):
        keys.append(key)
        for field, offset, size in stored:
            members.append((fields.setdefault(field, len(fields)), offset, size))
        starts.append(len(members))
    table = np.array(members, np.int64).reshape(-1, 3)
    return Index(keys, np.array(starts, np.int64), list(fields), *table.T.copy())


def _encoded(index: Index) -> bytes:
    arrays = [array.astype("<i8").tobytes() for array in (index.starts, *index[3:])]
    return msgspec.msgpack.encode([index.keys, index.fields, *arrays])


def _decoded(data: bytes) -> Index:
    keys, fields, *arrays = msgspec.msgpack.decode(
        data, type=tuple[list[str], list[str], bytes, bytes, bytes, bytes]
    )
    starts, *others = (np.frombuffer(array, "<i8").astype(np.int64) for array in arrays)
    if len(starts) != len(keys) + 1 or {len(each) for each in others} != {int(starts[-1])}:
        raise ValueError("damaged")
    rest: Any = others
    return Index(keys, starts, fields, *rest)
