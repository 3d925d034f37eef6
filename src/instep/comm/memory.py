"""Ranks as threads of one process: the group that tests of logic run on.

The promises are those of `base.py`, kept by one barrier and one list of
slots. It moves no bytes and so measures nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.errors import PeerError

T = TypeVar("T")


class _Room:
    """What the ranks of one group share: a slot for each, and a barrier."""

    def __init__(self, size: int) -> None:
        self.slots: list[Tensor | None] = [None] * size
        self.barrier = threading.Barrier(size)


class MemoryComm:
    """One thread's end of a group in memory."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room, self._rank = room, rank
        self._queue = ThreadPoolExecutor(1)  # one thread keeps the order of the collectives

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self._room.slots)

    def all_reduce(self, tensor: Tensor) -> MemoryWork:
        """Begin a sum over the ranks, in rank order."""
        return MemoryWork(self._queue.submit(self._sum, tensor))

    def _sum(self, tensor: Tensor) -> None:
        slots = self._exchange(tensor.clone())
        with torch.no_grad():
            total = slots[0].clone()
            for part in slots[1:]:
                total += part
            tensor.copy_(total)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy rank `root`'s tensor to every rank."""
        self._queue.submit(self._copy, tensor, root).result()

    def _copy(self, tensor: Tensor, root: int) -> None:
        with torch.no_grad():
            tensor.copy_(self._exchange(tensor.clone())[root])

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        room = self._room
        try:
            room.slots[self._rank] = tensor
            room.barrier.wait()
            slots = [slot for slot in room.slots if slot is not None]
            room.barrier.wait()  # nobody may start the next call until all have read this one
        except threading.BrokenBarrierError:
            raise PeerError("another rank left the group in the middle of a collective.") from None
        return slots

    def close(self) -> None:
        """Leave the group; ranks that still wait for this one raise `PeerError`."""
        self._queue.shutdown(wait=False)

    def interrupt(self) -> None:
        """Break the group for everyone, as a dying process does."""
        self._room.barrier.abort()


class MemoryWork:
    """A sum under way in the group's thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the sum is here."""
        self._future.result()


def run_ranks(size: int, body: Callable[..., T], *arguments: Any) -> list[T]:
    """Call `body(comm, *arguments)` on `size` threads, each a rank of one group.

    Returns:
        What each rank returned, in rank order.

    Raises:
        Exception: what the first rank to fail raised; `PeerError` of the
            others is a consequence and is dropped.
    """
    room = _Room(size)

    def one(rank: int) -> T:
        comm = MemoryComm(room, rank)
        try:
            return body(comm, *arguments)
        except BaseException:
            comm.interrupt()
            raise
        finally:
            comm.close()

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(one, rank) for rank in range(size)]
    failures = [failure for failure in (f.exception() for f in futures) if failure is not None]
    if failures:
        raise next((f for f in failures if not isinstance(f, PeerError)), failures[0])
    return [future.result() for future in futures]
