"""The process of a forwarder: carries the bytes of one worker over mutual TLS, both ways.

What it is for says `forwarder.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Coroutine
from io import FileIO
from typing import Any

from instep.comm.callers import NO_MORE_FILES, Unproven
from instep.comm.encryption.certificates import Credentials, is_worker
from instep.comm.encryption.tls import Tls, context
from instep.errors import PeerError

PROOF_S = 5.0
"""How long a caller may take to prove what it is, and to say what it wants."""

MOST_UNPROVEN = 256
"""Callers that have not; the oldest is dropped."""

FULL_S = 0.5
"""How long no caller is accepted after the process could open no more files."""

STRANGERS, AT_ONCE_S = 0.05, 0.1
"""The part of its time that the process gives to handshakes with callers from machines without a
worker, and how much it gives before it counts."""

LAST_S = 5.0
"""How long bytes that a worker has sent may take to leave, once it has ended."""

CHUNK = 1 << 18
"""Bytes that are carried at a time."""

GATHER_S, WORTH = 0.004, 1 << 13
"""For so long packets of a long message are gathered on a slow link, as long as they bring so many
bytes each time: at 100 Mbit/s each would wake the process, which takes 0.1 ms."""

SLOW, TRY_S, GATHERED_S, QUIET_S = 20e6, 0.02, 0.2, 0.01
"""A link is slow that brings fewer bytes a second without gathering, which limits it too: this is
tried for `TRY_S`, again after `GATHERED_S`, and after each pause."""

PORT = struct.Struct("!H")
"""How ports are written."""


def inside(number: int) -> str:
    """The loopback address of a worker (on Linux all of 127.0.0.0/8 is loopback)."""
    return str(ipaddress.IPv4Address("127.0.0.1") + 256 * (number + 1))


class Forwarding:
    """What the process does: carries bytes both ways, until its worker has ended.

    Args:
        requests: what its worker writes to it, a line each; unbuffered.
        answers: takes a number for each.
    """

    def __init__(self, requests: FileIO, answers: FileIO) -> None:
        self._requests, self._answers = requests, answers
        note = json.loads(requests.readline())
        credentials = Credentials(**note["credentials"])
        self._accepts = context(credentials, server=True)
        self._calls = context(credentials, server=False)
        self._number = int(note["number"])
        self._listener = socket.create_server((note["address"], 0), backlog=1024)
        self._listener.setblocking(False)
        self._exposed: dict[int, str] = {}  # port of this worker to group
        self._open: dict[tuple[str, int, int], tuple[socket.socket, asyncio.Task[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unproven = Unproven[asyncio.Task[None]](MOST_UNPROVEN)
        self._machines: set[str] = set()  # addresses of those that have workers
        self._next_stranger = asyncio.Lock()
        self._spent_s = self._spent_at = 0.0  # on strangers, beyond their part

    async def run(self) -> None:
        """Serve until standard input ends."""
        loop, requests = asyncio.get_running_loop(), asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(requests), self._requests)
        accepting = loop.create_task(self._accept(self._listener, self._serve))
        self._say(self._listener.getsockname()[1])
        while line := await requests.readline():
            self._say(await self._answer(json.loads(line)))
        for each in (accepting, *(way for _, way in self._open.values())):
            each.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LAST_S)

    def _say(self, number: int) -> None:
        self._answers.write(b"%d\n" % number)

    async def _answer(self, request: dict[str, Any]) -> int:
        match request:
            case {"open": [number, host, port, there], "group": group}:
                self._machines.add(host)
                return await self._open_way(group, number, host, port, there)
            case {"expose": port, "group": group}:
                self._exposed[port] = group
            case {"forget": group}:
                self._exposed = {p: g for p, g in self._exposed.items() if not g.startswith(group)}
                for key in [key for key in self._open if key[0].startswith(group)]:
                    listener, accepting = self._open.pop(key)
                    accepting.cancel()
                    listener.close()
        return 0

    def _keep(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # ---- to other workers

    async def _open_way(self, group: str, number: int, host: str, port: int, there: int) -> int:
        """Listen for gloo in the place of a worker of another host; returns the port."""
        key = (group, number, there)
        if key not in self._open:
            listener = socket.create_server((inside(number), 0))
            listener.setblocking(False)

            async def call(near: socket.socket) -> None:
                await self._call(near, number, (host, port), there)

            self._open[key] = listener, self._keep(self._accept(listener, call))
        name: tuple[str, int] = self._open[key][0].getsockname()
        return name[1]

    async def _call(
        self, near: socket.socket, number: int, address: tuple[str, int], there: int
    ) -> None:
        with near, socket.socket() as far:
            far.setblocking(False)
            try:
                async with asyncio.timeout(PROOF_S):
                    await asyncio.get_running_loop().sock_connect(far, address)
                    ours = Tls(
                        self._calls, server=False, accepted=lambda peer: is_worker(peer, number)
                    )
                    rest = await _prove(ours, far)
                    await _send(far, ours.seal(PORT.pack(there)))
            except (OSError, PeerError, TimeoutError) as error:
                text = f"instep: no way to worker {number}: {error}"
                print(text, file=sys.stderr, flush=True)
                return
            await _carry(near, far, ours, rest)

    # ---- from other workers

    async def _accept(
        self,
        listener: socket.socket,
        serve: Callable[[socket.socket], Coroutine[Any, Any, None]],
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                caller, _ = await loop.sock_accept(listener)
            except OSError as error:
                if error.errno in NO_MORE_FILES:
                    self._end(self._unproven.clear())
                    await asyncio.sleep(FULL_S)
                continue
            caller.setblocking(False)
            self._keep(serve(caller))
            await asyncio.sleep(0)  # else nothing else happens while callers come

    async def _serve(self, far: socket.socket) -> None:
        """One caller, whatever it is."""
        task = asyncio.current_task()
        assert task is not None
        with far, contextlib.ExitStack() as stack:
            theirs = Tls(self._accepts, server=True, accepted=is_worker)
            try:
                stranger = far.getpeername()[0] not in self._machines
                if stranger:
                    self._end(self._unproven.add(task))
                async with asyncio.timeout(PROOF_S):
                    wanted = await _prove(theirs, far, self._step if stranger else _step)
                    while len(wanted) < PORT.size:
                        wanted += await _read(theirs, far)
                    (port,) = PORT.unpack_from(wanted)
                    if port not in self._exposed:
                        return
                    near = stack.enter_context(socket.socket())
                    near.setblocking(False)
                    await asyncio.get_running_loop().sock_connect(
                        near, (inside(self._number), port)
                    )
            except (OSError, PeerError, TimeoutError):
                return  # and not a word to a stranger
            finally:
                self._unproven.remove(task)
            await _carry(near, far, theirs, wanted[PORT.size :])

    def _end(self, callers: list[asyncio.Task[None]]) -> None:
        for each in callers:
            each.cancel()

    async def _step(self, theirs: Tls, data: memoryview) -> tuple[bytes, bytes]:
        """A step of a stranger's handshake: one after the other, and few for long."""
        clock = asyncio.get_running_loop().time
        async with self._next_stranger:
            now = clock()
            self._spent_s = max(0.0, self._spent_s - STRANGERS * (now - self._spent_at))
            self._spent_at = now
            if self._spent_s > AT_ONCE_S:
                await asyncio.sleep((self._spent_s - AT_ONCE_S) / STRANGERS)
            began = clock()
            try:
                return theirs.open(data)
            finally:
                self._spent_s += clock() - began


