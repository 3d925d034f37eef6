"""The fork server of a machine: imports torch once, then forks a worker at each request.

Importing torch takes seconds, a fork takes milliseconds. Whatever a fork
would break must not exist here: no thread, no store, no CUDA context. The
user's recipe file is imported before the fork too, so that its own imports are
paid once; if that leaves threads or CUDA behind, also threads of a library that
does not end them at a fork, the server starts itself again and leaves that
import to the workers.

It may be killed: a spare that it forked first, and that waits until then,
takes its place at once, and watches the workers that are there. The two watch each other:
one that was stopped, or hangs, is killed by the other. Both end, and end all workers, when
the client ends them, or once there can be no master any more.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import struct
import sys
import threading
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, NoReturn

from instep.comm.codecs import CODECS
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
from instep.errors import InstepError, PeerError
from instep.plain_file import plain
from instep.recipe.given import given
from instep.system.causes import Unwanted, as_error
from instep.system.environment import END, SCHEDULERS, places_here, recipe_here, settings
from instep.system.lease import Lease
from instep.system.limits import FLOOR_S
from instep.system.malloc import return_freed_memory
from instep.system.memory_files import MemoryFiles
from instep.system.processes import (
    MEMBERS,
    SPARE,
    Watched,
    cuda_survives_a_fork,
    die_with_parent,
    die_with_pipe,
    is_stopped,
    machine,
    name_process,
    native_threads,
    threads_after_a_fork,
    wait_readable,
)
from instep.system.stacks import send

_CLOSED = (
    " The master of a run chooses its port: open all ports between the machines, and look whether "
    "this one reaches that address."
)

_NO_PRELOAD = "INSTEP_NO_PRELOAD"
_ENDPOINT = "INSTEP_ENDPOINT"

MOST_PAGES = 256
"""Workers of one host that can note where they are, and whose memory is kept."""

PAUSES_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 6.4, 6.4)
"""How long to wait before each further attempt at a fork that failed."""

ADOPTED_S = 0.05
"""Seconds between two looks at workers that this server did not start."""


def main() -> None:
    """Serve one run; what it needs to know comes from standard input."""
    serve(os.environ.pop(_ENDPOINT, "") or sys.stdin.readline())


def serve(note: str) -> None:
    """Serve one run.

    Args:
        note: the endpoint of its master, and the folder in which the run was started.
    """
    began = time.time()
    die_with_parent(END)
    for number in SCHEDULERS:
        signal.signal(number, signal.SIG_IGN)  # here and in the workers
    seen = json.loads(note)
    if seen.get("lifeline"):
        die_with_pipe(sys.stdin.fileno())
    endpoint = Endpoint.of(seen)
    _settle(seen["folder"])
    memory_files = MemoryFiles(MOST_PAGES, endpoint.token)
    memory_files.adopt_all()  # workers may die during the imports
    try:
        connection = _call(endpoint)
    except PeerError as error:
        elsewhere = not endpoint.address.host.startswith("127.")
        sys.exit(f"{error}{_CLOSED if elsewhere else ''}")
    _import_torch()  # while the master gets ready to answer
    if endpoint.credentials is not None:
        import instep.comm.encryption.forwarder  # noqa: F401  each worker has one, which is its fork
    preloading = time.time()
    try:
        welcome = connection.welcome()
    except PeerError as error:
        sys.exit(_failed(error))
    if isinstance(welcome, Refused):
        sys.exit(_failed(as_error(welcome)))
    phases = {"interpreter": began - welcome.started, "import torch": preloading - began}
    job = tomllib.loads(welcome.job)
    file, _, function = recipe_here(job["recipe"]).rpartition(":")
    if any(job.get("mesh", {}).get(axis, 1) > 1 for axis in ("shard", "tensor", "stages")):
        return_freed_memory()
        _import_meshes()
    if (codec := job.get("sync", {}).get("codec")) in CODECS:
        CODECS[codec]  # with its compiled loops
    import_it = function != "__main__"  # a script does more than define functions
    if (
        given(job["recipe"]) is None
        and import_it
        and not os.environ.get(_NO_PRELOAD)
        and not _preload(Path(file), places_here(job["recipe"], job.get("python_path", ())))
    ):
        _start_again(note)
    phases["import recipe"] = time.time() - preloading
    launch = job.get("launch", {})
    several = bool(launch.get("hosts") or launch.get("nodes"))
    lifeline = sys.stdin.fileno() if seen.get("lifeline") else -1
    server = Server(
        connection,
        endpoint,
        phases,
        several=several,
        lifeline=lifeline,
        memory_files=memory_files,
    )
    server.serve()


def _failed(error: InstepError) -> int:
    """The exit code of a server that has no master."""
    if isinstance(error, Unwanted):
        return 0  # the run goes on without it
    print(f"instep: {error}", file=sys.stderr)
    return error.exit_code


def _settle(folder: str) -> None:
    """Be where the run was started, also if a command such as ssh has begun us elsewhere."""
    os.environ.update(settings())
    with contextlib.suppress(OSError):
        os.chdir(folder)


def _call(endpoint: Endpoint) -> MasterConnection:
    hello = Hello(
        token=endpoint.token, role="host", number=endpoint.host, pid=os.getpid(), machine=machine()
    )
    connection = MasterConnection(endpoint.address, hello, endpoint.context)
    connection.lasting = True
    return connection


def _import_torch() -> None:
    gc.disable()  # an import makes no garbage, and looking for it takes a tenth of the time
    import torch

    from instep.recipe.quick_start import spare_dynamo

    spare_dynamo()
    torch.set_num_threads(1)
    import instep.process  # noqa: F401  what a worker needs, imported before the fork

    gc.freeze()  # nor does any process forked from this one look at all this again
    gc.enable()


def _import_meshes() -> None:
    """What a worker of a mesh needs beside; it takes as long as torch."""
    gc.disable()
    import torch._dynamo.eval_frame  # noqa: F401  # DTensors need it

    import instep.parallel.split  # noqa: F401

    gc.freeze()
    gc.enable()


def _preload(recipe: Path, places: Sequence[str]) -> bool:
    """Import the recipe's file; False if a fork would now be unsafe."""
    from instep.recipe.source_file import load_module

    threads = native_threads()
    try:
        load_module(recipe, places=places)
    except (Exception, SystemExit):
        pass  # each worker meets the same error, and reports it
    if threading.active_count() > 1 or not cuda_survives_a_fork():
        return False
    return native_threads() <= threads or threads_after_a_fork() <= threads


