"""What a loader process does between its fork and its end.

It reads slices, writes the tensors into shared memory and reports them over a connection. It
ends when the connection is closed, and when its parent dies. To the dataset it is a worker of
a `DataLoader`: `get_worker_info()` answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import mmap
import os
import signal
import stat
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn

import msgspec
import torch
from torch.utils.data._utils import worker as torch_worker

from instep.comm.protocol.messages import Mark
from instep.data.reading import generators, wire
from instep.data.reading.fetch import Fetch, Slice
from instep.data.reading.threads import ASK_READER
from instep.data.samples.last_read import Page, memory_file, use_page
from instep.data.samples.unreadable import describe_error
from instep.errors import DataError, RunError

STOP = b""
"""Sent in place of a task: the process ends."""

_PR_SET_PDEATHSIG = 1


class Task(msgspec.Struct, array_like=True):
    """Parent to child: read this slice into that slot."""

    ticket: int
    slot: int
    part: Slice
    marks: list[Mark] = []
    """Samples at which processes have died so far; for `Fetch.mark`."""
    changes: list[tuple[int, str, Any]] = []
    """What the dataset has been told; for `Told.apply`."""


class Reply(msgspec.Struct, array_like=True):
    """Child to parent: the batch is in the slot, or why it is not."""

    ticket: int
    skeleton: Any = None
    places: list[Any] = []
    size: int = 0
    error: str = ""
    trace: str = ""


class Work(NamedTuple):
    """What loader processes do, and what the dataset sees of it."""

    fetch: Fetch
    """Reads the dataset, and takes the marks of samples at which processes died."""
    read: Callable[[Slice], Any]
    """From a slice to plain data that `wire.py` can carry."""
    info_dataset: Any
    """`get_worker_info().dataset`."""
    seed: int
    """Of the first process; the next have the next numbers."""
    worker_init: Callable[[int], Any] | None = None
    """The user's `worker_init_fn`."""


class Slot:
    """Memory for one batch, shared by both sides; the side that writes makes it larger.

    Args:
        file: descriptor of the other process's slot, for the other side of it.
    """

    def __init__(self, file: int = -1) -> None:
        self.file = memory_file() if file < 0 else file
        self._map: mmap.mmap | None = None

    def room(self, size: int) -> mmap.mmap:
        """The memory, of `size` bytes or more."""
        size = max(size, 1)  # an empty file cannot be mapped
        if self._map is None or len(self._map) < size:
            if os.fstat(self.file).st_size < size:
                os.ftruncate(self.file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._map = mmap.mmap(self.file, os.fstat(self.file).st_size)
        return self._map

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self.file >= 0:
            os.close(self.file)
        self.file, self._map = -1, None


def receive(connection: Connection) -> bytes | None:
    """The next message; None when the other side is gone."""
    try:
        return connection.recv_bytes()
    except (EOFError, OSError):
        return None


def serve(
    connection: Connection,
    slots: list[Slot],
    stack: int,
    made: Callable[[], Work],
    number: int,
    of: int,
    page: Page | None,
) -> None:
    """Be loader process `number` of `of` until the connection ends.

    Args:
        connection: tasks come over it, and replies go.
        slots: for batches.
        stack: a file for the stack, which is written there at each `ASK_READER`.
        made: returns the work.
        number: of this process.
        of: how many there may be.
        page: for what is read.
    """
    use_page(page)
    torch.set_num_threads(1)  # a thread pool of the parent does not exist here
    faulthandler.register(ASK_READER, file=stack, all_threads=False, chain=False)
    work, wrong = _as_worker(made, number, of)
    while body := receive(connection):  # until it is `STOP` or None
        task = msgspec.msgpack.decode(body, type=Task)
        if work is not None:
            work.fetch.mark(task.marks)
        connection.send_bytes(_answer(task, slots[task.slot], work, wrong))


def run_and_exit(body: Callable[[], None]) -> NoReturn:
    """End the process after `body`, and run none of what its parent registered for its own end."""
    code = 1
    try:
        body()
        code = 0
    except SystemExit as error:  # from the dataset
        code = error.code if isinstance(error.code, int) else 1
    except ConnectionError:
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _as_worker(
    made: Callable[[], Work], number: int, of: int
) -> tuple[Work | None, DataError | None]:
    """The work, and why it cannot be done, if it cannot."""
    try:
        work = made()
    except Exception as error:
        wrong = DataError(f"the dataset cannot be loaded elsewhere: {describe_error(error)}")
        wrong.__cause__ = error
        return None, wrong
    return work, _start_as_worker(work, number, of)


def _start_as_worker(work: Work, number: int, of: int) -> DataError | None:
    """Look to the dataset like a `DataLoader`'s worker; returns what `worker_init_fn` raised."""
    seed = work.seed + number
    generators.seed_all(seed)
    # torch has no other way to say it; `get_worker_info` reads this
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=of, seed=seed, dataset=work.info_dataset
    )
    if work.worker_init is not None:
        try:
            work.worker_init(number)
        except Exception as error:
            found = DataError(f"worker_init_fn({number}) raised {describe_error(error)}")
            found.__cause__ = error
            return found
    return None


