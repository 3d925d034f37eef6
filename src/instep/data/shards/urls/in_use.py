"""Local copies of files that processes use: each has one file with the names of its own.

What a copy is, is not known here. Ways in: `use`, `in_use`.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import secrets
from contextlib import suppress
from io import FileIO
from pathlib import Path

from instep.data.shards.urls.locks import locked

_uses: dict[Path, FileIO] = {}
"""By the folder of all copies, the list of those that this process reads, until it ends. It is
locked for as long as this process, or a fork of it, lives."""


def use(folder: Path) -> None:
    """Say that this process reads a copy: from now on no other removes it."""
    root = folder.parent
    with locked(root / ".lock"):
        held = _uses.get(root)
        if held is None or not os.path.exists(held.name):  # somebody has removed the cache
            if held is not None:
                held.close()
            held = _uses[root] = FileIO(str(root / f".used-{secrets.token_hex(8)}.lock"), "a")
            fcntl.flock(held, fcntl.LOCK_SH)
            atexit.register(held.close)
        held.write(f"{folder.name}\n".encode())


def in_use(root: Path) -> set[str]:
    """The names of the copies that processes use; call it with the lock of all."""
    found = set[str]()
    for path in root.glob(".used-*.lock"):
        with suppress(PermissionError), open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()  # its process has ended
            except BlockingIOError:
                found.update(file.read().decode().split())
    return found
