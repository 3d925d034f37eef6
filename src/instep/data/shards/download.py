"""Bytes of files on other file systems (S3, HTTP and what else fsspec reads), brought here.

fsspec moves bytes; its own caches hand out half-written files, and some of its file systems wait
for a silent server for minutes or for ever, so a download that stands still is given up here, and
tried again. Where files are kept, and what they are compared with, is not known. Ways in:
`file_system`, `tried`, `copied`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

from instep.errors import DataError, SpecError, one_line
from instep.words import shown_url

PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses before each further attempt at a download."""

STALL_S = 60.0
"""A download of which nothing comes for so long is given up, and tried again."""

_CHUNK = 1 << 20


class WrongBytes(Exception):
    """Bytes came that are not those of the file."""


def file_system(url: str, **options: Any) -> Any:
    """The file system of a URL, for this process alone, with no memory of what it has listed.

    Raises:
        SpecError: fsspec, or what it needs for this URL, is not installed.
    """
    protocol = url.partition("://")[0]
    try:
        import fsspec

        if protocol in ("http", "https"):
            from aiohttp import ClientTimeout

            # Else a file is given up after five minutes, however well it comes.
            options.setdefault("client_kwargs", {"timeout": ClientTimeout(total=None)})
        kind = fsspec.get_filesystem_class(protocol)
        options = kind._get_kwargs_from_urls(url) | options  # such as the host of sftp://
        return kind(skip_instance_cache=True, use_listings_cache=False, **options)
    except ImportError as error:
        name = getattr(error.__cause__, "name", None) or error.name or "fsspec"
        raise SpecError(
            f"{shown_url(url)} cannot be read without the package {name}: pip install {name}"
        ) from None
    except ValueError as error:
        raise SpecError(f"{shown_url(url)} cannot be read: {one_line(error)}.") from None


def chunks(files: Any, url: str) -> Iterator[bytes]:
    """The bytes of a file; of a web server as one stream, since not every one gives ranges."""
    how: dict[str, Any] = {"cache_type": "none"}
    if url.startswith(("http://", "https://")):
        how = {"block_size": 0}
    with files.open(url, "rb", **how) as source:
        while data := source.read(_CHUNK):
            yield data


def copied(
    files: Any,
    url: str,
    path: Path,
    moves: Callable[[], None],
    take: Callable[[bytes], object] = lambda _: None,
) -> int:
    """Write the bytes of a file to a path, durably; returns how many.

    Args:
        files: the file system.
        url: of the file.
        path: here.
        moves: called whenever something has come.
        take: given all bytes in their order, as for a checksum.
    """
    size = 0
    with open(path, "wb") as file:
        for data in chunks(files, url):
            moves()
            take(data)
            size += file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return size


def tried(read: Callable[[Callable[[], None]], Any], what: str) -> Any:
    """What reading gives, tried again with growing pauses.

    Args:
        read: calls what it is given whenever something has come.
        what: the name, for messages.

    Raises:
        FileNotFoundError: the file is not there.
        DataError: no attempt has worked.
    """
    for pause_s in (*PAUSES_S, None):
        try:
            return moving(read)
        except (SpecError, DataError):
            raise
        except Exception as error:  # of whatever kind the file system has
            if isinstance(error, FileNotFoundError) and _says_so(error):
                raise
            if pause_s is None:
                said = error.__cause__ or error
                raise DataError(
                    f"{what} cannot be read: {one_line(said) or type(said).__name__}. It was "
                    f"tried {len(PAUSES_S) + 1} times."
                ) from None
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def _says_so(error: FileNotFoundError) -> bool:
    """Tell a missing file from other failures of HTTP: fsspec calls them all the same."""
    cause = error.__cause__
    return cause is None or getattr(cause, "status", 0) in (404, 410)


def moving(read: Callable[[Callable[[], None]], Any], stall_s: float | None = None) -> Any:
    """Call a function that moves bytes in a thread, left to itself once nothing moves any more.

    Args:
        read: calls what it is given whenever something has come.
        stall_s: how long nothing may come; `STALL_S` if not given.

    Raises:
        WrongBytes: nothing came for so long.
    """
    stall_s = STALL_S if stall_s is None else stall_s
    last, found = [time.monotonic()], Future[Any]()

    def work() -> None:
        try:
            found.set_result(read(lambda: last.__setitem__(0, time.monotonic())))
        except BaseException as error:  # raised where it is waited for
            found.set_exception(error)

    threading.Thread(target=work, name="instep-download", daemon=True).start()
    while wait([found], timeout=max(last[0] + stall_s - time.monotonic(), 0)).not_done:
        if time.monotonic() - last[0] >= stall_s:
            raise WrongBytes(f"nothing came for {stall_s:g} s")
    return found.result()
