"""The hosts of a preparation, as its master sees them: started, watched, started again.

A launcher starts `host.py` on each (`launch/`), which connects here, at the door that a run's hosts
have too (`comm/protocol/endpoint.py`), and says how many workers it has. Messages of workers are
carried in those of the channel. A host that is silent, ends or is cut off is lost with all its
workers, and comes back as a new one. Way in: `Hosts`.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from instep import errors
from instep.comm.encryption.certificates import Identity
from instep.comm.protocol import messages as m
from instep.comm.protocol.endpoint import Switchboard
from instep.comm.protocol.hub import Peer
from instep.errors import InstepError, PeerError, RunError
from instep.job.launch import LaunchSpec
from instep.launch.base import Launcher
from instep.prepare.messages import (
    ITSELF,
    Answer,
    Beat,
    Failed,
    FromHost,
    FromWorker,
    Get,
    HostReady,
    HostSetup,
    Look,
    Lost,
    Part,
    Sent,
)
from instep.prepare.workers.failed import failed_by, last_line
from instep.prepare.workers.files import Arrivals, Shelf
from instep.prepare.workers.host_worker import Host, HostWorker
from instep.store.folder import host_log
from instep.system.limits import FLOOR_S, LOOK_S
from instep.undecodable import UNDECODABLE
from instep.words import plural

PROGRAM = "instep.prepare.workers.host"

SILENT_S = 15.0
"""A host that is silent for so long is lost. It passes on what its workers send, and may wait for
the network meanwhile."""

COMES_S = 60.0
"""How long a host that was started may take to connect, before it is started again."""

PAUSES_S = (0.0, 1.0, 2.0, 4.0, 8.0)
"""Before each further start; a host that has ended as often without getting ready is given up."""

PROOF_S = 5.0
"""How long a connection may take to prove what it is."""

LEAVE_S = 5.0
"""How long hosts may take to end, before the launcher ends them."""


class Hosting(NamedTuple):
    """The launcher of hosts, and the door where they connect."""

    launcher: Launcher
    board: Switchboard
    launch: LaunchSpec
    """With the number of hosts."""


class Hosts:
    """The hosts.

    Args:
        enter: gives the launcher; what it has started ends with it.
        setup: the first message to each.
        paths: of raw files, which they may ask for.
        workers: how many they have together; 0: one for each processor of each.
        say: prints a line.
    """

    def __init__(
        self,
        enter: Callable[[], AbstractContextManager[Hosting]],
        setup: HostSetup,
        paths: list[str],
        workers: int,
        say: Callable[[str], None],
    ) -> None:
        self._enter, self._setup, self._say = enter, setup, say
        self._workers, self._shelf = workers, Shelf(paths)
        self._folder = Path(setup.setup.folder)
        self._hold = ExitStack()
        self._hosting: Hosting | None = None
        self._hosts: dict[int, Host] = {}
        self._lost: list[HostWorker] = []
        self._next, self._now = 0, 0.0
        self.most = 0
        """Workers that were there at once."""

    @property
    def started(self) -> bool:
        """Whether hosts were started."""
        return self._hosting is not None

    @property
    def _open(self) -> Hosting:
        """The launcher and the door, once hosts were started."""
        if self._hosting is None:
            raise AssertionError("asked before the start")
        return self._hosting

    def start(self) -> None:
        """Start all; a second call does nothing.

        Raises:
            SpecError: the launcher cannot.
        """
        if self._hosting is not None:
            return
        hosting = self._hosting = self._hold.enter_context(self._enter())
        self._hosts = {number: Host() for number in range(hosting.launch.count or 1)}
        self._now = time.monotonic()
        self._say(f"on {plural(len(self._hosts), 'host')}")
        self._start_missing()

    @property
    def workers(self) -> list[HostWorker]:
        """All workers that are there."""
        return [worker for host in self._hosts.values() for worker, _ in host.workers.values()]

    def take_lost(self) -> list[HostWorker]:
        """The workers that were lost since the last call."""
        lost, self._lost = self._lost, []
        return lost

    def fileno(self) -> int:
        """For `select`: of all connections."""
        return self._open.board.hub.fileno()

    # ---- time

    def turn(self, now: float) -> Iterator[tuple[HostWorker, Answer]]:
        """Take in messages; start hosts again that are lost.

        Raises:
            InstepError: a host cannot do it, or none is left.
        """
        hub = self._open.board.hub
        for peer, message in hub.receive(0.0):
            number = next((n for n, host in self._hosts.items() if host.peer is peer), None)
            if number is not None and message is not None:
                yield from self._take(number, message)
            elif number is not None:
                self._lose(number, "its connection broke")
            elif message is not None and not (
                isinstance(message, m.Hello) and self._is(peer, message)
            ):
                hub.drop(peer)
        for peer in hub.late(PROOF_S):
            hub.drop(peer)
        self._watch(now)

    def _watch(self, now: float) -> None:
        passed, self._now = min(now - self._now, LOOK_S), now
        for number, host in self._hosts.items():
            if host.peer is None:
                continue
            host.silent_s += passed
            if host.silent_s > FLOOR_S:
                self._open.launcher.end_if_stopped(number)
            if host.silent_s > SILENT_S:
                self._lose(number, f"it gave no sign of life for {SILENT_S:g} s")
        self._start_missing()

    def _start_missing(self) -> None:
        """Start hosts that are not there, once they are due."""
        launcher, board, _ = self._open
        for number, host in self._hosts.items():
            if host.peer is not None or host.given_up:
                continue
            if host.late:
                launcher.end_if_stopped(number)
                code = launcher.ended(number)
                if code is None and self._now < host.late:
                    continue
                host.tries, host.late = host.tries + 1, 0.0
                if host.tries >= len(PAUSES_S):
                    self._give_up(number)
                    continue
                host.due = self._now + PAUSES_S[host.tries]
            if self._now >= host.due:
                host.late = self._now + COMES_S
                endpoint = replace(board.for_host(number), program=PROGRAM)
                launcher.start(endpoint, self._folder / "logs")

    def _give_up(self, number: int) -> None:
        host, name = self._hosts[number], self._open.launch.host(number)
        host.given_up = True
        last = last_line(host_log(self._folder / "logs", number))
        printed = f": {last}" if last else ""
        text = f"{name} was started {plural(host.tries, 'time')}, and has not come{printed}"
        if all(each.given_up for each in self._hosts.values()):
            raise RunError(f"{text}. No host is left; what is done is kept, for the same command.")
        self._say(f"{text}; the others go on")

    # ---- what comes

    def _is(self, peer: Peer, hello: m.Hello) -> bool:
        """Take in a host that has shown the token; a former one of its number goes."""
        board, number = self._open.board, hello.number
        known = hmac.compare_digest(hello.token.encode(), board.endpoint.token.encode())
        known &= peer.shown in (None, Identity("host", number))
        if not known or hello.version != m.VERSION or hello.role != "host":
            return False
        if number not in self._hosts:
            return False
        board.hub.trust(peer)
        if self._hosts[number].peer is not None:
            self._lose(number, "another process has taken its place")
        host = self._hosts[number]
        host.peer, host.silent_s, host.late = peer, 0.0, 0.0
        setup = msgspec.structs.replace(self._setup, workers=self._share(number))
        self._send(peer, ITSELF, setup)
        return True

    def _share(self, number: int) -> int:
        """How many workers a host has; 0: it decides."""
        if not self._workers:
            return 0
        each, more = divmod(self._workers, len(self._hosts))
        return max(1, each + (number < more))

    def _send(self, peer: Peer | None, worker: int, message: msgspec.Struct) -> None:
        if self._hosting is not None and peer is not None:
            body = msgspec.msgpack.encode(message)
            self._hosting.board.hub.send(peer, m.Carry(worker=worker, body=body))

    def _take(self, number: int, message: m.AnyMessage) -> Iterator[tuple[HostWorker, Answer]]:
        host = self._hosts[number]
        host.silent_s = 0.0
        if not isinstance(message, m.Carry):
            return
        try:
            if message.worker == ITSELF:
                self._of_host(number, msgspec.msgpack.decode(message.body, type=FromHost))
            elif message.worker in host.workers:
                found = msgspec.msgpack.decode(message.body, type=FromWorker)
                yield from self._of_worker(host, message.worker, found)
        except (*UNDECODABLE, PeerError) as error:
            self._lose(number, str(error))

    def _of_host(self, number: int, message: FromHost) -> None:
        host = self._hosts[number]
        match message:
            case HostReady(workers=count, sees=sees):
                host.tries = 0
                for _ in range(count):
                    self._seat(host, sees)
                self.most = max(self.most, len(self.workers))
            case Lost(worker=number, how=how, printed=printed) if number in host.workers:
                worker = host.workers[number][0]
                worker.printed = printed
                self._end(host, number, how, blamed=True)
                self._seat(host, worker.near)
            case Failed():
                raise _error(message)

    def _seat(self, host: Host, near: bool) -> None:
        """One more worker; each has a number that no other had."""
        number, peer = self._next, host.peer
        self._next += 1
        worker = HostWorker(near, lambda message: self._send(peer, number, message))
        host.workers[number] = worker, Arrivals(self._folder, str(number))

    def _of_worker(
        self, host: Host, number: int, message: FromWorker
    ) -> Iterator[tuple[HostWorker, Answer]]:
        worker, arrivals = host.workers[number]
        match message:
            case Look() | Get():
                worker.send(self._shelf.answer(message))
            case Part() | Sent():
                try:
                    arrivals.take(message)
                except OSError as error:
                    raise _error(failed_by(error, -1)) from None
            case Beat() | Failed():
                yield worker, message
            case _ if worker.task is not None and worker.task.number == message.number:
                yield worker, arrivals.moved(message) if not worker.near else message

    # ---- what is lost

    def _end(self, host: Host, number: int, how: str, *, blamed: bool) -> None:
        worker, arrivals = host.workers.pop(number)
        arrivals.discard()
        worker.ended, worker.how, worker.blamed = True, how, blamed
        self._lost.append(worker)

    def _lose(self, number: int, how: str) -> None:
        host = self._hosts[number]
        peer, host.peer, host.late = host.peer, None, self._now + COMES_S
        name = self._open.launch.host(number)
        for worker in list(host.workers):
            self._end(host, worker, f"{name} was lost: {how}", blamed=False)
        if peer is not None:
            self._open.board.hub.drop(peer)

    def close(self) -> None:
        """End all hosts; a second call does nothing."""
        if self._hosting is None:
            return
        hosting, self._hosting = self._hosting, None
        for host in self._hosts.values():
            for _, arrivals in host.workers.values():
                arrivals.discard()
            if host.peer is not None:
                hosting.board.hub.send(host.peer, m.Leave())
        deadline = time.monotonic() + LEAVE_S
        while hosting.board.hub.peers() and time.monotonic() < deadline:
            for _ in hosting.board.hub.receive(0.05):
                pass
        self._hold.close()


def _error(failed: Failed) -> InstepError:
    found: InstepError = getattr(errors, failed.kind, InstepError)(failed.text)
    return found