def _start_again(note: str) -> NoReturn:
    environment = {**os.environ, _NO_PRELOAD: "1", _ENDPOINT: note}
    command = [sys.executable, "-P", "-m", "instep.launch.fork_server"]
    os.execve(sys.executable, command, environment)


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
        self._life = -1  # open as long as this server lives; it sends its spare the workers
        self._spare = 0
        self._spare_stopped_at: float | None = None
        self._shown_at = 0.0

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
                self._watch_spare()
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
        """Fork one that sleeps until this process has ended, and then serves in its place."""
        theirs, self._life = os.pipe()
        server, self._spare_stopped_at = os.getpid(), None
        self._spare = 0  # the one before is gone, and its number may be another's
        try:
            self._spare = os.fork()
        except OSError:  # it has to do without
            os.close(theirs)
            return
        if self._spare:
            os.close(theirs)
            os.set_blocking(self._life, False)
            adopted = {pid: number for pid, (number, _) in self._adopted.items()}
            for pid, number in {**adopted, **self._workers}.items():
                self._tell_spare(pid, number)
            return
        try:
            os.close(self._life)
            signal.set_wakeup_fd(-1)
            signal.signal(END, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._connection.close()
            name = name_process(SPARE)
            left = _wait_for_end(theirs, server)
            os.close(theirs)
            name_process(name)
            for each in (self._wake_read, self._wake_write):
                os.close(each)
            Server(
                _call(self._endpoint),
                self._endpoint,
                self._phases,
                several=self._several,
                lifeline=self._lifeline,
                left=left,
                pages=self._pages,
                memory_files=self._memory_files,
            ).serve()
        except PeerError:
            pass  # no master is left either
        finally:
            os._exit(0)

    def _watch_spare(self) -> None:
        """Show it that this process lives; end it where it was stopped, for another to be forked.

        It only waits, so it can hang in no other way.
        """
        now = time.monotonic()
        if not self._spare or now - self._shown_at < HEARTBEAT_S:
            return
        self._shown_at = now
        self._tell_spare(0, _GONE)
        if not is_stopped(self._spare):
            self._spare_stopped_at = None
        elif self._spare_stopped_at is None:
            self._spare_stopped_at = now
        elif now - self._spare_stopped_at > FLOOR_S:
            os.kill(self._spare, signal.SIGKILL)  # our child, not reaped yet

    def _tell_spare(self, pid: int, number: int) -> None:
        """Have the spare know of a worker; of one that has ended, by the number `_GONE`."""
        with contextlib.suppress(OSError):  # it is gone, or stopped
            os.write(self._life, _WORKER.pack(pid, number))

    def _end(self, *_: object) -> None:
        self._ending = True

    def _receive(self) -> None:
        while (message := self._connection.poll()) is not None:
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
                self._tell_spare(pid, number)

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
            self._tell_spare(pid, order.number)
            return
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGTERM, END):
                signal.signal(number, signal.SIG_DFL)
            self._connection.close()
            os.close(self._life)
            name_process(MEMBERS[order.role])
            _redirect(Path(order.log))
            use_page(page)
            self._memory_files.keep_only(order.number, memory)
            from instep.process import main as work
            from instep.system import host_memory

            host_memory.give(memory)
            # workers of this host that live have a page each, also of a server before this one
            local_rank = page.number if page is not None else MOST_PAGES
            phases = {**self._phases, "forked": forked}
            endpoint = replace(self._endpoint, credentials=order.credentials)
            code = work(endpoint, order.number, local_rank, phases)
            if code == 0:
                host_memory.give_back()
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
            elif pid == self._spare and not self._ending:
                os.close(self._life)
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
        self._tell_spare(pid, _GONE)

    def _kill_all(self, *, wait: bool = True) -> None:
        self._retries.clear()
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
        for _, process in self._adopted.values():
            process.signal(signal.SIGKILL)
        if not wait:
            return
        self._ending = True
        if self._spare:
            os.kill(self._spare, signal.SIGKILL)
        for pid in [*self._workers, *([self._spare] if self._spare else [])]:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


_WORKER, _GONE = struct.Struct("ii"), -1
"""What a server sends its spare: a pid, and the number of its worker."""


def _wait_for_end(pipe: int, server: int) -> dict[int, tuple[int, Watched]]:
    """Wait until the server at the other end has ended; its workers then, by process.

    With handles made at that moment: until a master answers, a number may be another's. A
    server that says nothing for too long is ended.
    """
    workers: dict[int, int] = {}
    lease = Lease(server, time.monotonic())
    while True:
        if not wait_readable([pipe], HEARTBEAT_S):
            if lease.turn(time.monotonic()) and os.getppid() == server:
                os.kill(server, signal.SIGKILL)
            continue
        data = os.read(pipe, 512 * _WORKER.size)
        if not data:
            break
        lease.renew(time.monotonic())
        for pid, number in _WORKER.iter_unpack(data):
            workers[pid] = number
    return {pid: (n, Watched(pid)) for pid, n in workers.items() if n != _GONE}


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


if __name__ == "__main__":
    main()
