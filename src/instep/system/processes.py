"""Small facts about processes that the standard library does not offer."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from instep.system.stacks import ASK, send

SPARE = "instep-spare"
"""What a process calls itself that waits to take another's place; `ps` shows it."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux).

    Elsewhere a process notices by its socket that the master has gone.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), number)


def call_itself(name: str) -> str:
    """Give this process a name, of 15 bytes at most (Linux); the one that it had before."""
    if sys.platform != "linux":
        return name
    before = Path("/proc/self/comm").read_text().strip()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    return before


PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""How long to wait before each further attempt at a process that could not be started."""

_FOR_A_MOMENT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def start_patiently(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program; where the system is short of processes or memory, try again, and say so.

    Raises:
        OSError: it cannot be started.
    """
    for pause_s in PAUSES_S:
        try:
            return subprocess.Popen(command, **options)
        except OSError as error:
            if error.errno not in _FOR_A_MOMENT:
                raise
            text = f"a process could not be started ({error.strerror}); it is tried again in"
            print(f"warning {text} {pause_s:g} s.", file=sys.stderr)
            time.sleep(pause_s)
    return subprocess.Popen(command, **options)


def machine() -> str:
    """The same in all processes that can reach each other whatever happens to a network.

    They share the kernel, the numbers of processes, and (Linux) the network's interfaces.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    except OSError:
        return platform.node()
    return " ".join([boot, *spaces])


def started_at() -> float:
    """Unix seconds at which this process began, to 10 ms on Linux; else about now."""
    return began(os.getpid()) or time.time()


def began(pid: int) -> float | None:
    """Unix seconds at which a process began, to 10 ms on Linux; None if it is gone, or elsewhere.

    psutil adds the time since boot to a time of boot in whole seconds, which
    may be off by one.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks_after_boot = int(fields[19])  # field 22 of proc(5)
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_after_boot / os.sysconf(
            "SC_CLK_TCK"
        )
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age_s


@contextmanager
def on_signals(do: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Have Ctrl-C, SIGTERM and SIGHUP do something else, for as long as the context lasts.

    One that is ignored stays so (as nohup asks for), and so do all of them where
    signals cannot be had: outside the main thread its owner decides.
    """
    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:
                previous[number] = signal.signal(number, do)
    except ValueError:
        pass  # not the main thread
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def interrupt(*_: object) -> NoReturn:
    """For `on_signals`: end what goes on as Ctrl-C does."""
    raise KeyboardInterrupt


def end_group(group: int, timeout_s: float) -> None:
    """Kill every process of a group, and wait until they are gone, but no longer than that."""
    deadline = time.monotonic() + timeout_s
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
        while time.monotonic() < deadline and _has_living(group):
            time.sleep(0.01)


def _has_living(group: int) -> bool:
    """Whether a group has a process that has not ended; one that nobody reaps has."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in "ZX":
                return True
    return not Path("/proc/self/stat").exists()


def exit_code_of(status: int) -> int:
    """From `os.waitpid`: the exit code, negative for a signal."""
    return os.waitstatus_to_exitcode(status)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine was stopped, and has not gone on, as far as is known."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "T"


class Watched:
    """A process of this machine that may be nobody's child of ours: does it live, and end it.

    On Linux the kernel gives a handle that no other process can come to have;
    elsewhere its number has to do.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = -1
        with suppress(OSError, AttributeError):
            self._handle = os.pidfd_open(pid)

    @property
    def ended(self) -> bool:
        """Whether it has ended, as far as can be seen."""
        if self._handle >= 0:
            return bool(select.select([self._handle], [], [], 0)[0])
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    @property
    def stopped(self) -> bool:
        """Whether it was stopped, as by SIGSTOP, and has not gone on; False where nobody tells."""
        return is_stopped(self.pid)

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        with suppress(ProcessLookupError, PermissionError):
            if self._handle >= 0 and number != ASK:
                signal.pidfd_send_signal(self._handle, number)
            elif not self.ended:
                send(self.pid, number)

    def close(self) -> None:
        """Let go of the handle; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended."""
    process = Watched(pid)
    try:
        return process.ended
    finally:
        process.close()
