"""Raw files that lie on other file systems (S3, HTTP and what else fsspec reads).

Each is copied once, whole: a preparation reads a file several times, and a byte is to cross the
network once. A copy is of one version of a file, by its size and ETag (or time of change), and is
kept for the next command, whichever process made it. The copies that no command uses have at most
`LIMIT` bytes. Way in: `copies_of`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from urllib.parse import urlsplit

from instep.data.shards import remote
from instep.data.shards.remote import WrongBytes, chunks, file_system, tried
from instep.errors import DataError, RunError, SpecError
from instep.units import readable_bytes

LIMIT = 20 * 10**9

_AT_ONCE = 4

_VERSIONS: tuple[str, ...] = (
    "ETag",
    "etag",
    "md5Hash",
    "Content-MD5",
    "LastModified",
    "Last-Modified",
    "last_modified",
    "mtime",
    "modified",
    "created",
)
"""Names that file systems of fsspec have for the version of a file, the surest first."""

_held: list[BinaryIO] = []  # locks of copies, which this process reads until it ends


class RawCopy(NamedTuple):
    """A local copy of one version of a file."""

    url: str
    """The URL without a password or a signature."""
    version: str
    path: Path


class _Pinned(NamedTuple):
    size: int | None
    """Bytes; None if the server does not say it."""
    name: str


def is_url(source: str) -> bool:
    """Whether a source is the URL of another file system."""
    return "://" in source


def copies_of(sources: Sequence[str]) -> list[RawCopy]:
    """Local copies of the files that URLs and patterns name, each once, sorted by URL.

    Raises:
        SpecError: a URL names no file, or needs a package that is not installed.
        DataError: a file cannot be read, or changes while it is read.
        RunError: there is no room.
    """
    named = sorted({url for source in sources for url in _named(source)})
    if not named:
        return []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        copies = list(pool.map(_copy_of, named))
    _remove_oldest()
    return copies


def shown(url: str) -> str:
    """A URL without what may be secret: user, password, query."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def _named(source: str) -> list[str]:
    if "*" not in source:
        return [source]
    files = file_system(source)
    names = _reached(lambda: files.glob(source), source)
    if not names:
        raise SpecError(f"{shown(source)!r} names no file.")
    return [files.unstrip_protocol(name) for name in names]


def _reached(ask: Callable[[], Any], url: str) -> Any:
    """Ask a file system several times.

    Raises:
        SpecError: there is no such file.
        DataError: it does not answer, or refuses.
    """
    try:
        return tried(lambda _: ask(), shown(url))
    except FileNotFoundError:
        raise SpecError(
            f"{shown(url)!r} names no file. Compare its name with what is there."
        ) from None
    except DataError as error:
        raise DataError(
            f"{error} See that this machine reaches it and may read it, or copy it to a disk."
        ) from None


def _copy_of(url: str) -> RawCopy:
    files = file_system(url)
    for pause_s in (*remote.PAUSES_S, 0.0):
        about = _reached(lambda: files.info(url), url)
        if about["type"] == "directory":
            raise SpecError(f"{shown(url)} is a folder. Name its files, as '{shown(url)}/*.csv'.")
        version = _version(about)
        path = _kept(files, url, version)
        if path is not None:
            return RawCopy(shown(url), version.name, path)
        time.sleep(pause_s)
    raise DataError(
        f"{shown(url)} has changed each time while it was read. Leave it as it is meanwhile, or "
        "name a copy of it that stays."
    )


def _version(about: dict[str, Any]) -> _Pinned:
    named = (f"{name}: {about[name]}" for name in _VERSIONS if about.get(name))
    return _Pinned(about.get("size"), next(named, ""))


def _kept(files: Any, url: str, version: _Pinned) -> Path | None:
    """The copy of a version, and keep others from removing it; None if the file has changed."""
    key = hashlib.sha256(repr((url, version)).encode()).hexdigest()[:24]
    folder = _root() / key
    path = folder / _name(url)
    lock = open(_lock(folder), "ab")  # noqa: SIM115 - until this process ends
    try:
        while True:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if path.exists():
                os.utime(folder)  # it is in use
                _held.append(lock)
                return path
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists() and not _fetch(files, url, version, path):
                return None
    finally:
        if lock not in _held:
            lock.close()


def _root() -> Path:
    root = remote.cache() / "sources"
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(
            f"the cache {root} cannot be written: {error.strerror}. Set {remote.CACHE} to another "
            "folder."
        ) from None
    return root


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _name(url: str) -> Path:
    """Name a copy in its folder so that a message that has its path says where it is from."""
    parts = urlsplit(shown(url))
    places = [parts.scheme, parts.netloc.replace(":", "-"), *parts.path.split("/")]
    return Path(*[place for place in places if place not in ("", ".", "..")])


def _fetch(files: Any, url: str, version: _Pinned, path: Path) -> bool:
    """Copy a file to a path; False if it has another version once all of it is here."""
    shutil.rmtree(path.parents[len(_name(url).parts) - 1], ignore_errors=True)  # of a killed one
    path.parent.mkdir(parents=True)
    _check_room(url, version.size or 0, path.parent)

    def attempt(moves: Callable[[], None]) -> Path | None:
        beside, size = path.with_name(f".{secrets.token_hex(4)}"), 0
        with open(beside, "wb") as file:
            for data in chunks(files, url):
                size += file.write(data)
                moves()
            file.flush()
            os.fsync(file.fileno())
        if _version(files.info(url)) != version:
            return None
        if version.size not in (None, size):
            raise WrongBytes(f"{size:,} bytes came, and it has {version.size:,}")
        return beside

    # An attempt that was given up renames nothing, should it end after all.
    beside = _reached_file(attempt, url)
    if beside is not None:
        beside.replace(path)
    for left in path.parent.glob(".*"):
        left.unlink(missing_ok=True)
    return beside is not None


def _reached_file(attempt: Callable[[Callable[[], None]], Path | None], url: str) -> Path | None:
    try:
        found: Path | None = tried(attempt, shown(url))
        return found
    except FileNotFoundError:
        return None


def _check_room(url: str, size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise RunError(
            f"{shown(url)} has {readable_bytes(size)}, and {_root()}, where it is copied to, has "
            f"{readable_bytes(free)} left. Free some, or set {remote.CACHE} to another folder."
        )


def _remove_oldest() -> None:
    """Remove copies that no process uses, those not used for longest first."""
    folders = sorted(_folders(), key=lambda each: each[1])
    total = sum(size for _, _, size in folders)
    for folder, _, size in folders:
        if total <= LIMIT:
            return
        with open(_lock(folder), "ab") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            total -= size


def _folders() -> Iterator[tuple[Path, float, int]]:
    for folder in _root().glob("[!.]*"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        yield folder, folder.stat().st_mtime, sum(path.stat().st_size for path in files)
