"""Memory files that the fork server keeps: what a worker leaves there outlives the worker.

All are made, empty, before the first fork, so that the spare has the same ones. A file belongs to
a worker's number and to one process at a time: the process that replaces a killed one gets the
file that this one left, once that one can no longer write. Number and process stand in the file
itself, so that a fork server that was restarted finds the files of living workers again
(`adopt_all`, before its imports: a file vanishes with the last process that has it open). What
else is in a file is the business of `host_memory.py`.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import struct

OUTBOX, STAMPS = 256, 320
"""Bytes at the beginning of a file that say what it holds; all zero if nothing. Behind the first so
many are those of `outbox.py`."""

_OWNER = struct.Struct("<QQ")

OWNER = slice(STAMPS, STAMPS + _OWNER.size)
"""Bytes that say whose file it is: the number of the worker plus 1, and its process; right behind
the stamps, all zero if no worker has it."""


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
        self.shared = -1
        """The descriptor of one file that all processes of the run on this host have; or -1."""
        if hasattr(os, "memfd_create"):
            most = min(count, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
            self._files += (os.memfd_create(self.name) for _ in range(most))
            self.shared = os.memfd_create(self._shared_name)

    @property
    def _shared_name(self) -> str:
        return f"{self.name}-shared"

    def of(self, number: int) -> int:
        """The descriptor of a worker's file, as its last process left it; -1 if none is free, or
        while that process may still write."""
        for wanted in (number + 1, 0):
            for file in self._files:
                owner, pid = _owner(file)
                if owner == wanted:
                    if pid and _has_open(pid, file):
                        return -1
                    _own(file, number, 0)
                    return file
        return -1

    def keep_only(self, number: int, file: int) -> None:
        """In the process of a worker, just forked: own its file, and close all others."""
        for each in self._files:
            if each != file:
                os.close(each)
        self._files = [file] if file >= 0 else []
        if file >= 0:
            _own(file, number, os.getpid())

    def ended(self, number: int, pid: int = 0) -> None:
        """A worker's process has ended. If it left nothing, the memory goes back to the system.

        A file that another process of the worker has by now is left alone.
        """
        for file in self._files:
            mine = pid and _owner(file) == (number + 1, pid)
            if mine and not any(os.pread(file, STAMPS, 0)):
                os.ftruncate(file, 0)  # also for those who have it open, as the spare has

    def adopt(self, number: int, pid: int) -> None:
        """Take up the file of a living worker that another fork server has forked."""
        self._adopt(pid, number + 1)

    def adopt_all(self) -> None:
        """Take up the files of all living workers of this run, of any fork server."""
        for pid in filter(str.isdecimal, os.listdir("/proc") if self._files else ()):
            with contextlib.suppress(OSError):
                with open(f"/proc/{pid}/comm") as comm:
                    ours = comm.read(6) == "instep"
                if ours:
                    self._adopt(int(pid))

    def _adopt(self, pid: int, owner: int = 0) -> None:
        with contextlib.suppress(OSError):  # it has ended, or is not ours to look into
            for name in os.listdir(f"/proc/{pid}/fd"):
                path = f"/proc/{pid}/fd/{name}"
                found_name = os.readlink(path).removeprefix("/memfd:").split(" ")[0]
                if found_name not in (self.name, self._shared_name):
                    continue
                file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                if found_name == self._shared_name:
                    os.dup2(file, self.shared, inheritable=False)
                    os.close(file)
                    continue
                found, _ = _owner(file)
                if found and found == (owner or found):
                    self._take_up(file)
                os.close(file)

    def _take_up(self, file: int) -> None:
        """Have this file instead of a free one."""
        if not any(os.path.sameopenfile(file, each) for each in self._files):
            for place in self._files:
                if _owner(place) == (0, 0):
                    os.dup2(file, place, inheritable=False)
                    return


def _own(file: int, number: int, pid: int) -> None:
    os.pwrite(file, _OWNER.pack(number + 1, pid), STAMPS)


def _owner(file: int) -> tuple[int, int]:
    """The number of the worker whose file it is, plus 1, and its process; 0 if it has none yet, or
    no worker has the file."""
    found = os.pread(file, _OWNER.size, STAMPS)
    owner, pid = _OWNER.unpack(found.ljust(_OWNER.size, b"\0"))
    return owner, pid


def _has_open(pid: int, file: int) -> bool:
    """Whether a process lives that has a file open."""
    found = os.fstat(file)
    with contextlib.suppress(OSError):  # it has ended
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                if os.path.samestat(os.stat(f"/proc/{pid}/fd/{name}"), found):
                    return True
    return False


# ---- of this process

_given = _shared = -1


def give(descriptor: int, shared: int = -1) -> None:
    """`HostMemory()` of this process uses this file from now on; none if below 0. `shared` is the
    one that it has in common with others."""
    global _given, _shared
    _given, _shared = descriptor, shared


def shared() -> int:
    """The file that all processes of the run on this host have; below 0 if there is none."""
    return _shared


def given() -> int:
    """The file of this process; below 0 if it has none."""
    return _given


def give_back() -> None:
    """This process exits normally: no other is to take up its state."""
    if _given >= 0:
        os.pwrite(_given, bytes(STAMPS), 0)
