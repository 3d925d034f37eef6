"""A host of a preparation: starts and watches its workers, and passes on their messages.

A launcher runs `python -m instep.prepare.workers.host` in the place of a fork server, with the same
note on standard input. It connects to the master (`hosts.py`), as a fork server does, and ends with
that connection: what its workers did not finish is done by others. Where it does not see the folder
of results, workers write into a temporary one, and send what they wrote.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing.connection
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from instep.comm.protocol import messages as m
from instep.comm.protocol.channel import Channel
from instep.comm.protocol.endpoint import Endpoint
from instep.errors import PeerError
from instep.plain_file import read_plain
from instep.prepare.asked import hash_of_file
from instep.prepare.folder import MARK
from instep.prepare.messages import ITSELF, Failed, FromHost, HostReady, HostSetup, Lost, Setup
from instep.prepare.workers.local_worker import LocalWorker
from instep.system.environment import END, SCHEDULERS, settings
from instep.system.processes import die_with_parent, die_with_pipe, machine, name_process

BEAT_S, TURN_S = 0.5, 0.2

ANSWER_S = 60.0
"""How long the master may take to answer at first."""

SILENT_S = 20.0
"""How long what was sent may stay unanswered by the master's machine."""


def main() -> int:
    """Serve one preparation; where its master is comes from standard input."""
    die_with_parent(END)
    signal.signal(END, _end)
    for number in (*SCHEDULERS, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)  # the master decides what follows
    note = json.loads(sys.stdin.readline())
    if note.get("lifeline"):
        die_with_pipe(sys.stdin.fileno())
    name_process("instep-prep-host")
    os.environ.update(settings())
    if os.path.isdir(note["folder"]):
        os.chdir(note["folder"])
    try:
        _serve(Endpoint.of(note))
    except (PeerError, TimeoutError) as error:
        print(f"instep: {error}", file=sys.stderr)
        return 1
    return 0


def _end(*_: object) -> NoReturn:
    signal.signal(END, signal.SIG_IGN)  # what is left to do is not disturbed
    sys.exit(0)


def _serve(endpoint: Endpoint) -> None:
    channel = Channel.connect(endpoint.address, ANSWER_S, endpoint.context)
    hello = m.Hello(
        token=endpoint.token, role="host", number=endpoint.host, pid=os.getpid(), machine=machine()
    )
    channel.send(hello)
    channel.give_up_after(SILENT_S)
    given = msgspec.msgpack.decode(channel.wait_for(m.Carry, ANSWER_S).body, type=HostSetup)
    if missing := _missing(given):
        _say(channel, Failed(-1, "SpecError", f"host {endpoint.host} {missing}"))
        channel.wait(ANSWER_S)  # until the master has read it
        return
    with _folder(given, endpoint.host) as (folder, sees):
        setup = Setup(given.setup.asked, str(folder), on_host=True, sends=not sees)
        host = Host(channel, setup, folder / "logs")
        try:
            host.serve(given.workers or len(os.sched_getaffinity(0)), sees)
        finally:
            signal.signal(END, signal.SIG_IGN)
            host.close()


def _missing(given: HostSetup) -> str:
    """Name what this machine does not have, as a sentence without its subject."""
    for file, wanted in given.files.items():
        try:
            same = hash_of_file(file) == wanted
        except OSError as error:
            return f"cannot read {file}: {error.strerror}. {_SHARED}"
        if not same:
            return f"has another file in {file}. {_SHARED}"
    return ""


_SHARED = "Put it into a folder that all hosts share, or copy it there, to the same path."


@contextmanager
def _folder(given: HostSetup, number: int) -> Iterator[tuple[Path, bool]]:
    """The folder of results, and whether it is the master's."""
    there = Path(given.setup.folder)
    try:
        sees = read_plain(there / MARK).decode() == given.mark
    except OSError:
        sees = False
    if sees:
        yield there, True
        return
    name = hashlib.sha256(f"{there} {number}".encode()).hexdigest()[:16]
    for left in Path(tempfile.gettempdir()).glob(f"instep-prepare-{name}-*"):
        if left.stat().st_uid == os.geteuid():  # of a host that was killed
            shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=f"instep-prepare-{name}-") as own:
        (Path(own) / "logs").mkdir()
        yield Path(own), False


def _say(channel: Channel, message: FromHost) -> None:
    channel.send(m.Carry(worker=ITSELF, body=msgspec.msgpack.encode(message)))


class Host:
    """The workers of this machine.

    Args:
        channel: to the master.
        setup: the first message to each.
        logs: folder for what they print.
    """

    def __init__(self, channel: Channel, setup: Setup, logs: Path) -> None:
        self._channel, self._setup, self._logs = channel, setup, logs
        self._workers: dict[int, LocalWorker] = {}
        self._lost = set[int]()
        self._beat_at = 0.0

    def serve(self, workers: int, sees: bool) -> None:
        """Until the master says that it is over.

        Raises:
            PeerError: the master is gone.
        """
        _say(self._channel, HostReady(workers, sees))
        while True:
            by_connection = {w.connection: n for n, w in self._workers.items() if not w.gone}
            waited: list[Any] = [*by_connection, self._channel]
            ready = multiprocessing.connection.wait(waited, TURN_S)
            while self._channel.wait(0.0):
                for message in self._channel.read():
                    match message:
                        case m.Leave():
                            return
                        case m.Carry(worker=number, body=body):
                            self._give(number, body)
            for each in ready:
                if each in by_connection:
                    self._pass_on(by_connection[each])
            self._watch()
            if time.monotonic() > self._beat_at:
                self._beat_at = time.monotonic() + BEAT_S
                self._channel.send(m.Heartbeat())

    def _give(self, number: int, body: bytes) -> None:
        """Give a worker a message; start it, if it is new."""
        if number in self._lost:
            return  # the master will hear of that
        if number not in self._workers:
            log = self._logs / f"worker-{os.uname().nodename}-{number}.log"
            self._workers[number] = LocalWorker(self._setup, log, len(self._lost))
        self._workers[number].send_bytes(body)

    def _pass_on(self, number: int) -> None:
        """Pass one message of a worker on: one at a time, as another may have waited."""
        worker = self._workers[number]
        try:
            body = worker.connection.recv_bytes()
        except (EOFError, OSError):
            worker.gone = True
            return
        worker.lease.renew(time.monotonic())
        self._channel.send(m.Carry(worker=number, body=body))

    def _watch(self) -> None:
        for number, worker in list(self._workers.items()):
            if not worker.ended:
                worker.turn(time.monotonic())
            elif worker.gone or not worker.connection.poll():  # its last messages come first
                _say(self._channel, Lost(number, worker.how, worker.printed))
                self._lost.add(number)
                self._workers.pop(number).close()

    def close(self) -> None:
        """End all workers."""
        for worker in self._workers.values():
            worker.kill()
            worker.close()
        self._channel.close()


if __name__ == "__main__":
    sys.exit(main())
