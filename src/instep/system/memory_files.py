"""Memory files that the fork server keeps: what a worker leaves there outlives the worker.

All are made, empty, before the first fork, so that the spare has the same ones. A file belongs to
a worker's number: the process that replaces a killed one gets the file that this one left. The
number stands in the file itself, so that a fork server that was restarted finds the files of
living workers again. A file vanishes with the last process that has it open. What else is in a
file is the business of `host_memory.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import struct

STAMPS = 256
"""Bytes at the beginning of a file that say what it holds; all zero if nothing."""

_NUMBER = struct.Struct("<Q")


class MemoryFiles:
    """The files of one host, for this run; make them before the first fork.

    Args:
        count: how many workers have one at the same time; the others get none.
        secret: of the run. No file of another run is ever taken for one of this.
    """

    def __init__(self, count: int, secret: str) -> None:
        self.name = f"instep-{hashlib.sha256(secret.encode()).hexdigest()[:16]}"
        """What the system calls them, in `/proc/PID/fd`."""
        self._files: list[int] = []
        if hasattr(os, "memfd_create"):
            most = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
            self._files += (os.memfd_create(self.name) for _ in range(most))

    def of(self, number: int) -> int:
        """The descriptor of a worker's file, as its last process left it; -1 if none is free."""
        for wanted in (number + 1, 0):
            for file in self._files:
                if _owner(file) == wanted:
                    os.pwrite(file, _NUMBER.pack(number + 1), STAMPS)  # right behind them
                    return file
        return -1

    def keep_only(self, file: int) -> None:
        """In a process that was just forked: close all other files."""
        for each in self._files:
            if each != file:
                os.close(each)
        self._files = [file] if file >= 0 else []

    def ended(self, number: int) -> None:
        """A worker's process has ended. If it left nothing, the memory goes back to the system."""
        for file in self._files:
            if _owner(file) == number + 1 and not any(os.pread(file, STAMPS, 0)):
                os.ftruncate(file, 0)  # also for those who have it open, as the spare has

    def adopt(self, number: int, pid: int) -> None:
        """Take up the file of a living worker that another fork server has forked."""
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                if os.readlink(path).removeprefix("/memfd:").split(" ")[0] != self.name:
                    continue
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                place = self.of(number) if _owner(file) == number + 1 else -1
                if place >= 0:
                    os.dup2(file, place, inheritable=False)
                os.close(file)


def _owner(file: int) -> int:
    """The number of the worker whose file it is, plus 1; 0 if no worker has it."""
    return int.from_bytes(os.pread(file, _NUMBER.size, STAMPS), "little")
