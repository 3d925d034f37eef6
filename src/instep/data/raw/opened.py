"""How raw files are opened: by path, or through somebody who has them where this machine has not.

Who that is, is not known here. Ways in: `opened` to read, `read_through` for such a process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple


class Elsewhere(NamedTuple):
    """A file that another machine has."""

    bytes: int
    open: Callable[[], BinaryIO]


_find: Callable[[str], Elsewhere | None] = lambda _: None  # noqa: E731


def read_through(find: Callable[[str], Elsewhere | None]) -> None:
    """From now on ask this of each path: None if this process is to read it by itself."""
    global _find
    _find = find


def is_elsewhere(path: str | Path) -> bool:
    """Whether another machine has the file."""
    return _find(str(path)) is not None


def opened(path: str | Path) -> BinaryIO:
    """A raw file, open for reading.

    Raises:
        OSError: it cannot be opened.
    """
    found = _find(str(path))
    return open(path, "rb") if found is None else found.open()


def size_of(path: str | Path) -> int:
    """Bytes of a raw file.

    Raises:
        OSError: it cannot be looked at.
    """
    found = _find(str(path))
    return os.stat(path).st_size if found is None else found.bytes
