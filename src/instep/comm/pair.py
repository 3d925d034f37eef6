"""Sums of two processes of one host, over a connection of their own.

Gloo sums in threads of its own, and in two halves: in a sum of two ranks each side wakes threads
four times, which takes longer than the sum. Here the thread that wants the sum sends this rank's
tensor and receives the other's, as many bytes as with gloo, and adds the two: rank 0's to rank 1's
on both, so that both have the same bits. What is sent, and when to sum this way, `torch_comm.py`
knows. Ways in: `connected`, `Pair`.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor

from instep.comm.metered import close
from instep.comm.torch_work import INTERRUPTED, LOOK, broken
from instep.errors import PeerError

LARGEST = 1 << 21
"""Bytes of a tensor that is summed this way: the system takes as many at once from a rank whose
peer still computes."""

_CONNECTING_S = 10.0
"""How long connecting may take, once both ranks are there."""

_BYTES = struct.Struct("=Q")
"""The size of a tensor, which is sent before it."""

_LOOK_MS = LOOK.total_seconds() * 1000


class Pair:
    """One end of the connection.

    Args:
        connection: to the other rank.
        rank: of this process, 0 or 1.
    """

    def __init__(self, connection: socket.socket, rank: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._rank = connection, rank
        self._number = connection.fileno()
        self._begun = deque[PairSum]()
        self._use = threading.Lock()
        self._room = torch.empty(_BYTES.size + 4096, dtype=torch.uint8)
        self._into, self._got = self._room.numpy().data, 0
        self._error: PeerError | None = None

    def all_reduce(self, tensor: Tensor) -> PairSum:
        """Begin a sum. Returns once the system has all that this rank sends, so that the other
        rank needs nothing more of it."""
        begun = PairSum(self, tensor.detach())
        sent = begun.own.view(-1).view(torch.uint8).numpy().data
        with self._use:
            self._begun.append(begun)
            self._send(sent)
            begun.sent = True
        return begun

    def wait(self, begun: PairSum) -> None:
        """Return when a sum is here."""
        while not begun.over:
            with self._use:
                self._receive()
            if not begun.over:
                self._look(select.POLLIN)

    def _look(self, events: int) -> None:
        """Return once the connection is ready; several threads may wait at once."""
        ready = select.poll()  # one object is for one thread at a time
        ready.register(self._number, events)
        ready.poll(_LOOK_MS)

    def _send(self, tensor: memoryview) -> None:
        size = _BYTES.pack(len(tensor))
        sent, whole = 0, len(size) + len(tensor)
        while sent < whole:
            try:
                if sent < len(size):
                    sent += self._connection.sendmsg([size[sent:], tensor])
                else:
                    sent += self._connection.send(tensor[sent - len(size) :])
            except BlockingIOError:  # the other rank may be waiting for room, too
                self._look(select.POLLOUT | self._receive() * select.POLLIN)
            except OSError as error:
                raise self._broken(error) from error

    def _receive(self) -> bool:
        """Take in what has arrived, and complete sums in their order; whether more is to come."""
        if self._error is not None:
            raise self._error
        try:
            while self._begun:
                size = _BYTES.size + self._begun[0].own.nbytes
                if len(self._into) < size:  # nothing of it has arrived
                    self._room = torch.empty(size, dtype=torch.uint8)
                    self._into = self._room.numpy().data
                if self._got < size:
                    self._got += self._received(self._into[self._got : size])
                if self._got == size:
                    if not self._begun[0].sent:
                        break
                    self._complete(self._begun.popleft())
        except BlockingIOError:
            return True
        except OSError as error:
            raise self._broken(error) from error
        return False

    def _received(self, into: memoryview) -> int:
        count = self._connection.recv_into(into)
        if not count:
            raise ConnectionResetError("connection closed by the other rank")
        return count

    def _complete(self, begun: PairSum) -> None:
        own, self._got = begun.own, 0
        (size,) = _BYTES.unpack_from(self._into)
        assert size == own.nbytes, "both ranks sum tensors of one size"
        got = self._room[_BYTES.size : _BYTES.size + size]
        if own.element_size() > _BYTES.size:  # complex128 begins at multiples of its own size
            got = got.clone()
        other = got.view(own.dtype).view(own.shape)
        first, second = (own, other) if self._rank == 0 else (other, own)
        torch.add(first, second, out=own)
        begun.finish()

    def _broken(self, error: OSError) -> PeerError:
        """No later sum waits for one that never ends."""
        if self._error is None:
            self._error = broken(RuntimeError(error.strerror or str(error)))
        return self._error

    def interrupt(self) -> None:
        """Make every `wait` raise; for another thread."""
        self._error = self._error or PeerError(INTERRUPTED)
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return  # it is closed, or the other end is

    def close(self) -> None:
        """Close the connection; a second call does nothing."""
        self.interrupt()
        close(self._connection)


class PairSum:
    """A sum under way.

    Args:
        pair: where it is.
        tensor: this rank's, and at last the sum.
    """

    def __init__(self, pair: Pair, tensor: Tensor) -> None:
        self._pair, self._tensor = pair, tensor
        self.own = tensor.contiguous()
        """Numbers of it, one after the other: a copy where those of the tensor are not."""
        self.sent = self.over = False

    def finish(self) -> None:
        """Take note that `own` is the sum."""
        if self.own is not self._tensor:
            self._tensor.copy_(self.own)
        self.over = True

    def wait(self) -> None:
        """Return when the sum is here."""
        if not self.over:
            self._pair.wait(self)


def connected(address: str, rank: int, tell: Callable[[Tensor, int], None]) -> Pair:
    """Connect two ranks of one host.

    Rank 0 takes nobody else's connection: the other tells it from which port it calls.

    Args:
        address: local, of both.
        rank: of this process, 0 or 1.
        tell: copies a tensor from a rank to the other.

    Raises:
        PeerError: the other rank went away.
        OSError: this process gets no connection.
    """
    port = torch.zeros(1, dtype=torch.int64)
    if rank == 1:
        tell(port, 0)
        connection = socket.create_connection((address, int(port)), timeout=_CONNECTING_S)
        port[0] = connection.getsockname()[1]
        tell(port, 1)
        return Pair(connection, rank)
    with socket.create_server((address, 0)) as server:
        server.settimeout(_CONNECTING_S)
        port[0] = server.getsockname()[1]
        tell(port, 0)
        tell(port, 1)
        while True:
            connection, caller = server.accept()
            if caller == (address, int(port)):
                return Pair(connection, rank)
            connection.close()
