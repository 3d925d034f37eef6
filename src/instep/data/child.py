"""What a loader process does between its fork and its end.

It reads slices, writes the tensors into shared memory and tells of them over a
socket. The end of that socket is its own end; so is the death of its parent.
To the dataset it is a worker of a `DataLoader`: `get_worker_info()` answers.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import gc
import mmap
import os
import signal
import socket
import stat
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from typing import IO, Any, NamedTuple, NoReturn

import msgspec
import torch
from torch.utils.data._utils import worker as torch_worker

from instep.comm.messages import Mark
from instep.data import keyed, wire
from instep.data.blame import told
from instep.data.breadcrumb import leave_in
from instep.data.fetch import Fetch, Slice
from instep.errors import DataError

_PR_SET_PDEATHSIG = 1


class Task(msgspec.Struct, array_like=True):
    """Parent to child: read this slice into that slot."""

    ticket: int
    slot: int
    part: Slice
    marks: list[Mark] = []
    """Samples at which processes have ended so far; `Fetch.mark`."""


class Reply(msgspec.Struct, array_like=True):
    """Child to parent: the batch is in the slot, or why it is not."""

    ticket: int
    skeleton: Any = None
    places: list[Any] = []
    size: int = 0
    error: str = ""
    trace: str = ""


class Work(NamedTuple):
    """What loader processes do, and as what the dataset sees them."""

    read: Callable[[Slice], Any]
    """From a slice to plain data that `wire.py` can carry."""
    dataset: Any
    """What `get_worker_info()` gives."""
    seed: int
    """Of the first; the others count on."""
    begin: Callable[[int], Any] | None = None
    """The user's `worker_init_fn`."""
    fetch: Fetch | None = None
    """Is told of samples at which processes ended; None where nobody wants to know."""


class Slot:
    """Memory for one batch, shared by both sides and grown by whoever writes.

    Args:
        file: of another process's slot, for the other side of it.
    """

    def __init__(self, file: int = -1) -> None:
        self._file = _memory_file() if file < 0 else file
        self._map: mmap.mmap | None = None

    def room(self, size: int) -> mmap.mmap:
        """The memory, of `size` bytes or more."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return self._map

    def fileno(self) -> int:
        """Its descriptor."""
        return self._file

    def close(self) -> None:
        """Give the memory back; a second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
        self._file, self._map = -1, None


def _memory_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("instep-loader")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def send(end: socket.socket, message: msgspec.Struct) -> None:
    """Write one message, its length in front."""
    end.sendall(frame(message))


def frame(message: msgspec.Struct) -> bytes:
    """The bytes of one message."""
    body = msgspec.msgpack.encode(message)
    return len(body).to_bytes(4, "little") + body


def receive(stream: IO[bytes]) -> bytes | None:
    """The body of the next message; None when the other side is gone."""
    try:
        head = stream.read(4)
        size = int.from_bytes(head, "little")
        body = stream.read(size) if len(head) == 4 else b""
    except ConnectionError:
        return None
    return body if len(head) == 4 and len(body) == size else None


def serve(
    end: socket.socket,
    slots: list[Slot],
    work: Work,
    parent: int,
    number: int,
    of: int,
    page: memoryview | None,
) -> NoReturn:
    """Be loader process `number` of `of`; returns never, and runs nothing of the parent's.

    What it reads it leaves word of in `page`, and no longer in its parent's.
    """
    with leaving() as left:
        leave_the_family(end, parent)
        leave_in(page)
        torch.set_num_threads(1)  # a thread pool of the parent does not exist here
        wrong = _introduced(work, number, of)
        stream = end.makefile("rb")
        while (body := receive(stream)) is not None:
            task = msgspec.msgpack.decode(body, type=Task)
            if work.fetch is not None:
                work.fetch.mark(task.marks)
            end.sendall(_answer(task, slots[task.slot], work.read, wrong))
        left.code = 0
    raise AssertionError("not reached")


class Left:
    """With which code the process ends."""

    code = 1


@contextlib.contextmanager
def leaving() -> Iterator[Left]:
    """End the process with the block, and run nothing that its parent meant for its own end."""
    left = Left()
    try:
        yield left
    except SystemExit as error:  # from the dataset
        left.code = error.code if isinstance(error.code, int) else 1
    except ConnectionError:
        left.code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(left.code)


def _introduced(work: Work, number: int, of: int) -> DataError | None:
    """Be to the dataset what a worker of a `DataLoader` is; what its `worker_init_fn` raised."""
    seed = work.seed + number
    keyed.set_from(seed)
    # torch has no other way to say it; `get_worker_info` reads this
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=number, num_workers=of, seed=seed, dataset=work.dataset
    )
    if work.begin is not None:
        try:
            work.begin(number)
        except Exception as error:
            found = DataError(f"worker_init_fn({number}) raised {told(error)}")
            found.__cause__ = error
            return found
    return None


def leave_the_family(end: socket.socket, parent: int) -> None:
    """After a fork: let go of what is the parent's, `end` excepted."""
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
    _let_go_of_connections(end.fileno())
    own_places()
    gc.freeze()  # else the collector would copy every page of the parent it looks at


def _let_go_of_connections(keep: int) -> None:
    """Sockets and pipes of the parent would keep its peers from seeing it end.

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


def own_places() -> None:
    """Give this process places of its own in the files that it reads.

    A file that was open before a fork has one place for both processes, and each
    would move it under the other's reads. Those that are written stay as they are.
    """
    if sys.platform != "linux":
        return  # elsewhere /dev/fd gives the same place again
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


def _answer(task: Task, slot: Slot, read: Callable[[Slice], Any], wrong: DataError | None) -> bytes:
    try:
        if wrong is not None:
            raise wrong
        skeleton, tensors = wire.pack(read(task.part))
        places, size = wire.layout(tensors)
        if size:
            wire.write(tensors, places, slot.room(size))
        return frame(Reply(task.ticket, skeleton, places, size))
    except Exception as error:
        text = str(error) if isinstance(error, DataError) else told(error)
        return frame(Reply(task.ticket, error=_clean(text), trace=_clean(traceback.format_exc())))


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
