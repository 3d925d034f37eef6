"""Forks the workers of a host, reports their ends, and ends them when nobody needs them any more.

What must be imported before the first fork is known in `fork_server.py`, and what a spare of this
process is in `spare.py`. Workers that an earlier server has forked are watched too. Way in:
`Server`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from instep.comm.protocol.connection import HEARTBEAT_S, MasterConnection
from instep.comm.protocol.endpoint import Endpoint
from instep.comm.protocol.messages import (
    Adopt,
    Emit,
    Exited,
    Heartbeat,
    Hello,
    KillAll,
    Refused,
    Signal,
    StartWorker,
)
from instep.data.samples.last_read import Pages, use_page
from instep.errors import PeerError
from instep.launch.spare import Spare
from instep.plain_file import plain
from instep.system.environment import END
from instep.system.memory_files import MemoryFiles, give, give_back
from instep.system.processes import (
    MEMBERS,
    Watched,
    is_stopped,
    machine,
    name_process,
    wait_readable,
)
from instep.system.stacks import send

MOST_PAGES = 256
"""Workers of one host that can note where they are, and whose memory is kept."""

PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 6.4, 6.4)
"""How long to wait before each further attempt at a fork that failed."""

ADOPTED_S = 0.05
"""Seconds between two looks at workers that this server did not start."""


def call(endpoint: Endpoint) -> MasterConnection:
    """The connection of a host to its master."""
    hello = Hello(
        token=endpoint.token, role="host", number=endpoint.host, pid=os.getpid(), machine=machine()
    )
    connection = MasterConnection(endpoint.address, hello, endpoint.context)
    connection.lasting = True
    return connection


class _Retry(NamedTuple):
    """A worker that could not be forked yet."""

    order: StartWorker
    tries: int
    due: float


class Server:
    """Forks, reaps and reports workers; and keeps a spare of itself.

    Args:
        connection: to the master.
        endpoint: where that is, for the workers.
        phases: seconds that parts of the start took.
        several: whether it is one of several hosts, whose connection to the master may break.
        lifeline: a pipe that ends when this server, its spare and its workers are to; or -1.
        left: number and handle by process, of the server whose place this one takes.
        pages: where workers note where they are; shared with a spare.
        memory_files: files that outlive a worker; shared with a spare.
    """

    def __init__(
        self,
        connection: MasterConnection,
        endpoint: Endpoint,
        phases: dict[str, float],
        *,
        several: bool = False,
        lifeline: int = -1,
        left: Mapping[int, tuple[int, Watched]] = MappingProxyType({}),
        pages: Pages | None = None,
        memory_files: MemoryFiles | None = None,
    ) -> None:
        self._pages = pages or Pages(MOST_PAGES)
        self._memory_files = memory_files or MemoryFiles(MOST_PAGES, endpoint.token)
        self._connection, self._endpoint, self._phases = connection, endpoint, phases
        self._several, self._lifeline = several, lifeline
        self._workers: dict[int, int] = {}
        self._killed: set[int] = set()  # workers that are being ended
        self._adopted = dict(left)
        for pid, (number, _) in left.items():
            self._memory_files.adopt(number, pid)
        self._retries: dict[int, _Retry] = {}  # by number, workers that could not be forked yet
        self._wake_read, self._wake_write = _wake_pipe()
        self._ending = False
        self._spare = Spare()

    def serve(self) -> None:
        """Until no master can come any more."""
        self._fork_spare()
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(END, self._end)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        if self._several:
            self._connection.keep()
        try:
            while not self._ending:
                self._reap()
                self._watch_adopted()
                self._spare.watch()
                self._retry_forks()
                self._connection.show(self._heartbeat)
                self._receive()  # before waiting: messages may have come together with the welcome
                self._wait()
        except PeerError:
            pass
        finally:
            self._kill_all()

    def _heartbeat(self) -> Heartbeat:
        return Heartbeat(stopped=[*filter(is_stopped, (*self._workers, *self._adopted))])

    def _wait(self) -> None:
        """For a message, a signal, or the next look."""
        tick_s = ADOPTED_S if self._adopted or self._retries else HEARTBEAT_S / 2
        ends = (self._connection.fileno(), self._wake_read, self._lifeline)
        ready = wait_readable([end for end in ends if end >= 0], tick_s)
        self._ending |= self._lifeline in ready

    def _fork_spare(self) -> None:
        adopted = {pid: number for pid, (number, _) in self._adopted.items()}
        self._spare.fork({**adopted, **self._workers}, self._connection.close, self._serve_again)

    def _serve_again(self, left: Mapping[int, tuple[int, Watched]]) -> None:
        """In the spare: serve in the place of the server that has ended, and left these workers."""
        for each in (self._wake_read, self._wake_write):
            os.close(each)
        Server(
            call(self._endpoint),
            self._endpoint,
            self._phases,
            several=self._several,
            lifeline=self._lifeline,
            left=left,
            pages=self._pages,
            memory_files=self._memory_files,
        ).serve()

    def _end(self, *_: object) -> None:
        self._ending = True

    def _receive(self) -> None:
        while (message := self._connection.inbox.poll()) is not None:
            match message:
                case StartWorker(number=number):
                    there = self._workers.items()
                    if number not in {n for pid, n in there if pid not in self._killed}:
                        self._fork(message)
                case Signal(pid=pid, signals=signals):
                    self._signal(pid, signals)
                case Adopt(workers=workers):
                    self._adopt(workers)
                case KillAll():
                    self._kill_all(wait=False)
                case Refused():
                    self._ending = True

    def _adopt(self, workers: Iterable[tuple[int, int]]) -> None:
        """Look after processes, number and pid each, that another server has forked."""
        for number, pid in workers:
            if pid not in self._workers and pid not in self._adopted:
                self._adopted[pid] = number, Watched(pid)
                self._memory_files.adopt(number, pid)
                self._spare.tell(pid, number)

    def _signal(self, pid: int, signals: Iterable[int]) -> None:
        """Send signals to a worker, and to no other process."""
        for number in signals:
            if pid in self._workers:
                send(pid, number)
            elif pid in self._adopted:
                self._adopted[pid][1].signal(number)
            if number == signal.SIGKILL:
                self._killed.add(pid)

    def _fork(self, order: StartWorker) -> None:
        forked, page = time.time(), self._pages.free()
        memory = self._memory_files.of(order.number)
        try:
            pid = os.fork()
        except OSError as error:  # no memory, or no process, for the moment
            self._try_again(order, error)
            return
        self._retries.pop(order.number, None)
        if pid:
            self._pages.assign(page, pid)
            self._workers[pid] = order.number
            self._spare.tell(pid, order.number)
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, END):
                signal.signal(number, signal.SIG_DFL)
            self._connection.close()
            self._spare.leave()
            name_process(MEMBERS[order.role])
            _redirect(Path(order.log))
            use_page(page)
            self._memory_files.keep_only(order.number, memory)
            from instep.process import main as work

            give(memory, self._memory_files.shared)
            # workers of this host that live have a page each, also of a server before this one
            local_rank = page.number if page is not None else MOST_PAGES
            phases = {**self._phases, "forked": forked}
            endpoint = replace(self._endpoint, credentials=order.credentials)
            code = work(endpoint, order.number, local_rank, phases)
            if code == 0:
                give_back()
        finally:
            try:
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)  # nothing of the server's is run down in its child

    def _try_again(self, order: StartWorker, error: OSError) -> None:
        """Have a worker forked once more, after a pause that grows; give it up in the end."""
        tries = self._retries[order.number].tries + 1 if order.number in self._retries else 1
        if tries > len(PAUSES_S):
            del self._retries[order.number]
            why = f"{error.strerror}, tried {tries} times"
            self._connection.send(Exited(number=order.number, pid=0, code=None, error=why))
            return
        pause_s = PAUSES_S[tries - 1]
        self._retries[order.number] = _Retry(order, tries, time.monotonic() + pause_s)
        text = (
            f"worker {order.number} could not be forked ({error.strerror}); it is tried again "
            f"in {pause_s:g} s."
        )
        self._connection.send(Emit(name="warning", fields={"text": text}))

    def _retry_forks(self) -> None:
        """Those that could not be forked, and whose pause is over."""
        now = time.monotonic()
        for retry in list(self._retries.values()):
            if now >= retry.due:
                self._fork(retry.order)

    def _reap(self) -> None:
        while wait_readable([self._wake_read], 0):
            os.read(self._wake_read, 4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if not pid:
                return
            number = self._workers.pop(pid, None)
            self._killed.discard(pid)
            if number is not None:
                self._tell_end(number, pid, os.waitstatus_to_exitcode(status))
            elif pid == self._spare.pid and not self._ending:
                self._spare.leave()
                self._fork_spare()

    def _watch_adopted(self) -> None:
        for pid, (number, process) in list(self._adopted.items()):
            if process.ended:
                del self._adopted[pid]
                process.close()
                self._tell_end(number, pid, None)

    def _tell_end(self, number: int, pid: int, code: int | None) -> None:
        """To the master first: if this server is killed in between, its spare reports it again."""
        place = self._pages.collect(pid)
        self._memory_files.ended(number, pid)
        self._connection.send(Exited(number=number, pid=pid, code=code, place=place))
        self._spare.tell_end(pid)

    def _kill_all(self, *, wait: bool = True) -> None:
        self._retries.clear()
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        for _, process in self._adopted.values():
            process.signal(signal.SIGKILL)
        if not wait:
            return
        self._ending = True
        spares = [self._spare.pid] if self._spare.pid else []
        for pid in spares:
            os.kill(pid, signal.SIGKILL)
        for pid in [*self._workers, *spares]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _wake_pipe() -> tuple[int, int]:
    """Written to by the interpreter at every signal, so that a wait ends."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    return read, write


def _redirect(log: Path) -> None:
    """Standard output and error to a file, standard input from nowhere."""
    try:
        output = plain(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError:  # a full disk, or no file: then where the server's own output goes
        output = os.dup(2)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(nothing)
