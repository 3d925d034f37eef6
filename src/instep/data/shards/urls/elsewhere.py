"""Files that lie on other file systems (S3, HTTP and what else fsspec reads), as local copies.

Each is copied once, whole: a preparation reads a raw file several times, each process of a run the
model that it starts from, and a byte is to cross the network once. A copy is of one version of a
file, by its size and ETag (or time of change), and is kept for the next command, whichever process
made it; one that somebody has written to since is copied again. All copies have at most as many
bytes as all shards, and those that a process uses beside. Ways in: `copies_of` for raw files;
`side_by_side` for files that belong together, of a version that other hosts have too.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from instep.data.shards.urls import download
from instep.data.shards.urls.download import WrongBytes, copied, reached, tried
from instep.data.shards.urls.in_use import in_use, use
from instep.data.shards.urls.locks import locked
from instep.data.shards.urls.marks import is_untouched, touch
from instep.data.shards.urls.remote import CACHE, cache, limit_of_cache
from instep.errors import DataError, RunError, SpecError
from instep.plain_file import replace_plain
from instep.units import readable_bytes
from instep.words import shown_url

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
    *("Digest", "generation", "blob_id", "sha", "content_hash"),
    *("updated", "modificationTime", "modify", "date_time", "last_write_time"),
)
"""Names that file systems of fsspec have for the version of a file, the surest first."""

_KEY = re.compile("[0-9a-f]{24}")
_WHOLE = "whole"
"""The file that says of a folder that all files are there."""


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


def side_by_side(
    url: str, find: Callable[[Any], Sequence[str]], version: str = ""
) -> tuple[Path, str]:
    """Local copies of files at and below a URL, side by side, all of one version.

    Args:
        url: of a file, or of a folder.
        find: given the file system, the URLs of all files; called again if they change meanwhile.
        version: as it was returned, also on another host; empty for the present one.

    Returns:
        The path of the copy of what is at `url`, and the version. With a version that this host
        has already, nothing is asked for.

    Raises:
        SpecError: there is no such file, or another version of it; or a package is not installed.
        DataError: a file cannot be read, or changes while it is read.
        RunError: there is no room.
    """
    if _KEY.fullmatch(version) and _kept(_root() / version / _WHOLE, lambda: False):
        return _root() / version / _name(url), version
    files = reached(url)
    for pause_s in (*download.PAUSES_S, 0.0):
        versions = {each: _version_at(files, each) for each in find(files)}
        key = _key(list(versions.items()))
        if version not in ("", key):
            raise SpecError(
                f"{shown_url(url)} has changed since the run began, and all hosts are to have the "
                "same. Put back what was there, or begin a new run."
            )
        if _kept(_root() / key / _WHOLE, partial(_fetch_all, files, versions, _root() / key)):
            _remove_oldest()
            return _root() / key / _name(url), key
        time.sleep(pause_s)
    raise _always_new(url)


def _named(source: str) -> list[str]:
    if "*" not in source:
        return [source]
    files = reached(source)
    names = _reached(lambda: files.glob(source), source)
    if not names:
        raise SpecError(f"{shown_url(source)!r} names no file.")
    return [files.unstrip_protocol(name) for name in names]


def _reached(ask: Callable[[], Any], url: str) -> Any:
    """Ask a file system several times.

    Raises:
        SpecError: there is no such file.
        DataError: it does not answer, or refuses.
    """
    try:
        return tried(lambda _: ask(), shown_url(url))
    except FileNotFoundError:
        raise SpecError(
            f"{shown_url(url)!r} names no file. Compare its name with what is there."
        ) from None
    except DataError as error:
        raise DataError(
            f"{error} See that this machine reaches it and may read it, or copy it to a disk."
        ) from None


def _copy_of(url: str) -> RawCopy:
    files = reached(url)
    for pause_s in (*download.PAUSES_S, 0.0):
        version = _version_at(files, url)
        path = _root() / _key((url, version)) / _name(url)
        if _kept(path, partial(_fetch, files, url, version, path)):
            return RawCopy(shown_url(url), version.name, path)
        time.sleep(pause_s)
    raise _always_new(url)


def _always_new(url: str) -> DataError:
    return DataError(
        f"{shown_url(url)} has changed each time while it was read. Leave it as it is meanwhile, "
        "or name a copy of it that stays."
    )


def _key(versions: object) -> str:
    return hashlib.sha256(repr(versions).encode()).hexdigest()[:24]


def _version_at(files: Any, url: str) -> _Pinned:
    about = _reached(lambda: files.info(url), url)
    if about["type"] == "directory":
        raise SpecError(
            f"{shown_url(url)} is a folder. Name its files, as '{shown_url(url)}/*.csv'."
        )
    if not (version := _version(about)).name:
        raise SpecError(
            f"{shown_url(url)} cannot be told from a former version: its server says neither an "
            "ETag nor when it was changed. Copy it to a disk of this machine, or one that all "
            "hosts see, and name that."
        )
    return version


def _version(about: dict[str, Any]) -> _Pinned:
    named = (f"{name}: {about[name]}" for name in _VERSIONS if about.get(name))
    return _Pinned(about.get("size"), next(named, ""))


def _kept(path: Path, fetch: Callable[[], bool]) -> bool:
    """Whether a file is in the cache, by now at least, where others are kept from removing it.

    Args:
        path: the file, in a folder of a version.
        fetch: puts it there; False if the version is not to be had.
    """
    folder = _root() / path.relative_to(_root()).parts[0]
    with _writing():
        use(folder)
        if not _is_good(path):
            with locked(_lock(folder)):  # one process fetches it
                if not _is_good(path) and not fetch():
                    return False
        os.utime(folder)  # it is in use
    return True


def _is_good(path: Path) -> bool:
    """Whether a copy is as it was made; of what says that all files of a folder are there, they."""
    if path.parent.parent != _root():
        return is_untouched(path)
    return path.exists() and all(
        is_untouched(path.parent / name) for name in path.read_text("utf-8").splitlines()
    )


def _root() -> Path:
    root = cache() / "sources"
    with _writing():
        root.mkdir(parents=True, exist_ok=True)
    return root


@contextmanager
def _writing() -> Iterator[None]:
    """Name the cache where this machine cannot write to it.

    Raises:
        RunError: with what to do.
    """
    try:
        yield
    except OSError as error:
        raise _unwritable(error) from None


def _unwritable(error: OSError) -> RunError:
    return RunError(
        f"the cache {cache() / 'sources'} cannot be written: {error.strerror}. Free some room, or "
        f"set {CACHE} to another folder."
    )


def _lock(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def _name(url: str) -> Path:
    """Name a copy in its folder so that a message that has its path says where it is from."""
    scheme, _, rest = shown_url(url).partition("://")
    host, _, path = rest.partition("/")
    places = [scheme, host.replace(":", "-"), *path.split("/")]
    return Path(*[place for place in places if place not in ("", ".", "..")])


def _fetch(files: Any, url: str, version: _Pinned, path: Path) -> bool:
    """Copy a file to a path; False if it has another version once all of it is here."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(".*"):  # of a killed one
        left.unlink(missing_ok=True)
    _check_room(url, version.size or 0, path.parent)

    def attempt(moves: Callable[[], None]) -> Path | None:
        beside = path.with_name(f".{secrets.token_hex(4)}")
        size = copied(files, url, beside, moves, _unwritable)
        if _version(files.info(url)) != version:
            return None
        if version.size not in (None, size):
            raise WrongBytes(f"{size:,} bytes came, and it has {version.size:,}")
        return beside

    try:
        # An attempt that was given up renames nothing, should it end after all.
        beside = _reached_file(attempt, url)
        if beside is not None:
            touch(beside)
            beside.replace(path)
    finally:
        for left in path.parent.glob(".*"):
            left.unlink(missing_ok=True)
    return beside is not None