def detach_from_parent(keep: int, parent: int) -> None:
    """After a fork: release what is the parent's, except descriptor `keep`."""
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)):
            signal.signal(number, signal.SIG_DFL)
    # Ctrl-C reaches the whole group; the parent decides when loading ends
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.set_wakeup_fd(-1)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the line above
        os._exit(0)
    _release_connections(keep)
    own_file_offsets()
    gc.freeze()  # else the collector would copy every page of the parent it looks at


def _release_connections(keep: int) -> None:
    """Close sockets and pipes of the parent, which would hide its end from its peers.

    Their numbers stay taken, by /dev/null, as objects copied from the parent
    may still close them. Files stay open: the dataset may read them.
    """
    nothing = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/dev/fd"):
        number = int(name)
        if number <= 2 or number == keep:
            continue
        with contextlib.suppress(OSError):  # the folder was listed through one of them
            mode = os.fstat(number).st_mode
            if stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode):
                os.dup2(nothing, number)


def own_file_offsets() -> None:
    """Give this process offsets of its own in the files that it reads.

    A file that was open before a fork has one offset for both processes, and each
    would move it under the other's reads. Files open for writing stay as they are.
    """
    if sys.platform != "linux":
        return  # elsewhere /dev/fd gives the same offset again
    for name in os.listdir("/dev/fd"):
        number = int(name)
        with contextlib.suppress(OSError):
            flags = fcntl.fcntl(number, fcntl.F_GETFL)
            if not stat.S_ISREG(os.fstat(number).st_mode) or flags & os.O_ACCMODE != os.O_RDONLY:
                continue
            inherited = os.get_inheritable(number)
            mine = os.open(f"/proc/self/fd/{number}", flags)
            os.lseek(mine, os.lseek(number, 0, os.SEEK_CUR), os.SEEK_SET)
            os.dup2(mine, number, inheritable=inherited)
            os.close(mine)


def _answer(task: Task, slot: Slot, work: Work | None, wrong: DataError | None) -> bytes:
    encode = msgspec.msgpack.encode
    try:
        if wrong is not None or work is None:
            raise wrong or DataError("there is no work")
        work.fetch.told.apply(task.changes)
        skeleton, tensors = wire.pack(work.read(task.part))
        places, size = wire.layout(tensors)
        if size:
            wire.write(tensors, places, slot.room(size))
        return encode(Reply(task.ticket, skeleton, places, size))
    except Exception as error:
        text = str(error) if isinstance(error, DataError | RunError) else describe_error(error)
        trace = _clean(traceback.format_exc())
        return encode(Reply(task.ticket, error=_clean(text), trace=trace))


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
