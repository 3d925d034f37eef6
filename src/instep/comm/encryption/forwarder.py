"""Encrypts what the ranks of groups send each other between hosts, as gloo cannot.

Gloo listens and connects on loopback only. Beside each worker runs a *forwarder*, a process that
carries the bytes over mutual TLS to the forwarder of the other worker:

    worker 3 -> 127.0.5.1:P, worker 3's forwarder -- TLS --> worker 4's forwarder -> 127.0.5.1:Q

Each worker listens at a loopback address of its own (`inside`), whatever host it is on. What a rank
leaves in the store (`Forwarder.leave`) also says where its forwarder is. Who reads that
(`Forwarder.take`) gets the address with another port, at which its own forwarder listens. So of two
addresses the same one is lower everywhere: gloo decides by that which of two ranks connects.

Ranks of one machine connect to each other as before. Nothing here knows what the bytes mean.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from typing import IO, Any, Protocol

import msgspec

from instep.comm.encryption.certificates import Credentials
from instep.comm.encryption.forwarding import PORT, inside, serve
from instep.errors import PeerError
from instep.undecodable import UNDECODABLE


class _Left(msgspec.Struct):
    """What a rank leaves in the store."""

    number: int
    machine: str
    host: str
    port: int
    """Of its forwarder."""
    value: bytes
    """Gloo's own."""


class Process(Protocol):
    """What a `Popen` has, and a fork of this process too."""

    pid: int

    @property
    def stdin(self) -> IO[bytes] | None:
        """To it."""

    @property
    def stdout(self) -> IO[bytes] | None:
        """From it."""

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""

    def kill(self) -> None:
        """End it at once."""


def _as_a_program(_: Callable[[int, int], None]) -> Process:
    command = [sys.executable, "-P", "-m", "instep.comm.encryption.forwarding"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


class Forwarder:
    """A worker's own forwarder: starts its process, and again if that is lost.

    Args:
        number: the worker's.
        address: where workers of other hosts reach this one.
        credentials: the worker's.
        machine: a name that processes share if they reach each other on loopback.
        fork: starts its first process as a fork of this one, with a pipe each way: an interpreter
            takes a tenth of a second to start. Without it, and later, it is a program.
    """

    def __init__(
        self,
        number: int,
        address: str,
        credentials: Credentials,
        machine: str,
        *,
        fork: Callable[[Callable[[int, int], None]], Process] | None = None,
    ) -> None:
        self.inside = inside(number)
        """The address on which gloo listens."""
        self._number, self._address, self._machine = number, address, machine
        self._note = {"credentials": asdict(credentials), "address": address, "number": number}
        self._lock = threading.Lock()
        self._group = ""
        self._start(fork or _as_a_program)

    def _start(self, start: Callable[[Callable[[int, int], None]], Process]) -> None:
        try:
            self._process = start(serve)
        except OSError as error:
            text = f"the forwarder, which encrypts traffic, cannot be started: {error.strerror}."
            raise PeerError(text, mine=True) from None
        self._port = 0
        self._tell(self._note)

    def begin(self, group: str) -> None:
        """A group is about to form: none that another `begin` was for will be joined any more.

        Raises:
            PeerError: the forwarder cannot be started.
        """
        with self._lock:
            if self._process.poll() is not None:
                self._close()
                self._start(_as_a_program)
            elif self._group and group != self._group:
                self._ask({"forget": self._group})
            self._group = group

    def leave(self, group: str, value: bytes) -> bytes:
        """What to leave in the store for a value of gloo."""
        with self._lock:
            for port in set(_ports(value, self._number)):
                self._ask({"expose": port, "group": group})
            return msgspec.msgpack.encode(
                _Left(self._number, self._machine, self._address, self._known_port(), value)
            )

    def take(self, group: str, data: bytes) -> bytes:
        """The value for gloo of what a rank has left in the store.

        Raises:
            PeerError: it makes no sense, or the forwarder has ended.
        """
        try:
            left = msgspec.msgpack.decode(data, type=_Left)
        except UNDECODABLE as error:
            raise PeerError(f"what a rank left in the store makes no sense: {error}.") from None
        if left.machine == self._machine:
            return left.value
        value = left.value
        with self._lock:
            for port in set(_ports(value, left.number)):
                way = [left.number, left.host, left.port, port]
                here = self._ask({"open": way, "group": group})
                there = _sockaddr(left.number, port)
                value = value.replace(there, _sockaddr(left.number, here))
        return value

    @property
    def pid(self) -> int:
        """Of its process."""
        return self._process.pid

    def kill(self) -> None:
        """End its process at once; groups that it carries break, and the next begins another."""
        self._process.kill()

    def close(self) -> None:
        """End it; it still sends what it has."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()

    def _known_port(self) -> int:
        if not self._port:
            self._port = self._hear()
        return self._port

    def _ask(self, request: dict[str, Any]) -> int:
        self._known_port()
        self._tell(request)
        return self._hear()

    def _tell(self, note: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(note).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._lost() from error

    def _hear(self) -> int:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._lost()
        return int(line)

    def _lost(self) -> PeerError:
        return PeerError("the forwarder, which encrypts this worker's traffic, has ended.")


def _sockaddr(number: int, port: int) -> bytes:
    """A worker's address as the system has it, and gloo leaves it in the store."""
    return struct.pack("=H", socket.AF_INET) + PORT.pack(port) + socket.inet_aton(inside(number))


def _ports(value: bytes, number: int) -> list[int]:
    """The ports of a worker's own address in a value of gloo."""
    family, address = struct.pack("=H", socket.AF_INET), socket.inet_aton(inside(number))
    found = re.findall(re.escape(family) + b"(..)" + re.escape(address), value, re.DOTALL)
    return [PORT.unpack(port)[0] for port in found]
