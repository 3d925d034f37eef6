"""What the processes of a run printed: the files in its folder `logs`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from instep.errors import RunError
from instep.plain_file import plain
from instep.store.folder import is_running
from instep.store.run_folder import RunFolder

_MOST = 1 << 20
"""Bytes of a file that are read at a time."""


class Logs:
    """The logs of a run, read as they grow.

    Args:
        run: its folder.

    Raises:
        RunError: it is not the folder of a run, or has no logs.
    """

    def __init__(self, run: Path) -> None:
        self._run, self._folder = run, run / "logs"
        self._read: dict[str, int] = {}
        RunFolder(run)  # says what is wrong with what is no run
        if not self._folder.is_dir():
            raise RunError(f"{run} has no folder of logs: no process of that run was started here.")

    def names(self) -> list[str]:
        """`host`, `worker-0`, ...: of which there is a file."""
        return sorted(each.stem for each in self._folder.glob("*.log"))

    def is_running(self) -> bool:
        """Whether more may come."""
        return is_running(self._run)

    def new_lines(self, of: str | None = None) -> Iterator[tuple[str, str]]:
        """Name and line of what has come since the last call; a line is told once it has ended,
        or nothing more comes.

        Args:
            of: of one of `names` only.

        Raises:
            RunError: a log cannot be read, or is no plain file.
        """
        for name in self.names() if of is None else [of]:
            with self._opened(name) as file:
                file.seek(self._read.get(name, 0))
                while block := file.read(_MOST):
                    ended = block.rfind(b"\n") + 1
                    if not ended and len(block) < _MOST and self.is_running():
                        break
                    ended = ended or len(block)
                    file.seek(ended - len(block), 1)
                    self._read[name] = file.tell()
                    for line in block[:ended].decode(errors="replace").splitlines():
                        yield name, line

    def _opened(self, name: str) -> IO[bytes]:
        """A log, which may be no link either: what it shows would be no worker's words."""
        path = self._folder / f"{name}.log"
        try:
            return open(path, "rb", opener=_no_link)
        except OSError as error:
            why = "it is a link" if error.errno == errno.ELOOP else error.strerror
            raise RunError(f"{path} cannot be read as a log: {why}. Remove it.") from None


def _no_link(path: str, flags: int) -> int:
    return plain(path, flags | os.O_NOFOLLOW)
