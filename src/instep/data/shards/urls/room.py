"""Room in the cache of a host, into which several processes bring files at the same time.

Each reserves the room of its file before the first byte comes, so that files and downloads have at
most as many bytes as the limit, and those of one download beside. A download for which there is no
room, since others have reserved it or the file is larger than the limit, is that one: further ones
wait for it, and it waits for nobody. How files come is not known. Way in: `CacheRoom`.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from io import FileIO
from pathlib import Path

from instep.data.shards.urls.locks import locked
from instep.data.shards.urls.marks import touch

_LEFT_S = 600.0
"""A download to which nothing was written for so long is of a process that was killed."""


class CacheRoom:
    """Room for files in the folders of a folder.

    Args:
        root: that folder; a file that is whole is `*/*.arrow` in it, a download `*/.*.arrow.*`.
        limit: bytes that all may have.
    """

    def __init__(self, root: Path, limit: int) -> None:
        self._root, self.limit = root, limit

    @contextmanager
    def reserved(self, size: int) -> Iterator[Callable[[Path, Path], None]]:
        """Keep room for a file, until it is in its place or is not to come.

        Args:
            size: bytes of the file.

        Yields:
            What renames a file whose bytes are all here: from its path to its place.
        """
        with ExitStack() as stack:
            claim = self._claim(size)
            if claim is None:
                stack.enter_context(locked(self._root / ".beside.lock"))
                if (claim := self._claim(size)) is None:
                    self._make_room_beside(size)
                else:
                    stack.pop_all().close()  # others have left room meanwhile
            try:
                yield lambda path, place: self._put(path, place, size, claim)
            finally:
                if claim is not None:
                    _release(claim)

    def _claim(self, size: int) -> FileIO | None:
        """A file that is locked for as long as it keeps room; None if there is no room."""
        with locked(self._root / ".room.lock"):
            self._remove_left()
            wanted = self._claimed() + size
            if wanted > self.limit or not self._make_room(wanted, self.limit):
                return None
            claim = FileIO(str(self._root / f".room-{secrets.token_hex(8)}.lock"), "x")
            fcntl.flock(claim, fcntl.LOCK_EX)
            claim.write(b"%d" % size)
            return claim

    def _make_room_beside(self, size: int) -> None:
        with locked(self._root / ".room.lock"):
            self._make_room(self._claimed() + size, self.limit + size)

    def _put(self, path: Path, place: Path, size: int, claim: FileIO | None) -> None:
        with locked(self._root / ".room.lock"):
            if claim is not None:
                _release(claim)
            self._make_room(self._claimed() + size, self.limit)
            touch(path)
            path.replace(place)

    def _claimed(self) -> int:
        """Bytes that processes keep room for; call it with the lock of all."""
        total = 0
        for path in self._root.glob(".room-*.lock"):
            with suppress(PermissionError), open(path, "rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    path.unlink()  # its process was killed
                except BlockingIOError:
                    total += int(file.read() or 0)
        return total

    def _make_room(self, wanted: int, limit: int) -> bool:
        """Remove what was not used for longest; processes that have mapped it keep it.

        Args:
            wanted: bytes beside those of whole files.
            limit: bytes of both.

        Returns:
            Whether there is room.
        """
        found = list(_cached(self._root))
        total = sum(about.st_size for _, about in found)
        here = sum(_size(path) for path in self._root.glob("*/.*.arrow.*"))  # of what is wanted
        room = min(limit, total + here + shutil.disk_usage(self._root).free)
        for path, about in sorted(found, key=lambda each: each[1].st_atime):
            if total + wanted <= room:
                break
            path.unlink(missing_ok=True)
            total -= about.st_size
        return total + wanted <= room

    def _remove_left(self) -> None:
        for left in self._root.glob("*/.*.arrow.*"):
            with suppress(OSError):  # else it is of a process that was killed
                old = time.time() - left.stat().st_mtime > _LEFT_S
                if old and left.suffix != ".lock":
                    left.unlink()


def _release(claim: FileIO) -> None:
    if not claim.closed:
        Path(str(claim.name)).unlink(missing_ok=True)  # a fork may have it open, and locked
        claim.close()


def _size(path: Path) -> int:
    with suppress(OSError):
        return path.stat().st_size
    return 0


def _cached(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for path in root.glob("*/*.arrow"):
        with suppress(FileNotFoundError):
            if not path.name.startswith("."):
                yield path, path.stat()
