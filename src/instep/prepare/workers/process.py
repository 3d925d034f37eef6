"""A worker of a preparation: a program that is given tasks on a socket, one at a time.

Run as `python -m instep.prepare.workers.process DESCRIPTOR`; ends when the other end is gone.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pyarrow as pa

from instep.data.raw.opened import read_through
from instep.errors import InstepError
from instep.plain_file import on_host
from instep.prepare.messages import (
    Beat,
    Done,
    Failed,
    Get,
    Got,
    Look,
    Looked,
    Map,
    Setup,
    Task,
)
from instep.prepare.task import Doer
from instep.prepare.workers.failed import failed_by
from instep.prepare.workers.files import RawFiles, parts_of
from instep.system.processes import die_with_parent, name_process

_GARBAGE = 50_000
"""New objects after which cycles are looked for."""

BEAT_S = 0.5
"""Seconds between two signs of life."""


class Speaker:
    """Sends messages, and signs of life in between from a thread of its own."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self._at = Beat()
        threading.Thread(target=self._beat, daemon=True).start()

    def say(self, message: msgspec.Struct) -> None:
        """Send one message."""
        with self._lock:
            self._connection.send_bytes(msgspec.msgpack.encode(message))

    def at(self, where: str, records: int) -> None:
        """Remember where this process reads, for the next sign of life."""
        self._at = Beat(where, records)

    def _beat(self) -> None:
        while True:
            time.sleep(BEAT_S)
            try:
                self.say(self._at)
            except OSError:
                return


def main() -> int:
    """Do tasks until there are none."""
    die_with_parent(signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the master decides what follows
    name_process("instep-prepare")
    gc.set_threshold(_GARBAGE, 20, 100)  # records are many objects, and hardly ever in cycles
    pa.set_cpu_count(1)
    connection = Connection(int(sys.argv[1]))
    speaker = Speaker(connection)

    def ask(question: Look | Get) -> Looked | Got:
        speaker.say(question)
        return msgspec.msgpack.decode(connection.recv_bytes(), type=Looked | Got)

    try:
        setup = msgspec.msgpack.decode(connection.recv_bytes(), type=Setup)
        if setup.on_host:
            on_host()
            read_through(RawFiles(ask).find)
        try:
            doer = Doer(setup, speaker.at)
        except InstepError as error:
            speaker.say(Failed(-1, type(error).__name__, str(error)))
            return 0
        while True:
            task = msgspec.msgpack.decode(connection.recv_bytes(), type=Task)
            answer = _answer(doer, task, setup.folder)
            if setup.sends and isinstance(task, Map) and isinstance(answer, Done):
                for part in parts_of(Path(setup.folder), task.key):
                    speaker.say(part)
            speaker.say(answer)
    except (EOFError, OSError):
        return 0


def _answer(doer: Doer, task: Task, folder: str) -> Done | Failed:
    try:
        return doer.do(task)
    except InstepError as error:
        return Failed(task.number, type(error).__name__, str(error))
    except OSError as error:
        return failed_by(error, task.number, folder)


if __name__ == "__main__":
    sys.exit(main())
