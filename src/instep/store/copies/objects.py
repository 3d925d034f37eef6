"""Objects below a URL of a file system: listed, read, written and removed.

An object is written in one go, by an attempt that is given up when nothing moves any more. Such an
attempt may still be under way: it has a file of its own, so it can write only the bytes that it was
to write. What the objects are for is known to `upload.py`. Ways in: `Objects`, `check_url`.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

from instep.data.shards.urls.download import WrongBytes, file_system, moving
from instep.errors import SpecError, one_line
from instep.words import is_url, shown_url

SLOW = 1e6
"""Bytes a second that a file system takes at least, where it takes many at once: the end of a
file, or what it calls a block."""

PAUSES_S = (0.1, 0.4)
"""Before an object is sent again that failed; then all of it waits, longer each time."""

CONNECTS_S = 5.0
"""How long a file system may take that connects before anything is asked."""

_CHUNK = 1 << 20


class Objects:
    """Objects below a URL; errors of the file system are raised as they come."""

    moved_at: float
    """When an object was last written or removed there; of `time.monotonic`. Answers do not count:
    a store that gives them may take nothing."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._system: Any = None
        self.moved_at = time.monotonic()

    def names(self, folder: str = "") -> dict[str, int]:
        """The names in a folder, with sizes; empty if there is none."""
        place = f"{self._url}/{folder}".rstrip("/")
        try:
            found = self._asked(lambda files: files.ls(place, detail=True))
        except FileNotFoundError:
            return {}
        return {Path(each["name"]).name: int(each.get("size") or 0) for each in found}

    def read(self, name: str) -> bytes | None:
        """The bytes of an object; None if there is none of this name."""
        try:
            found: bytes = self._asked(lambda files: files.cat_file(f"{self._url}/{name}"))
        except FileNotFoundError:
            return None
        return found

    def remove(self, name: str) -> None:
        """Remove an object, if it is there."""
        with suppress(FileNotFoundError):
            self._asked(lambda files: files.rm_file(f"{self._url}/{name}"))
            self.moved_at = time.monotonic()

    def remove_folder(self, name: str, first: str) -> None:
        """Remove the objects in a folder, beginning with the one called `first`."""
        for file in (first, *self.names(name)):
            self.remove(f"{name}/{file}")
        with suppress(Exception):  # only some file systems have folders
            self._asked(lambda files: files.rmdir(f"{self._url}/{name}"))

    def send(self, name: str, source: bytes | IO[bytes], size: int) -> str:
        """Write an object; returns the SHA-256 of what was sent.

        Args:
            name: of the object.
            source: its bytes, or an open file of them.
            size: how many they are.
        """
        url = f"{self._url}/{name}"
        for pause_s in (*PAUSES_S, None):  # a busy store says so of an object now and then
            try:
                sent = self._attempt(url, source, size)
                break
            except FileNotFoundError as error:  # which is no file of the run
                raise OSError(one_line(error)) from None
            except Exception as error:  # of whatever kind the file system has
                if pause_s is None or isinstance(error, WrongBytes):
                    raise
                time.sleep(pause_s)
        self.moved_at = time.monotonic()
        return sent

    def _files(self) -> Any:
        if (system := self._system) is None:
            system = self._system = file_system(self._url)
        return system

    def _moving(self, read: Callable[[Callable[..., None]], Any]) -> Any:
        try:
            return moving(read)
        except FileNotFoundError:
            raise
        except Exception:
            self._system = None  # its connection may be what is broken
            raise

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        return self._moving(lambda _: ask(self._files()))

    def _attempt(self, url: str, source: bytes | IO[bytes], size: int) -> str:
        # Here, not in the thread: by then `source` may be closed, and its number another file's.
        if isinstance(source, bytes):
            held: AbstractContextManager[bytes | IO[bytes]] = nullcontext(source)
        else:
            held = os.fdopen(os.dup(source.fileno()), "rb")

        def attempt(moves: Callable[..., None]) -> str:
            with held as own:
                return self._made(url, own, size, moves)

        sent: str = self._moving(attempt)
        return sent

    def _made(
        self, url: str, source: bytes | IO[bytes], size: int, moves: Callable[..., None]
    ) -> str:
        """Write an object, in a folder that is made if the file system has folders."""
        try:
            return self._write(url, source, size, moves)
        except FileNotFoundError:  # or there is no such bucket
            files = self._files()
            root = files._strip_protocol(url).partition("/")[0] or "/"
            if not files.exists(root):
                raise
            files.makedirs(url.rpartition("/")[0], exist_ok=True)
            return self._write(url, source, size, moves)

    def _write(
        self, url: str, source: bytes | IO[bytes], size: int, moves: Callable[..., None]
    ) -> str:
        files = self._files()
        digest, target = hashlib.sha256(), files.open(url, "wb")
        block = min(int(getattr(target, "blocksize", None) or 0), size)
        try:
            moves(block / SLOW)
            for data in _chunks(source):
                digest.update(data)
                target.write(data)
                moves(block / SLOW)
            moves(size / SLOW)
            target.close()
        except BaseException:
            _discard(target)
            raise
        moves()
        if (there := files.info(url).get("size")) not in (None, size):
            raise WrongBytes(f"it has {there:,} bytes, and {size:,} were written")
        return digest.hexdigest()


def check_url(to: str) -> None:
    """Refuse a URL where nothing can be written, before there is something to write.

    Raises:
        SpecError: it is of a web server, or needs a package that is not installed.
    """
    if to.startswith(("http://", "https://")):
        raise SpecError(
            f"checkpoint.copy_to = {shown_url(to)!r}: a web server gives files, and takes none. "
            "Give a URL such as s3://bucket/runs, or a folder."
        )
    if is_url(to):
        try:
            moving(lambda _: file_system(to), CONNECTS_S)
        except SpecError as error:
            raise SpecError(f"checkpoint.copy_to: {error}") from None
        except Exception:  # one that cannot be reached now is a warning, once there is a copy
            pass


def _discard(target: Any) -> None:
    """Close what was not written to its end, and leave no object: to close it would make one."""
    with suppress(Exception):
        target.discard()
    with suppress(Exception):
        target.closed = True


def _chunks(source: bytes | IO[bytes]) -> Iterator[bytes]:
    """The bytes, from the first on, wherever a file that was opened once is read by others."""
    if isinstance(source, bytes):
        yield source
        return
    at = 0
    while data := os.pread(source.fileno(), _CHUNK, at):
        at += len(data)
        yield data
