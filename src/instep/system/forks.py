"""Forks of this process, and whether one is safe: which threads are there, and what CUDA says."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable

from instep.system.processes import name_process, wait_for_child


class Fork:
    """A fork of this process, with a pipe each way; what a program's `Popen` says of it.

    It inherits no other file than the standard ones. This process has no thread but this one.

    Args:
        work: called in it with the descriptors that it reads from and writes to; then it ends.
        name: at most 15 bytes, for `ps`.

    Raises:
        OSError: there is no room for it.
    """

    def __init__(self, work: Callable[[int, int], None], *, name: str) -> None:
        ends = [*os.pipe(), *os.pipe()]
        try:
            self.pid = os.fork()
        except OSError:
            for end in ends:
                os.close(end)
            raise
        reads, writes = ends[0], ends[3]
        if not self.pid:
            code = 1
            try:
                first, last = sorted((reads, writes))
                for start, stop in ((3, first), (first + 1, last), (last + 1, _most_files())):
                    os.closerange(start, stop)
                name_process(name)
                work(reads, writes)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(reads)
        os.close(writes)
        self.stdin, self.stdout = os.fdopen(ends[1], "wb"), os.fdopen(ends[2], "rb")
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, negative for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def kill(self) -> None:
        """End it at once."""
        if self.poll() is None:  # else the number may be another's
            os.kill(self.pid, signal.SIGKILL)


_LASTING = {"jemalloc_bg_thd"}
"""Names of threads of libraries that do not need them after a fork."""


def native_threads() -> int:
    """How many threads this process has, also those that Python does not know; 1 if not known."""
    try:
        names = os.listdir("/proc/self/task")
        return sum(_thread_name(name) not in _LASTING for name in names)
    except OSError:
        return 1


def threads_after_a_fork() -> int:
    """How many there are after a fork, at which libraries that survive one end theirs."""
    pid = os.fork()
    if not pid:
        os._exit(0)
    wait_for_child(pid, timeout_s=60.0)
    return native_threads()


def _thread_name(number: str) -> str:
    with open(f"/proc/self/task/{number}/comm", encoding="utf-8", errors="replace") as file:
        return file.read().strip()


def cuda_survives_a_fork() -> bool:
    """Whether forks of this process may use a GPU: not once it has asked the driver for one."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None:
        return True
    pid = os.fork()
    if not pid:
        code = 1
        try:
            code = int(cuda._is_in_bad_fork())  # what torch itself will ask in a worker
        finally:
            os._exit(code)
    return wait_for_child(pid, timeout_s=60.0) == 0


def _most_files() -> int:
    return int(os.sysconf("SC_OPEN_MAX"))
