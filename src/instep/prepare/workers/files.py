"""Files between the master of a preparation and a machine that does not have them.

A raw file that a host does not have is read from the master, a range at a time; the files of a
result are sent to it, and count once they are whole. Nothing here knows connections. Ways in, on a
host: `RawFiles`, `parts_of`; at the master: `Shelf`, `Arrivals`.
"""

from __future__ import annotations

import io
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterator
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from instep.data.raw.opened import Elsewhere
from instep.errors import PeerError
from instep.plain_file import plain
from instep.prepare.messages import Done, Get, Got, Look, Looked, Part, Sent

RANGE = 64 << 10
"""Bytes of a raw file that are asked for at a time. A pipe takes so many at once, so a host does
not wait for a worker that was stopped."""

PART = 1 << 20
"""Bytes of a result that are sent at a time."""

_NAME = re.compile(r"[0-9a-f]{24}\.(arrow|bad|again|done)")

ORDER = ("arrow", "bad", "again", "done")
"""Files of a result, as far as they are there; it counts once the last is."""

Ask = Callable[[Look | Get], Looked | Got]


def digest_of(path: str) -> bytes:
    """A digest of the first, middle and last bytes of a file, and of how many there are.

    Raises:
        OSError: it cannot be read.
    """
    found = blake2b(digest_size=16)
    with open(path, "rb", opener=plain) as file:
        size = os.fstat(file.fileno()).st_size
        found.update(size.to_bytes(8, "little"))
        for first in (0, max(0, size // 2), max(0, size - RANGE)):
            file.seek(first)
            found.update(file.read(RANGE))
    return found.digest()


class RawFiles:
    """Raw files on a host: its own where they are the master's, else the master's.

    Args:
        ask: the master.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask, self._known = ask, dict[str, Elsewhere | None]()

    def find(self, path: str) -> Elsewhere | None:
        """A file that has to come from the master; None if this machine has it."""
        if path not in self._known:
            self._known[path] = self._look(path)
        return self._known[path]

    def _look(self, path: str) -> Elsewhere | None:
        there = self._ask(Look(path))
        assert isinstance(there, Looked), "the reply to Look"
        if not there.digest or there == looked(path):
            return None
        return Elsewhere(there.size, partial(_open, self._ask, path, there.size))


def looked(path: str) -> Looked:
    """Facts that tell this machine's file from another at the same path."""
    try:
        about = os.stat(path)
        return Looked(about.st_size, about.st_mtime_ns, digest_of(path))
    except OSError:
        return Looked(0, 0, b"")


def _open(ask: Ask, path: str, size: int) -> BinaryIO:
    return io.BufferedReader(_Remote(ask, path, size), RANGE)


class _Remote(io.RawIOBase):
    """A file of the master."""

    def __init__(self, ask: Ask, path: str, size: int) -> None:
        self._ask, self._path, self._size, self._place = ask, path, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, place: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        self._place = max(0, base + place)
        return self._place

    def readinto(self, into: object) -> int:
        view = memoryview(into).cast("B")  # type: ignore[arg-type]
        size = min(len(view), RANGE, max(0, self._size - self._place))
        if not size:
            return 0
        found = self._ask(Get(self._path, self._place, size))
        assert isinstance(found, Got), "the reply to Get"
        if not found.data:
            raise OSError(f"the master cannot read {self._path} any more")
        view[: len(found.data)] = found.data
        self._place += len(found.data)
        return len(found.data)


class Shelf:
    """Raw files that the master gives to hosts.

    Args:
        paths: of the sources; nothing else is given.
    """

    def __init__(self, paths: Collection[str]) -> None:
        self._paths = frozenset(paths)

    def answer(self, asked: Look | Get) -> Looked | Got:
        """The reply to a worker."""
        if isinstance(asked, Look):
            return looked(asked.path) if asked.path in self._paths else Looked(0, 0, b"")
        try:
            if asked.path in self._paths:
                with open(asked.path, "rb", opener=plain) as file:
                    return Got(os.pread(file.fileno(), min(asked.size, RANGE), asked.first))
        except OSError:
            pass  # the worker says which file it is
        return Got(b"")


def parts_of(folder: Path, key: str) -> Iterator[Part | Sent]:
    """The files of a result, which are removed once they were taken."""
    for suffix in ORDER:
        path, size, crc32 = folder / f"{key}.{suffix}", 0, 0
        if not path.exists():
            continue
        with open(path, "rb", opener=plain) as file:
            while data := file.read(PART):
                size, crc32 = size + len(data), zlib.crc32(data, crc32)
                yield Part(data)
        yield Sent(path.name, size, crc32)
        path.unlink()


class Arrivals:
    """Files of results that a worker on a host sends.

    Args:
        folder: of results.
        who: tells it from all other workers.
    """

    def __init__(self, folder: Path, who: str) -> None:
        self._folder, self._beside = folder, folder / f".arriving.{who}"
        self._file: BinaryIO | None = None
        self._size, self._crc32 = 0, 0

    def take(self, message: Part | Sent) -> None:
        """Take in the next bytes, or the end of a file.

        Raises:
            PeerError: they are not what was sent.
            OSError: they cannot be written.
        """
        if self._file is None:
            self._file = open(self._beside, "wb")  # noqa: SIM115 closed by its end or discard
            self._size, self._crc32 = 0, 0
        if isinstance(message, Part):
            self._file.write(message.data)
            self._size += len(message.data)
            self._crc32 = zlib.crc32(message.data, self._crc32)
            return
        self._file.close()
        self._file = None
        if (self._size, self._crc32) != (message.bytes, message.crc32):
            raise PeerError(f"what it sent of {message.name} was damaged on the way")
        if not _NAME.fullmatch(message.name):
            raise PeerError(f"it sent {message.name!r}, which is no file of a result")
        self._beside.replace(self._folder / message.name)

    def moved(self, answer: Done) -> Done:
        """Its answer, with where the files are now."""
        value, again = answer.value, answer.again
        if isinstance(value, dict) and "parts" in value:
            file = str(self._folder / f"{value['key']}.arrow")
            value = {**value, "parts": [{"file": file, "first": 0, "samples": value["samples"]}]}
        return Done(answer.number, value, str(self._folder / Path(again).name) if again else "")

    def discard(self) -> None:
        """Leave nothing behind that is not whole."""
        if self._file is not None:
            self._file.close()
        self._beside.unlink(missing_ok=True)
