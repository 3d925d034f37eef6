"""The file with which a machine proves that it may join a run: on both ends only its owner's.

The machine of `instep run` writes it. Whoever starts other machines copies it there.
"""

from __future__ import annotations

import os
import secrets
import stat
import time
from pathlib import Path

from instep.errors import JoinError, SpecError
from instep.plain_file import read_plain, replace_plain

LASTS_S = 24 * 3600.0
"""A run that begins when the file is older writes another one."""


def written(path: Path) -> str:
    """The token of a file here, which is made, or made again, if need be.

    Raises:
        SpecError: it cannot be written.
    """
    try:
        if time.time() - path.stat().st_mtime < LASTS_S:
            return read(path)
    except (OSError, JoinError):
        pass  # there is none, or others have seen it
    token = secrets.token_hex(16)
    try:
        replace_plain(path, token + "\n", 0o600)
    except OSError as error:
        raise SpecError(
            f"cluster.token_file = {str(path)!r} cannot be written: {error.strerror}. Name a file "
            "in a folder of yours."
        ) from None
    return token


def read(path: Path) -> str:
    """The token of a file.

    Raises:
        JoinError: there is none, or others can read it.
    """
    try:
        about = path.stat()
        token = read_plain(path).decode(errors="replace").strip()
    except OSError as error:
        raise JoinError(
            f"the token file {path} cannot be read: {error.strerror}. Copy it from the machine of "
            "`instep run`."
        ) from None
    if about.st_uid != os.geteuid() or stat.S_IMODE(about.st_mode) & 0o077:
        raise JoinError(f"others can read the token file {path}. Use: chmod 600 {path}")
    if not token:
        raise JoinError(f"the token file {path} is empty. Copy it again.")
    return token
