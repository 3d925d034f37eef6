"""What the standard library does not offer about processes: start times, states, safe signals."""

from __future__ import annotations

import ctypes
import errno
import fcntl
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
"""The name of a spare process, which waits to replace another one; `ps` shows it."""

FORWARDER = "instep-forward"
"""That of a process that encrypts what a worker sends, if it is a fork of the worker."""

MEMBERS = {"worker": "instep-worker", "server": "instep-server"}
"""The names of processes that are members of a run, by role; `ps` shows them."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15
_F_SETSIG = 10


def die_with_parent(number: signal.Signals) -> None:
    """Ask the kernel to send this process a signal when its parent ends (Linux).

    On other systems a process notices by its socket that the master is gone.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))
    if os.getppid() != parent:  # it ended before the kernel was asked
        os.kill(os.getpid(), number)


def die_with_pipe(pipe: int) -> None:
    """Have the kernel kill all processes of this one's group once nobody can write into a pipe any
    more, or somebody does; also those that are stopped (Linux)."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(pipe, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(pipe, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)


def name_process(name: str) -> str:
    """Give this process a name of at most 15 bytes (Linux); returns its former name."""
    if sys.platform != "linux":
        return name
    before = Path("/proc/self/comm").read_text().strip()
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)
    return before


PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)
"""Pauses before each retry of a process that could not be started."""

_TRANSIENT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def start_with_retries(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a program; if the system is short of processes or memory, retry, and say so.

    Raises:
        OSError: it cannot be started.
    """
    for pause_s in PAUSES_S:
        try:
            return subprocess.Popen(command, **options)
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            text = f"a process could not be started ({error.strerror}); retrying in"
            print(f"warning {text} {pause_s:g} s.", file=sys.stderr)
            time.sleep(pause_s)
    return subprocess.Popen(command, **options)


def machine() -> str:
    """A name that processes share if they reach each other whatever happens to the network.

    They share the kernel, the process ids, and (Linux) the network interfaces.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        spaces = [os.readlink(f"/proc/self/ns/{name}") for name in ("pid", "net")]
    except OSError:
        return platform.node()
    return " ".join([boot, *spaces])


def started_at() -> float:
    """Unix seconds at which this process began, to 10 ms on Linux; else about now."""
    return start_time(os.getpid()) or time.time()


def start_time(pid: int) -> float | None:
    """Unix seconds at which a process began, to 10 ms on Linux; None if it is gone, or elsewhere.

    psutil is less exact: it adds the time since boot to a boot time in whole seconds.
    """
    try:
        ticks_after_boot = int(stat_fields(pid)[19])  # field 22 of proc(5)
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks_after_boot / os.sysconf(
            "SC_CLK_TCK"
        )
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age_s


def stat_fields(pid: int) -> list[str]:
    """The fields of a process in proc(5) from the third, its state, on; empty if there are none.

    Read directly, as psutil would import much more into every process, and reads more.
    """
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return []


@contextmanager
def on_signals(
    do: Callable[[int, FrameType | None], Any] | signal.Handlers, *more: signal.Signals
) -> Iterator[None]:
    """Handle Ctrl-C, SIGTERM, SIGHUP and `more` with `do`, for as long as the context lasts.

    A signal that is ignored stays ignored (nohup asks for that). Outside the main thread,
    where Python cannot set handlers, nothing changes.
    """
    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *more):
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
    """For `on_signals`: raise as Ctrl-C does."""
    raise KeyboardInterrupt


def end_group(group: int, timeout_s: float) -> None:
    """Kill every process of a group, and wait until they are gone, at most `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)
        while time.monotonic() < deadline and _has_living(group):
            time.sleep(0.01)


def _has_living(group: int) -> bool:
    """Whether a group has a process that has not ended; a zombie has."""
    try:
        os.killpg(group, 0)
    except (ProcessLookupError, PermissionError):
        return False
    for process in Path("/proc").glob("[0-9]*"):
        match stat_fields(int(process.name))[:3]:
            case [state, _, its_group] if int(its_group) == group and state not in "ZX":
                return True
    return not Path("/proc/self/stat").exists()


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is stopped, as by SIGSTOP (Linux; else False)."""
    return stat_fields(pid)[:1] == ["T"]


def wait_readable(descriptors: Sequence[int], timeout_s: float) -> list[int]:
    """Those from which something can be read, as soon as there is one; empty after the timeout.

    As `select.select`, which cannot have a descriptor above 1023.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * timeout_s)]


class Watched:
    """A process of this machine, a child or not: whether it lives, and signals to it.

    On Linux a pidfd identifies it, which cannot come to mean another process; elsewhere
    its pid has to do.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._handle = -1
        with suppress(OSError, AttributeError):
            self._handle = os.pidfd_open(pid)

    @property
    def ended(self) -> bool:
        """Whether it has ended, as far as is known."""
        if self._handle >= 0:
            return bool(wait_readable([self._handle], 0))
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, at most so long; whether it has."""
        if self._handle >= 0:
            return bool(wait_readable([self._handle], timeout_s))
        if not self.ended:
            time.sleep(timeout_s)
        return self.ended

    @property
    def stopped(self) -> bool:
        """As `is_stopped`."""
        return is_stopped(self.pid)

    def signal(self, number: int) -> None:
        """Send it a signal, if it lives."""
        with suppress(ProcessLookupError, PermissionError):
            if self._handle >= 0 and number != ASK:
                signal.pidfd_send_signal(self._handle, number)
            elif not self.ended:
                send(self.pid, number)

    def close(self) -> None:
        """Close the handle; a second call does nothing."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def wait_for_child(pid: int, timeout_s: float) -> int | None:
    """The exit code of a child that ends within a time, negative for a signal; else None."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            found, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # somebody else has asked
            return 0
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def has_ended(pid: int) -> bool:
    """Whether a process of this machine has ended."""
    process = Watched(pid)
    try:
        return process.ended
    finally:
        process.close()