async def _step(ours: Tls, data: memoryview) -> tuple[bytes, bytes]:
    """As `Tls.open`."""
    return ours.open(data)


async def _prove(
    ours: Tls,
    far: socket.socket,
    step: Callable[[Tls, memoryview], Coroutine[Any, Any, tuple[bytes, bytes]]] = _step,
) -> bytes:
    """Shake hands, in such steps; returns what has arrived after that.

    Raises:
        PeerError: the other end is none that is meant.
    """
    await _send(far, ours.begin())
    rest = b""
    while ours.peer is None:
        rest, answer = await step(ours, await _receive(far))
        await _send(far, answer)
    return rest


async def _read(ours: Tls, far: socket.socket) -> bytes:
    """What arrives next, in plain; perhaps nothing yet."""
    return ours.open(await _receive(far))[0]


async def _receive(end: socket.socket, into: bytearray | None = None) -> memoryview:
    """What arrives next; overwrites `into` if that is given."""
    into = into or bytearray(CHUNK)
    count = await asyncio.get_running_loop().sock_recv_into(end, into)
    if not count:
        raise PeerError("the other end is gone.")
    return memoryview(into)[:count]


async def _send(end: socket.socket, data: bytes) -> None:
    if data:
        await asyncio.get_running_loop().sock_sendall(end, data)


async def _carry(near: socket.socket, far: socket.socket, ours: Tls, rest: bytes) -> None:
    """Carry bytes both ways until one end closes; the other then gets all that was on its way.

    Args:
        near: gloo's.
        far: of the other forwarder.
        ours: has proved what both are.
        rest: what has arrived already.
    """
    for end in (near, far):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def outward() -> None:
        into = bytearray(CHUNK)
        while True:
            await _send(far, ours.seal(await _receive(near, into)))

    async def inward() -> None:
        await _send(near, rest)
        into = bytearray(CHUNK)
        clock = asyncio.get_running_loop().time
        now = since = clock()
        carried, gathers = 0, False  # since then
        while True:
            data = await _receive(far, into)
            before, now = now, clock()
            if now - before > QUIET_S:
                since, carried, gathers = now, 0, False
            carried += len(data)
            await _send(near, ours.open(data)[0])
            if now - since > (GATHERED_S if gathers else TRY_S):
                gathers = not gathers and carried < SLOW * (now - since)
                since, carried = now, 0
            elif gathers and len(data) < WORTH:  # short messages that wait for each other
                since, carried, gathers = now, 0, False
            if gathers:
                await asyncio.sleep(GATHER_S)

    ways = [asyncio.ensure_future(way()) for way in (outward, inward)]
    await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    for way in ways:
        way.cancel()
    ends: list[BaseException | None] = await asyncio.gather(*ways, return_exceptions=True)
    for ended in ends:
        if isinstance(ended, Exception) and not isinstance(ended, (OSError, PeerError)):
            raise ended


def serve(requests: int, answers: int) -> None:
    """Be the forwarder of one worker, until that closes its end of a pipe.

    Args:
        requests: a pipe from it.
        answers: a pipe to it.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the worker decides
    asyncio.run(Forwarding(FileIO(requests, closefd=False), FileIO(answers, "w")).run())


if __name__ == "__main__":
    serve(sys.stdin.fileno(), sys.stdout.fileno())
    os._exit(0)
