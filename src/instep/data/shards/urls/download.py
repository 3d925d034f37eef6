"""Bytes of files on other file systems (S3, HTTP and what else fsspec reads), brought here.

fsspec moves bytes; its own caches hand out half-written files, and some of its file systems wait
for a silent server for minutes or for ever, so a download that stands still is given up here, and
tried again. Where files are kept, and what they are compared with, is not known. Ways in:
`file_system`, `reached`, `tried`, `copied`.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from instep.errors import DataError, InstepError, SpecError, one_line
from instep.words import shown_error, shown_url

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
        Exception: it connects at once (SFTP, FTP), and cannot; `reached` tries again.
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
        why = shown_error(one_line(error))
        raise SpecError(f"{shown_url(url)} cannot be read: {why}.") from None


def reached(url: str) -> Any:
    """The file system of a URL, several times tried.

    Raises:
        SpecError: fsspec, or what it needs for this URL, is not installed.
        DataError: it does not answer.
    """
    try:
        return tried(lambda _: file_system(url), shown_url(url))
    except FileNotFoundError as error:
        raise DataError(
            f"{shown_url(url)} cannot be read: {shown_error(one_line(error))}."
        ) from None


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
    unwritable: Callable[[OSError], Exception],
    take: Callable[[bytes], object] = lambda _: None,
) -> int:
    """Write the bytes of a file to a path, durably; returns how many.

    The errors of the file system are raised as they come.

    Args:
        files: the file system.
        url: of the file.
        path: here.
        moves: called whenever something has come.
        unwritable: makes the error that is raised where this host is at fault, for which another
            attempt would be no better.
        take: given all bytes in their order, as for a checksum.
    """
    size = 0
    with ExitStack() as stack:
        with _of_this_host(unwritable):
            file = stack.enter_context(open(path, "wb", buffering=0))
        for data in chunks(files, url):
            moves()
            take(data)
            view = memoryview(data)
            with _of_this_host(unwritable):
                while view:
                    view = view[file.write(view) :]
            size += len(data)
        with _of_this_host(unwritable):
            os.fsync(file.fileno())
    return size


@contextmanager
def _of_this_host(unwritable: Callable[[OSError], Exception]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise unwritable(error) from None


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
        except InstepError:
            raise
        except Exception as error:  # of whatever kind the file system has
            if isinstance(error, FileNotFoundError) and _says_so(error):
                raise
            if pause_s is None:
                said = error.__cause__ or error
                why = shown_error(one_line(said)) or type(said).__name__
                raise DataError(
                    f"{what} cannot be read: {why}. It was tried {len(PAUSES_S) + 1} times."
                ) from None
            time.sleep(pause_s)
    raise AssertionError("the last attempt returns or raises")


def _says_so(error: FileNotFoundError) -> bool:
    """Tell a missing file from other failures of HTTP: fsspec calls them all the same."""
    cause = error.__cause__
    return cause is None or getattr(cause, "status", 0) in (404, 410)


def moving(read: Callable[[Callable[..., None]], Any], stall_s: float | None = None) -> Any:
    """Call a function that moves bytes in a thread, left to itself once nothing moves any more.

    Args:
        read: calls what it is given whenever something has moved; with seconds, if the next may
            take so much longer.
        stall_s: how long nothing may move; `STALL_S` if not given.

    Raises:
        WrongBytes: nothing moved for so long.
    """
    stall_s = STALL_S if stall_s is None else stall_s
    last, found = [(time.monotonic(), stall_s)], Future[Any]()

    def moves(more_s: float = 0.0) -> None:
        last[0] = time.monotonic(), stall_s + more_s

    def work() -> None:
        try:
            found.set_result(read(moves))
        except BaseException as error:  # raised where it is waited for
            found.set_exception(error)

    threading.Thread(target=work, name="instep-download", daemon=True).start()
    while True:
        moved_at, most_s = last[0]
        left_s = moved_at + most_s - time.monotonic()
        if not wait([found], timeout=max(left_s, 0)).not_done:
            return found.result()
        if left_s <= 0:
            raise WrongBytes(f"nothing came for {most_s:g} s")


def is_there(files: Any, url: str) -> bool:
    """Whether there is a file at a URL that may be read; asks several times.

    A store whose names may not be listed refuses (403) what is not there, as S3 does.

    Raises:
        DataError: the file system does not answer.
    """

    def ask(_: Callable[[], None]) -> bool:
        try:
            return bool(files.info(url))
        except FileNotFoundError as error:  # which of HTTP is any failure
            if getattr(error.__cause__, "status", 0) != 403:
                raise
        except PermissionError:
            pass
        return False

    try:
        return bool(tried(ask, shown_url(url)))
    except FileNotFoundError:
        return False
