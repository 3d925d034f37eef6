"""Says who copies a run: the process that was the last to begin.

A run that was restored on another machine copies into the folder of the one that it was restored
from, which may still write. Each would remove what the other has half written. So a process makes
an object of its own, with a number above those that are there, and no longer copies or removes
once there is a higher one. Way in: `Claim`.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from pathlib import Path

from instep.errors import RunError
from instep.store.copies.objects import Objects
from instep.words import printable

FOLDER = "copied-by"
"""The folder of these objects; there is one, but while they are made."""


class Claim:
    """The claim of this process; errors of the file system are raised as they come.

    Args:
        run: its folder.
        objects: of its copies.
    """

    def __init__(self, run: Path, objects: Objects) -> None:
        self._run, self._objects = run, objects
        self._name = ""

    def make(self) -> None:
        """Be the one that copies from now on; a second call does nothing."""
        if self._name:
            return
        before = self._objects.names(FOLDER)
        number = 1 + max(map(_number, before), default=0)
        name = f"{number:08d}-{secrets.token_hex(4)}"
        who = {"host": socket.gethostname(), "process": os.getpid(), "run": str(self._run)}
        data = json.dumps(who).encode()
        self._objects.send(f"{FOLDER}/{name}", data, len(data))
        self._name = name
        for each in before:
            self._objects.remove(f"{FOLDER}/{each}")

    def check(self) -> None:
        """Compare with the claims of others.

        Raises:
            RunError: another process has begun to copy this run since.
        """
        last = max(self._objects.names(FOLDER), default="")
        if last > self._name:
            raise RunError(
                f"another process copies this run there since ({self._who(last)}), so this one no "
                "longer does. Let only one of the two train; after instep resume the other copies"
            )

    def _who(self, name: str) -> str:
        try:
            who = json.loads(self._objects.read(f"{FOLDER}/{name}") or b"")
            return printable(f"{who['run']} on {who['host']}")
        except (ValueError, KeyError, TypeError):
            return name


def _number(name: str) -> int:
    first = name.partition("-")[0]
    return int(first) if first.isascii() and first.isdigit() else 0
