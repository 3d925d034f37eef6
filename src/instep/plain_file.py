"""Open regular files only, and never block: something else may have replaced the file.

Opening a named pipe blocks until its other end is opened, and reading a device may never end.
Nothing here knows what a file is for. Way in: `plain`, the `opener` of `open`, for reading
and writing; `check_plain` for a file that a library will open.
"""

from __future__ import annotations

import errno
import os
import stat
import zlib
from pathlib import Path

PRIVATE = 0o600
"""Mode of a file that only its owner may read or write."""

_CHUNK = 1 << 20
"""Bytes that are read at a time."""

_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NotPlain(OSError):
    """Not a regular file, but a directory, a named pipe, a socket or a device."""


class Doubtful(OSError):
    """Somebody else may have written the file."""


def plain(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a regular file, or a link to one; never blocks.

    Args:
        path, flags, mode: as for `os.open`.

    Returns:
        Its descriptor, as `open(..., opener=plain)` wants it.

    Raises:
        NotPlain: it is none; `strerror` says what it is.
        OSError: it cannot be opened.
    """
    flags |= os.O_CLOEXEC | os.O_NOCTTY
    try:
        # without O_NONBLOCK, opening a named pipe would wait for its other end forever
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV, errno.EISDIR):  # says less than its kind
            check_plain(path)
        raise
    try:
        _check(os.fstat(descriptor).st_mode, path)
        os.set_blocking(descriptor, True)  # as a process that inherits it expects
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def check_plain(path: str | os.PathLike[str]) -> None:
    """Check that `path` is a regular file or does not exist; opens nothing.

    Raises:
        NotPlain: it is no regular file; `strerror` says what it is.
        OSError: its status cannot be read.
    """
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    _check(mode, path)


def read_plain(path: Path) -> bytes:
    """All bytes of a regular file.

    Raises:
        OSError: as `plain`.
    """
    with open(path, "rb", opener=plain) as file:
        return file.read()


def crc32_of(path: str | os.PathLike[str], first: int = 0, stop: int | None = None) -> int:
    """CRC-32 of the bytes [first, stop) of a regular file; of all behind `first` without `stop`.

    Raises:
        OSError: as `plain`.
    """
    found, left = 0, None if stop is None else stop - first
    with open(path, "rb", opener=plain) as file:
        file.seek(first)
        while data := file.read(_CHUNK if left is None else max(min(_CHUNK, left), 0)):
            found = zlib.crc32(data, found)
            left = None if left is None else left - len(data)
    return found


def read_believed(path: Path) -> bytes:
    """All bytes of a regular file that nobody else can have written.

    Raises:
        Doubtful: another user owns it or can write it, or a link is there; `strerror` says which.
        OSError: as `plain`.
    """
    try:
        descriptor = plain(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise Doubtful(errno.EPERM, "it is a link", os.fspath(path)) from None
        raise
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid():
            why = f"it belongs to user {about.st_uid}, and this process to {os.geteuid()}"
            raise Doubtful(errno.EPERM, why, os.fspath(path))
        if about.st_mode & 0o022:
            raise Doubtful(errno.EPERM, "others can write it", os.fspath(path))
        return file.read()


def write_plain(path: Path, text: str) -> None:
    """Replace the contents of a regular file by a text.

    Raises:
        OSError: as `plain`.
    """
    with open(path, "w", encoding="utf-8", opener=plain) as file:
        file.write(text)


_elsewhere = ""


def on_host() -> None:
    """From now on this process shares folders with processes of other machines."""
    global _elsewhere
    _elsewhere = f"-{os.urandom(4).hex()}"


def beside_of(path: Path) -> Path:
    """The name that a file has until it is whole: that of no other process's file."""
    return path.with_name(f".{path.name}.{os.getpid()}{_elsewhere}")


def replace_plain(
    path: Path, text: str | bytes, mode: int = 0o666, *, durable: bool = False
) -> None:
    """Put a file with this text, or bytes, at `path` at once: readers see the former or this one.

    A link at `path` is replaced, not followed.

    Args:
        path, text, mode: of the file.
        durable: flush it to the disk first: else a crash of the host may leave an empty file.

    Raises:
        OSError: it cannot be written; nothing is left behind.
    """
    beside = beside_of(path)
    try:
        beside.unlink(missing_ok=True)  # of a process that was killed, or of somebody else
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with open(os.open(beside, flags, mode), "wb") as file:
            file.write(text.encode() if isinstance(text, str) else text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def create_plain(path: Path, text: str, mode: int = 0o666) -> None:
    """Make a file with this text, at once and only if there is none: of several, one makes it.

    Raises:
        FileExistsError: there is one.
        OSError: it cannot be written; nothing is left behind.
    """
    beside = beside_of(path)
    try:
        replace_plain(beside, text, mode, durable=True)
        os.link(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def is_private(about: os.stat_result) -> bool:
    """Whether a file is ours, and nobody else's."""
    return about.st_uid == os.geteuid() and not stat.S_IMODE(about.st_mode) & 0o077


def _check(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        what = next((name for is_one, name in _KINDS if is_one(mode)), "something else")
        kind = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise NotPlain(kind, f"it is {what} and not a file", os.fspath(path))
