"""A start of loader processes that inherits no threads: from an interpreter of their own.

It costs seconds, as torch is imported again, and memory, as the dataset is copied; so it is
tried only where a fork of this process was seen to hang (`stuck.py`). The interpreter imports
torch and forks; each fork unpickles the dataset for itself, which `torch.utils.data` does in the
same way where processes are not forked. The bytes go from a process to its own child, over a
pair of sockets that nobody else can reach.
"""

from __future__ import annotations

import importlib.util
import io
import os
import pickle
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import msgspec

from instep.data.reading.process import Work
from instep.data.reading.template import serve_forks
from instep.data.samples.last_read import Pages
from instep.data.samples.unreadable import describe_error
from instep.errors import DataError

MOST_BYTES = 2**30
"""A dataset that takes more is not copied for each process."""

READY_S = 600.0
"""Importing torch takes seconds, and many on a busy machine."""

_SIZE = struct.Struct("<QQ")


class Parcel(msgspec.Struct, array_like=True):
    """Where an interpreter finds the modules that the work needs."""

    path: list[str]
    files: dict[str, str]
    """By name, of modules that may not be found on the path, such as the recipe's."""


class Packed:
    """The work of loader processes as bytes, taken before anything has read the dataset.

    Raises:
        DataError: it cannot be sent to a process that is no fork of this one.
    """

    def __init__(self, work: Work) -> None:
        body = io.BytesIO()
        pickler = _Pickler(body, protocol=5)
        try:
            pickler.dump(work)
        except Exception as error:
            raise DataError(f"the dataset cannot be pickled: {describe_error(error)}") from error
        if "__main__" in pickler.modules:
            raise DataError("the dataset's class is defined in the script that is run")
        if body.tell() > MOST_BYTES:
            raise DataError(f"the dataset takes {body.tell() / 2**30:.1f} GiB in memory")
        files = {name: getattr(sys.modules.get(name), "__file__", None) for name in pickler.modules}
        known = {name: file for name, file in files.items() if file}
        self._head = msgspec.msgpack.encode(Parcel([*sys.path], known))
        self._body = body.getbuffer()

    def begin(self, pages: Pages) -> tuple[int, socket.socket]:
        """Start the interpreter; its pid, and our end of its connection.

        Raises:
            OSError: it cannot be started.
            DataError: it ended before it was ready.
        """
        end, theirs = socket.socketpair()
        arguments = [str(n) for n in (theirs.fileno(), pages.file, pages.count, os.getpid())]
        command = [sys.executable, "-P", "-m", "instep.data.reading.fresh", *arguments]
        try:
            for number in (theirs.fileno(), pages.file):
                os.set_inheritable(number, True)
            pid = os.posix_spawn(sys.executable, command, os.environ)
        except OSError:
            end.close()
            raise
        finally:
            os.set_inheritable(pages.file, False)
            theirs.close()
        end.settimeout(READY_S)
        try:
            end.sendall(_SIZE.pack(len(self._head), len(self._body)))
            end.sendall(self._head)
            end.sendall(self._body)
            ready = end.recv(1)
        except OSError:
            ready = b""
        if not ready:
            end.close()
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise DataError("an interpreter for loader processes could not be started")
        return pid, end


class _Pickler(pickle.Pickler):
    """Notes the modules of the classes and functions that it pickles."""

    def __init__(self, file: Any, protocol: int) -> None:
        super().__init__(file, protocol)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        kind = value if isinstance(value, type) or callable(value) else type(value)
        if isinstance(module := getattr(kind, "__module__", None), str):
            self.modules.add(module)
        return NotImplemented


class _ByFile(MetaPathFinder):
    """Finds modules by the files that the other interpreter has them from."""

    def __init__(self, files: dict[str, str]) -> None:
        self._files = files

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(name)
        return importlib.util.spec_from_file_location(name, file) if file else None


def main(arguments: Sequence[str]) -> None:
    """Fork loader processes on request; the work comes over the connection."""
    number, file, count, parent = map(int, arguments)
    end = socket.socket(fileno=number)
    head, body = _SIZE.unpack(_exactly(end, _SIZE.size))
    parcel = msgspec.msgpack.decode(_exactly(end, head), type=Parcel)
    blob = _exactly(end, body)
    sys.path[:] = parcel.path
    sys.meta_path.append(_ByFile(parcel.files))
    end.sendall(b"\1")
    serve_forks(end, lambda: pickle.loads(blob), Pages(count, file), parent)


def _exactly(end: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    view = memoryview(data)
    while view:
        taken = end.recv_into(view)
        if not taken:
            raise SystemExit(0)  # the other process is gone
        view = view[taken:]
    return data


if __name__ == "__main__":
    main(sys.argv[1:])
