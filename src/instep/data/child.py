"""What a loader process does between its fork and its end.

It reads slices, writes the tensors into shared memory and tells of them over a
socket. The end of that socket is its own end; so is the death of its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import socket
import stat
import sys
import tempfile
import traceback
from typing import IO, Any, NoReturn

import msgspec
import torch

from instep.data import wire
from instep.data.blame import told
from instep.data.fetch import Slice
from instep.data.readers import Work
from instep.errors import DataError

_PR_SET_PDEATHSIG = 1


class Task(msgspec.Struct, array_like=True):
    """Parent to child: read this slice into that slot."""

    ticket: int
    slot: int
    part: Slice


class Reply(msgspec.Struct, array_like=True):
    """Child to parent: the batch is in the slot, or why it is not."""

    ticket: int
    skeleton: Any = None
    places: list[Any] = []
    size: int = 0
    error: str = ""
    trace: str = ""


class Slot:
    """Memory for one batch, shared by both sides and grown by whoever writes."""

    def __init__(self) -> None:
        self._file = _memory_file()
        self._map: mmap.mmap | None = None

    def room(self, size: int) -> mmap.mmap:
        """The memory, of `size` bytes or more."""
        if self._map is None or len(self._map) < size:
            if os.fstat(self._file).st_size < size:
                os.ftruncate(self._file, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
            self._map = mmap.mmap(self._file, os.fstat(self._file).st_size)
        return self._map

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


def serve(end: socket.socket, slots: list[Slot], work: Work, parent: int) -> NoReturn:
    """Be a loader process; returns never, and runs nothing of the parent's on its way out."""
    code = 1
    try:
        _leave_the_family(end, parent)
        stream = end.makefile("rb")
        while (body := receive(stream)) is not None:
            task = msgspec.msgpack.decode(body, type=Task)
            end.sendall(_answer(task, slots[task.slot], work))
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


def _leave_the_family(end: socket.socket, parent: int) -> None:
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
    gc.freeze()  # else the collector would copy every page of the parent it looks at
    torch.set_num_threads(1)  # a thread pool of the parent does not exist here


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


def _answer(task: Task, slot: Slot, work: Work) -> bytes:
    try:
        skeleton, tensors = wire.pack(work(task.part))
        places, size = wire.layout(tensors)
        if size:
            wire.write(tensors, places, slot.room(size))
        return frame(Reply(task.ticket, skeleton, places, size))
    except Exception as error:
        text = str(error) if isinstance(error, DataError) else told(error)
        return frame(Reply(task.ticket, error=_clean(text), trace=_clean(traceback.format_exc())))


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
