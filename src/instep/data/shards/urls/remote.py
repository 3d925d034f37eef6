"""Shards of a file system elsewhere (S3, HTTP and what else fsspec reads), as whole local files.

A file is downloaded once on a host, whichever of its processes wants it first: to another name,
then compared with the size and CRC-32 of the manifest, then renamed. So nobody reads a half-written
or a changed one. The cache has at most `limit` bytes, and one file more (`room.py`). Way in:
`Remote`.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instep.data.shards.urls.download import WrongBytes, copied, file_system, tried
from instep.data.shards.urls.locks import locked
from instep.data.shards.urls.marks import MARK_NS, touch
from instep.data.shards.urls.room import CacheRoom
from instep.errors import RunError, SpecError
from instep.plain_file import crc32_of
from instep.words import shown_url

if TYPE_CHECKING:
    from instep.data.shards.manifest import Shard

CACHE = "INSTEP_CACHE"
"""The environment variable that names the folder of the cache."""

GIGABYTES = "INSTEP_CACHE_GB"
"""The environment variable with how many it may have."""


def cache() -> Path:
    """The folder of this host's cache; it may not be there yet."""
    return Path(os.environ.get(CACHE) or Path("~/.cache/instep").expanduser())


def use_cache(folder: str, gigabytes: float | None) -> None:
    """Make this process, and those that it starts, use a cache as a job says."""
    if folder:
        os.environ[CACHE] = str(Path(folder).expanduser())
    if gigabytes is not None:
        os.environ[GIGABYTES] = str(gigabytes)


@contextmanager
def cache_in(folder: str, gigabytes: float | None) -> Iterator[None]:
    """Use a cache as a job says, in this context only: the caller may have other jobs."""
    before = {name: os.environ.get(name) for name in (CACHE, GIGABYTES)}
    use_cache(folder, gigabytes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def limit_of_cache() -> int:
    """Bytes of shards that the cache of this host may have, and of other files as many.

    Raises:
        SpecError: the environment has no number for it.
    """
    said = os.environ.get(GIGABYTES) or "20"
    try:
        return int(float(said) * 10**9)
    except (ValueError, OverflowError):
        raise SpecError(f"{GIGABYTES} = {said!r}: wanted is a number, such as 20.") from None


class Remote:
    """Files below a URL.

    Args:
        url: as "s3://bucket/reviews".
        limit: bytes that the cache of this host may have; None: as job or environment say.
        options: of fsspec's file system.
    """

    def __init__(
        self, url: str, limit: int | None = None, options: dict[str, Any] | None = None
    ) -> None:
        self.url, self._options = url.rstrip("/"), options or {}
        self.limit = limit_of_cache() if limit is None else limit
        self._root = cache() / "shards"
        self._folder = self._root / hashlib.sha256(self.url.encode()).hexdigest()[:24]
        self._system: tuple[int, Any] = (0, None)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_system": (0, None)}

    def _files(self) -> Any:
        """The file system, made in this process: its event loop does not survive a fork.

        Raises:
            SpecError: fsspec, or what it needs for this URL, is not installed.
        """
        if self._system[0] != os.getpid():
            self._system = os.getpid(), file_system(self.url, **self._options)
        return self._system[1]

    def small(self, name: str) -> bytes:
        """The bytes of a small file, which is not kept.

        Raises:
            FileNotFoundError: it is not there.
            DataError: it cannot be read.
        """

        def read(_: Callable[[], None]) -> bytes:
            found: bytes = self._files().cat_file(f"{self.url}/{name}")
            return found

        found: bytes = tried(read, f"{shown_url(self.url)}/{name}")
        return found

    def path(self, shard: Shard) -> Path:
        """A local file with the bytes of a shard.

        Raises:
            DataError: it cannot be read, or is not what the manifest says.
            RunError: the cache cannot be written.
        """
        path = self._folder / f"{shard.bytes}-{shard.crc32 or 0:08x}-{shard.file}"
        while not _has(path, shard):
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with locked(self._folder / f".{shard.file}.lock"):
                    if not _has(path, shard):  # else another process has just downloaded it
                        for left in path.parent.glob(f".{path.name}.*"):  # of one that was killed
                            left.unlink(missing_ok=True)
                        what = f"{shown_url(self.url)}/{shard.file}"
                        with CacheRoom(self._root, self.limit).reserved(shard.bytes) as put:
                            tried(partial(self._download, shard, path, put), what)
            except FileNotFoundError as error:
                if error.filename is None:
                    raise  # else somebody has removed the cache meanwhile
            except OSError as error:
                raise self._unwritable(error) from None
        return path

    def _unwritable(self, error: OSError) -> RunError:
        return RunError(
            f"the cache {self._folder} cannot be written: {error.strerror}. Free some room, or set "
            f"{CACHE} to another folder."
        )

    def _download(
        self,
        shard: Shard,
        path: Path,
        put: Callable[[Path, Path], None],
        moves: Callable[[], None],
    ) -> None:
        beside, crc = path.with_name(f".{path.name}.{secrets.token_hex(4)}"), 0

        def take(data: bytes) -> None:
            nonlocal crc
            crc = zlib.crc32(data, crc)

        def fault(error: OSError) -> Exception:
            is_removed = isinstance(error, FileNotFoundError)  # the folder: it is made again
            return error if is_removed else self._unwritable(error)

        try:
            url = f"{self.url}/{shard.file}"
            size = copied(self._files(), url, beside, moves, fault, take)
            if size != shard.bytes or (shard.crc32 is not None and crc != shard.crc32):
                raise WrongBytes(
                    f"it has {size:,} bytes with the checksum {crc:08x}, and the manifest says "
                    f"{shard.bytes:,} with {shard.crc32 or 0:08x}"
                )
            put(beside, path)
        finally:
            beside.unlink(missing_ok=True)


def _has(path: Path, shard: Shard) -> bool:
    """Whether a shard is in the cache, as it was downloaded; one that is not is removed."""
    with suppress(OSError):
        about = path.stat()
        good = about.st_size == shard.bytes
        if good and about.st_mtime_ns != MARK_NS:
            good = shard.crc32 in (None, crc32_of(path))
        if good:
            with suppress(PermissionError):  # another user's
                touch(path)  # it is in use
            return True
        path.unlink()
    return False
