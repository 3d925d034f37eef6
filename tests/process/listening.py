"""Where processes listen, from the kernel's own list of listening sockets (sock_diag(7)).

`/proc/net/tcp`, which psutil reads once for each process, takes some milliseconds each time: it has
every connection of the machine. Only sockets of this network namespace are seen.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterable, Iterator

_SOCK_DIAG, _BY_FAMILY, _DUMP, _ERROR, _DONE = 4, 20, 0x301, 2, 3
_HEADER = struct.Struct("=IHHII")
_LISTENS, _ANY = 1 << 10, 0xFFFFFFFF
"""States of a TCP socket that listens, and of a UDP socket that is bound."""


def addresses(pids: Iterable[int]) -> set[str]:
    """Local addresses that these processes listen on; those that have ended have none."""
    where = {
        f"socket:[{inode}]": address
        for family in (socket.AF_INET, socket.AF_INET6)
        for protocol, states in ((socket.IPPROTO_TCP, _LISTENS), (socket.IPPROTO_UDP, _ANY))
        for inode, address in _sockets(family, protocol, states)
    }
    return {where[file] for pid in pids for file in _files(pid) if file in where}


def _files(pid: int) -> Iterator[str]:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                yield os.readlink(f"{folder}/{name}")


def _sockets(family: int, protocol: int, states: int) -> Iterator[tuple[int, str]]:
    """Inode and local address of each."""
    request = struct.pack("=BBxxI48x", family, protocol, states)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _SOCK_DIAG) as link:
        link.send(_HEADER.pack(_HEADER.size + len(request), _BY_FAMILY, _DUMP, 1, 0) + request)
        while True:
            data = link.recv(1 << 16)
            while data:
                length, kind, *_ = _HEADER.unpack_from(data)
                if kind in (_DONE, _ERROR):
                    assert kind == _DONE, "the kernel has no sock_diag"
                    return
                message = data[_HEADER.size : length]
                (inode,) = struct.unpack_from("=I", message, 68)
                size = 4 if family == socket.AF_INET else 16
                yield inode, socket.inet_ntop(family, message[8 : 8 + size])
                data = data[(length + 3) & ~3 :]