def _fetch_all(files: Any, versions: Mapping[str, _Pinned], folder: Path) -> bool:
    """Copy files side by side; one that a killed process has copied is not copied again."""
    for url, version in versions.items():
        path = folder / _name(url)
        if not is_untouched(path) and not _fetch(files, url, version, path):
            return False
    replace_plain(folder / _WHOLE, "\n".join(str(_name(url)) for url in versions).encode())
    return True


def _reached_file(attempt: Callable[[Callable[[], None]], Path | None], url: str) -> Path | None:
    try:
        found: Path | None = tried(attempt, shown_url(url))
        return found
    except FileNotFoundError:
        return None


def _check_room(url: str, size: int, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if size > free:
        raise RunError(
            f"{shown_url(url)} has {readable_bytes(size)}, and {_root()}, where it is copied to, "
            f"has {readable_bytes(free)} left. Free some, or set {CACHE} to another folder."
        )


def _remove_oldest() -> None:
    """Remove copies that no process uses, those not used for longest first."""
    limit, root = limit_of_cache(), _root()
    with _writing(), locked(root / ".lock"):
        folders, used = sorted(_folders(), key=lambda each: each[1]), in_use(root)
        total = sum(size for _, _, size in folders)
        for folder, _, size in folders:
            if total > limit and folder.name not in used:
                shutil.rmtree(folder, ignore_errors=True)
                _lock(folder).unlink(missing_ok=True)  # nobody waits for it, who would use the copy
                total -= size


def _folders() -> Iterator[tuple[Path, float, int]]:
    for folder in _root().glob("[!.]*"):
        files = [path for path in folder.rglob("*") if path.is_file()]
        yield folder, folder.stat().st_mtime, sum(path.stat().st_size for path in files)
