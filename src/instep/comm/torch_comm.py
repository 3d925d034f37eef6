"""A group of processes: gloo on the CPU, NCCL on CUDA, made on any store.

Each generation has a group of its own. `torch.distributed`'s global default group is never used,
so a program may have its own.

Gloo listens on the loopback address, or on a given private one: by itself it would choose an
interface by the host's name, which may be public.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import AllreduceOptions, BroadcastOptions, ProcessGroupGloo

from instep.comm.base import Work
from instep.comm.direct import all_gather, begun, swap
from instep.comm.pair import LARGEST, Pair, connected
from instep.comm.torch_work import MessageWork, SumWork, TorchWork, Waiter, is_mine
from instep.errors import PeerError

NO_TIMEOUT = timedelta(days=1)
"""Timeout of a collective: a slow peer is not a failure, and a dead one closes its socket."""

CONNECTING = 5
"""How many times its own timeout gloo waits for a member to connect (its pair.h, waitUntil)."""


_MESSAGES, _SWAPS = 0, 1
"""Tags: a message by itself never meets one that all ranks send each other."""

LOOPBACK = "127.0.0.1"

_LARGE = 1 << 16
"""Bytes of a part from which on gloo's own all-to-all and all-gather use a link between hosts
mostly one way at a time. Less lies in the memory of the connections."""

LAST_S = 0.3
"""How long closing a group may take."""


class TorchComm:
    """One process's end of a group.

    Args:
        store: where the ranks leave their addresses; a prefix of its own for each group.
        rank: this process's number, from 0.
        size: processes in the group.
        device: where the tensors live; picks gloo or NCCL.
        address: the local address that gloo listens on.
        timeout_s: how long the ranks may take to find each other.

    Raises:
        PeerError: the group could not be formed.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        *,
        device: torch.device | None = None,
        address: str = LOOPBACK,
        timeout_s: float = NO_TIMEOUT.total_seconds(),
    ) -> None:
        self._rank, self._size = rank, size
        before, noted = open_sockets(), _Noted(store)
        cuda = device is not None and device.type == "cuda"
        try:
            timeout = timedelta(seconds=timeout_s)
            group = (
                _nccl(store, rank, size)
                if cuda
                else gloo_group(noted, rank, size, address, timeout)
            )
        except RuntimeError as error:
            text = f"the group of {size} workers did not form: {error}"
            raise PeerError(text, mine=is_mine(error)) from error
        self._group: Any = group
        self._in_stream = cuda
        self._apart = address != LOOPBACK
        """Whether ranks may be on other hosts."""
        self._interrupted = False
        self._waiter = Waiter()
        made = open_sockets() - before  # also what the user's own threads opened meanwhile
        self._sockets = {one for one in made if _is_of_group(*one, noted.values)}
        self._pair: Pair | None = None
        if size == 2 and not cuda and not self._apart:
            self._pair = self._connected(address, timeout_s)

    def _connected(self, address: str, timeout_s: float) -> Pair:
        """Connect two ranks of one host for small sums.

        Raises:
            PeerError: the other rank went away, or does not come.
        """
        ends = time.monotonic() + timeout_s

        def tell(tensor: Tensor, root: int) -> None:
            self._broadcast(tensor, root, lambda: time.monotonic() > ends).wait()

        try:
            return connected(address, self._rank, tell)
        except (OSError, PeerError) as error:
            self.close()
            if isinstance(error, PeerError):
                raise
            text = f"the two workers of a group did not connect: {error.strerror or error}."
            raise PeerError(text, mine=True) from error

    @property
    def rank(self) -> int:
        """This process's number."""
        return self._rank

    @property
    def size(self) -> int:
        """Processes of the group."""
        return self._size

    def all_reduce(self, tensor: Tensor) -> Work:
        """Begin a sum over the ranks."""
        if self._pair is not None and tensor.nbytes <= LARGEST:
            return self._pair.all_reduce(tensor)
        options = AllreduceOptions()  # a sum, unless told otherwise
        return self._begin(lambda group: group.allreduce([tensor], options))

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> Work:
        """Begin a sum of this rank's part; gloo's own would send as much as an all-reduce."""
        if self._in_stream:
            return self._begin(lambda group: group._reduce_scatter_base(out, parts))
        got = torch.empty_like(parts)
        return SumWork(self.all_to_all(got, parts), out, got.view(self._size, -1))

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """Begin to collect the ranks' parts."""
        assert out.numel() == self._size * part.numel(), "out has room for the parts of all"
        into, own = _bytes(out), _bytes(part)
        if self._swaps(own.numel()):
            return self._message(lambda group: all_gather(group, into, own, _SWAPS))
        return self._begin(lambda group: group._allgather_base(into, own))

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """Begin to collect the parts for this rank."""
        assert out.numel() == parts.numel(), "both have one part for each rank"
        into, own = _bytes(out), _bytes(parts)
        if not self._swaps(own.numel() // self._size):
            return self._begin(lambda group: group.alltoall_base(into, own, [], []))
        got, sent = into.view(self._size, -1), own.view(self._size, -1)
        got[self._rank].copy_(sent[self._rank])
        return self._message(lambda group: swap(group, lambda to: sent[to], list(got), _SWAPS))

    def _swaps(self, each: int) -> bool:
        """Check that gloo's own way is slower than messages, of parts of so many bytes."""
        return self._apart and each >= _LARGE and not self._in_stream

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy rank `root`'s tensor to every rank."""
        self._broadcast(tensor, root, self._is_interrupted).wait()

    def _broadcast(self, tensor: Tensor, root: int, until: Callable[[], bool]) -> TorchWork:
        options = BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        work = self._started(lambda group: group.broadcast([tensor], options))
        return TorchWork(work, None if self._in_stream else until)

    def send(self, tensor: Tensor, to: int) -> Work:
        """Begin to send to one rank."""
        own = _bytes(tensor)
        return self._message(lambda group: group.send([own], to, _MESSAGES))

    def receive(self, tensor: Tensor, source: int) -> Work:
        """Begin to receive from one rank."""
        into = _bytes(tensor)
        return self._message(lambda group: group.recv([into], source, _MESSAGES))

    def _message(self, start: Callable[[Any], Any]) -> Work:
        work = self._started(start)
        if self._in_stream:
            return TorchWork(work, None)
        whole = TorchWork(work, None, NO_TIMEOUT)
        return MessageWork(whole, self._waiter, self._is_interrupted)

    def _begin(self, start: Callable[[Any], Any]) -> TorchWork:
        return TorchWork(self._started(start), None if self._in_stream else self._is_interrupted)

    def _started(self, start: Callable[[Any], Any]) -> Any:
        assert self._group is not None, "the group is closed"
        return begun(lambda: start(self._group))

    def _is_interrupted(self) -> bool:
        return self._interrupted

    def interrupt(self) -> None:
        """Make every `wait` raise; for another thread, on the CPU.

        Gloo cannot be interrupted (torch 2.13: its `abort` does not wake a waiting thread), but it
        notices a connection that is closed. Its listening socket is not touched: gloo ends the
        process if that fails. A thread that waits for the rest of a message is not woken either,
        so it checks from time to time.
        """
        self._interrupted = True
        for number, inode in self._sockets & open_sockets():
            with contextlib.suppress(OSError):
                end = socket.socket(fileno=os.dup(number))
                with end:
                    listens = end.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                    if os.fstat(end.fileno()).st_ino == inode and not listens:
                        end.shutdown(socket.SHUT_RDWR)
        if self._pair is not None:
            self._pair.interrupt()

    def close(self) -> None:
        """Leave the group and free its sockets.

        One of gloo's own threads may wait forever for the rest of a message (torch 2.13: a
        connection that is closed within a message wakes no thread); it is left behind then. A
        message that was never waited for keeps gloo's connections open, so they are closed here.
        """
        groups, self._group = [self._group], None
        self._waiter.close()
        if self._in_stream:
            groups.clear()
            return
        ends = threading.Thread(target=groups.clear, name="instep leaves a group", daemon=True)
        ends.start()
        ends.join(LAST_S)
        self.interrupt()
        if self._pair is not None:
            self._pair.close()


def open_sockets() -> set[tuple[int, int]]:
    """Descriptor and inode of each socket of this process; empty if the system does not say."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    found.add((int(name), status.st_ino))
    return found


def _bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor as bytes, for data that is moved and not summed."""
    return tensor.detach().view(-1).view(torch.uint8)


class _Noted(Store):
    """A store that records the values: the addresses at which the ranks listen."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self._store = store
        self.values: list[bytes] = []

    def set(self, key: str, value: str | bytes) -> None:
        self.values.append(value.encode() if isinstance(value, str) else bytes(value))
        self._store.set(key, value)  # type: ignore[arg-type]  # torch takes both

    def get(self, key: str) -> bytes:
        self.values.append(bytes(self._store.get(key)))
        return self.values[-1]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._store.wait(keys, timeout) if timeout is not None else self._store.wait(keys)

    def set_timeout(self, timeout: timedelta) -> None:
        self._store.set_timeout(timeout)


def _is_of_group(number: int, inode: int, told: list[bytes]) -> bool:
    """Whether a connection is one of gloo's: one of its ends is an address of a rank in the store.

    Gloo stores the system's own `sockaddr` (torch 2.11 to 2.13), among other bytes.
    """
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as end:
        if os.fstat(end.fileno()).st_ino != inode:
            return False
        ends = [end.getsockname()]
        with contextlib.suppress(OSError):  # it listens
            ends.append(end.getpeername())
        wanted = [_sockaddr(end.family, name) for name in ends]
        return any(each and each in value for each in wanted for value in told)
    return False


def _sockaddr(family: int, name: Any) -> bytes:
    """Family, port and address as in C; empty if it is no network address."""
    if family == socket.AF_INET:
        return struct.pack("=H", family) + struct.pack("!H", name[1]) + socket.inet_aton(name[0])
    if family == socket.AF_INET6:
        host = socket.inet_pton(family, name[0].partition("%")[0])
        return struct.pack("=H", family) + struct.pack("!HI", name[1], name[2]) + host
    return b""


def gloo_group(store: Store, rank: int, size: int, address: str, timeout: timedelta) -> Any:
    """Torch's own object, which listens on one address only; the ranks have a time to meet."""
    gloo: Any = ProcessGroupGloo  # torch's stubs lack its options
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = timeout / CONNECTING  # how long gloo waits for a member that dies now
    group = gloo(store, rank, size, options)
    group._set_default_timeout(NO_TIMEOUT)
    return group


def _nccl(store: Store, rank: int, size: int) -> Any:
    from torch.distributed import ProcessGroupNCCL  # absent from builds without CUDA

    options = ProcessGroupNCCL.Options()
    options._timeout = NO_TIMEOUT
    return ProcessGroupNCCL(store, rank, size, options)
