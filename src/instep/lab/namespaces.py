"""Namespaces of the kernel, and the programs that change them: what `netlab.py` is built of.

It knows no network as a whole, except that the name of a namespace begins with that of its network.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import fcntl
import os
import re
import socket
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from instep.errors import SpecError
from instep.system.processes import stat_fields

_NAMESPACES = Path("/run/netns")
_NAME = re.compile(r"(netlab-(\d+)-(\d+)-(\d+))-(switch|h\d+)")
_OFFLOADS = {"TSO": 0x1F, "GSO": 0x24, "GRO": 0x2C}  # linux/ethtool.h, ETHTOOL_STSO and so on
_SIOCETHTOOL, _CLONE_NEWNET = 0x8946, 0x40000000
_Result = TypeVar("_Result")


class NetworkError(SpecError):
    """This machine cannot have such a network, or there is no such host."""


def link_up(link: str) -> list[str]:
    """Set a link up without an address of IPv6, so that the kernel sends nothing that is counted.

    In two lines: one line that says both sets the link up first, and the address is there.
    """
    has_ipv6 = Path("/proc/sys/net/ipv6").exists()
    return [*([f"link set {link} addrgenmode none"] if has_ipv6 else []), f"link set {link} up"]


def namespaces() -> Iterator[re.Match[str]]:
    """The namespaces of all networks; the first group of each is the name of its network."""
    names = sorted(os.listdir(_NAMESPACES)) if _NAMESPACES.is_dir() else []
    return (match for name in names if (match := _NAME.fullmatch(name)))


def networks() -> list[str]:
    """The names of the networks on this machine."""
    return list(dict.fromkeys(match[1] for match in namespaces()))


def started_at(pid: int) -> str:
    """When a process started, in the kernel's ticks: it tells two users of one pid apart."""
    return "".join(stat_fields(pid)[19:20])


def creator_lives(name: str) -> bool:
    """Whether the process that made a network has not ended."""
    _, _, pid, started = name.split("-")
    return started_at(int(pid)) == started


def processes_in(space: str) -> list[int]:
    """The pids of the processes in a namespace."""
    return [int(pid) for pid in call("ip", "netns", "pids", space, may_fail=True).split()]


def enter(space: str) -> None:
    """Put this thread into a namespace from now on; sockets it makes are there.

    Raises:
        NetworkError: there is none such, or this user may not.
    """
    try:
        with (_NAMESPACES / space).open() as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise NetworkError(f"{space}: {os.strerror(ctypes.get_errno())}.")
    except OSError as error:
        raise NetworkError(f"{space}: {error.strerror}.") from error


def inside(space: str | None, call: Callable[[], _Result]) -> _Result:
    """Call it in a thread that has entered the namespace; sockets it makes stay there."""
    results: list[_Result] = []
    failures: list[Exception] = []

    def enter_and_call() -> None:
        try:
            if space is not None:
                enter(space)
            results.append(call())
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=enter_and_call)
    thread.start()
    thread.join()
    for failure in failures:
        raise failure
    return results[0]


def switch_off_offloads(space: str | None, link: str) -> list[str]:
    """What `ethtool -K LINK tso off gso off gro off` does; the names of those that stay on."""
    stay = []
    with inside(space, lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as ours:
        for name, command in _OFFLOADS.items():
            value = array.array("I", [command, 0])
            request = struct.pack("16sP16x", link.encode(), value.buffer_info()[0])
            try:
                fcntl.ioctl(ours, _SIOCETHTOOL, request)
            except OSError:
                stay.append(name)
    return stay


def batch(at: Sequence[str], lines: Sequence[str]) -> None:
    """Run many lines of `ip`, in the namespace that `at` names."""
    call("ip", *at, "-batch", "-", given="\n".join(lines) + "\n")


def call(program: str, *arguments: str, given: str | None = None, may_fail: bool = False) -> str:
    """Run a program, and return what it prints; NetworkError with what it says if it fails."""
    command = [program, *arguments]
    try:
        done = subprocess.run(command, input=given, capture_output=True, text=True)
    except FileNotFoundError:
        raise NetworkError(f"the program {program} (of iproute2) is not installed.") from None
    if done.returncode and not may_fail:
        raise NetworkError(f"`{' '.join(command)}` says: {' '.join(done.stderr.split())}")
    return done.stdout


NEEDS = "Linux with the programs ip and tc, and root (CAP_NET_ADMIN and CAP_SYS_ADMIN)"


def take_a_number() -> int:
    """The first free K; its link in this machine's own namespace reserves it."""
    for number in range(256):
        link = f"netlab{number}"
        try:
            loose = loose_end(number, os.getpid())
            with without_others():
                call("ip", "link", "add", link, "type", "veth", "peer", "name", loose)
        except NetworkError as error:
            if "exists" not in str(error):
                raise NetworkError(f"no emulated hosts here; they need {NEEDS}: {error}") from error
            continue
        return number
    raise NetworkError(
        "there are 256 networks already; `instep netlab clean` removes those of ended processes."
    )


def loose_end(number: int, pid: int) -> str:
    """The other end of that link until it is plugged in; the name holds its creator's pid."""
    return f"nl{number}-{pid}"


@contextlib.contextmanager
def without_others() -> Iterator[None]:
    """Wait until no other process takes or frees a number, by a socket that nobody can leave."""
    deadline = time.monotonic() + 30
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as held:
        while time.monotonic() < deadline:
            try:
                held.bind("\0instep-netlab")
                break
            except OSError:
                time.sleep(0.01)
        yield
