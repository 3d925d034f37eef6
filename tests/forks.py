"""The process that programs of tests are forks of: it has imported what a run of instep needs.

What it becomes in its forks comes with the files of each over a socket, from `tests/warm.py`. It
ends with the one that asks. Nothing of torch runs in it, and it has one thread.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from instep.launch.warm import become, keep_warm
from instep.system.processes import wait_for_child, wait_readable

MARK = "INSTEP_TEST_MARK"
"""A variable of the environment that tells the processes of one program from all others."""

UNMARKED = "0" * 16

LOOK_S = 5.0
"""The longest time after which it notices that nobody is left who asks."""


class Children:
    """The forks of this process: their ends are told, and some end with whoever asked for them."""

    def __init__(self) -> None:
        self._tell: dict[int, int] = {}
        self._owners: dict[int, int] = {}

    def fork(self, wanted: dict[str, Any], tell: int, files: list[int]) -> None:
        """Fork a program, which will tell its process, and this one its exit code."""
        if not (pid := os.fork()):
            _be(wanted, tell, files)
        self._tell[pid] = tell
        if owner := wanted["owner"]:
            try:
                self._owners[pid] = os.pidfd_open(owner)
            except ProcessLookupError:
                os.kill(pid, signal.SIGKILL)
        for each in files:
            os.close(each)

    def ended(self) -> list[int]:
        """To be waited for: something can be read where one of those who asked has ended."""
        return list(self._owners.values())

    def look(self) -> None:
        """Tell who has ended, and end who has lost the one that asked for it."""
        gone = wait_readable(self.ended(), 0.0)
        for pid in [*self._tell]:
            if self._owners.get(pid) in gone:
                os.kill(pid, signal.SIGKILL)
            if (code := wait_for_child(pid, 0.0)) is not None:
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._tell[pid], f"code {code}\n".encode())
                os.close(self._tell.pop(pid))
                if pid in self._owners:
                    os.close(self._owners.pop(pid))


def main() -> None:
    """Fork what is asked for, until nobody is left who asks."""
    from instep.cli.preloaded import import_all

    asked, parent, children = socket.socket(fileno=int(sys.argv[1])), os.getppid(), Children()
    import_all()
    keep_warm()
    reads, writes = os.pipe()
    os.set_blocking(reads, False)
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while os.getppid() == parent:
        ready = wait_readable([asked.fileno(), reads, *children.ended()], LOOK_S)
        if reads in ready:
            os.read(reads, 1 << 12)
        if asked.fileno() in ready:
            note, files, _, _ = socket.recv_fds(asked, 1 << 20, 64)
            if not note:
                return
            children.fork(json.loads(note), files[0], files[1:])
        children.look()


def _be(wanted: dict[str, Any], tell: int, files: list[int]) -> NoReturn:
    """Be a program, in the fork."""
    try:
        numbers = wanted["numbers"]
        tell, *above = (
            fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for each in (tell, *files)
        )
        for number, file in zip(numbers[3:], above[3:], strict=True):
            os.dup2(file, number)
        known = os.environ.get("PYTHONPATH", "")
        os.environ.clear()
        os.environ.update(wanted["environment"])
        if (path := os.environ.get("PYTHONPATH", "")) != known:
            sys.path[:0] = path.split(os.pathsep)
        os.chdir(wanted["folder"])
        tempfile.tempdir = None
        _mark(os.environ.get(MARK, UNMARKED))
        os.write(tell, f"pid {os.getpid()}\n".encode())
        become(
            lambda: _program(wanted["role"], wanted["words"]),
            name=wanted["role"],
            given=above[0],
            output=above[1],
            errors=above[2],
            keep=numbers[3:],
        )
    finally:
        os._exit(1)


def _mark(mark: str) -> None:
    """Have the mark of the program in the environment that the system shows, as it began with."""
    assert len(mark) == len(UNMARKED)
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[47]), int(fields[48])  # fields 50 and 51 of proc(5)
    place = ctypes.string_at(begin, end - begin).index(f"{MARK}=".encode()) + len(MARK) + 1
    ctypes.memmove(begin + place, mark.encode(), len(mark))


def _program(role: str, words: list[str]) -> object:
    if role == "instep-host":
        from instep.launch.fork_server import main as program
    elif role == "instep-master":
        from instep.control.master_process import main as program
    else:
        from instep.cli import run_main as program

        sys.argv = ["instep", *words]
        sys.path.insert(0, os.getcwd())  # as for `python -m`
    return program()


if __name__ == "__main__":
    main()
