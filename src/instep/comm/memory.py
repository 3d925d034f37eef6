"""Ranks as threads of one process: the group that tests of logic run on.

It keeps the promises of `base.py` by one table, into which each rank puts its contribution.
Nothing is sent, so times measured on it mean nothing.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from instep.errors import PeerError

T = TypeVar("T")


class _Room:
    """What the ranks of one group share. What a rank gave stays there after it has left."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.changed = threading.Condition()
        self.broken = False
        self.left: set[int] = set()
        self.given: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)  # call to rank to part
        self.taken: defaultdict[int, int] = defaultdict(int)  # call to how many ranks have read it
        self.sent: dict[tuple[int, int, int], Tensor] = {}  # (source, to, number)

    def give(self, rank: int, call: int, tensor: Tensor) -> None:
        """Put a tensor into the table for one call."""
        with self.changed:
            self._check(rank)
            self.given[call][rank] = tensor
            self.changed.notify_all()

    def take(self, rank: int, call: int) -> list[Tensor]:
        """The tensors of all ranks for one call, once all are there."""
        with self.changed:
            given = self.given[call]
            self._wait(
                lambda: len(given) == self.size,
                lambda: (self.left - given.keys()) | self.left & {rank},
            )
            self.taken[call] += 1
            if self.taken[call] == self.size:
                del self.given[call], self.taken[call]
            return [given[one] for one in range(self.size)]

    def send(self, source: int, to: int, number: int, tensor: Tensor) -> None:
        with self.changed:
            self._check(source, to)
            self.sent[source, to, number] = tensor
            self.changed.notify_all()

    def receive(self, source: int, to: int, number: int) -> Tensor:
        key = source, to, number
        with self.changed:
            self._wait(lambda: key in self.sent, lambda: self.left & {source, to})
            return self.sent.pop(key)

    def leave(self, rank: int) -> None:
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()

    def shatter(self) -> None:
        with self.changed:
            self.broken = True
            self.changed.notify_all()

    def _check(self, *needed: int) -> None:
        if self.broken or self.left & set(needed):
            raise PeerError("another rank left the group in the middle of a collective.")

    def _wait(self, here: Callable[[], bool], missing: Callable[[], set[int]]) -> None:
        while not here():
            self._check(*missing())
            self.changed.wait()


class MemoryComm:
    """One thread's end of a group in memory."""

    def __init__(self, room: _Room, rank: int) -> None:
        self._room, self._rank = room, rank
        self._queue = ThreadPoolExecutor(1)  # one thread keeps the order of the collectives
        self._calls = 0
        self._messages: defaultdict[tuple[int, int], int] = defaultdict(int)

    @property
    def rank(self) -> int:
        """This rank's number."""
        return self._rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._room.size

    def all_reduce(self, tensor: Tensor) -> MemoryWork:
        """Begin a sum over the ranks, in rank order."""
        return self._begin(tensor, tensor, _sum)

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> MemoryWork:
        """Begin a sum of this rank's part, in rank order."""
        return self._begin(out, parts, lambda given: _sum(self._mine(given)))

    def all_gather(self, out: Tensor, part: Tensor) -> MemoryWork:
        """Begin to collect the ranks' parts."""
        return self._begin(out, part, torch.cat)

    def all_to_all(self, out: Tensor, parts: Tensor) -> MemoryWork:
        """Begin to collect the parts for this rank."""
        return self._begin(out, parts, lambda given: torch.cat(self._mine(given)))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """Copy rank `root`'s tensor to every rank."""
        self._begin(tensor, tensor, lambda given: given[root]).wait()

    def _mine(self, given: Sequence[Tensor]) -> list[Tensor]:
        return [one.view(self.size, -1)[self._rank] for one in given]

    def _begin(
        self, out: Tensor, own: Tensor, combine: Callable[[list[Tensor]], Tensor]
    ) -> MemoryWork:
        self._calls += 1
        self._room.give(self._rank, self._calls, own.detach().clone())
        return MemoryWork(self._queue.submit(self._run, self._calls, out, combine))

    @torch.no_grad()
    def _run(self, call: int, out: Tensor, combine: Callable[[list[Tensor]], Tensor]) -> None:
        out.copy_(combine(self._room.take(self._rank, call)))

    def send(self, tensor: Tensor, to: int) -> MemoryMessage:
        """Put the tensor into the table for rank `to`; done at once."""
        number = self._number(self._rank, to)
        self._room.send(self._rank, to, number, tensor.detach().clone())
        return MemoryMessage()

    def receive(self, tensor: Tensor, source: int) -> MemoryMessage:
        """Begin to wait for the tensor of rank `source`."""
        number = self._number(source, self._rank)

        @torch.no_grad()
        def take() -> None:
            tensor.copy_(self._room.receive(source, self._rank, number))

        return MemoryMessage(take)

    def _number(self, source: int, to: int) -> int:
        self._messages[source, to] += 1
        return self._messages[source, to]

    def close(self) -> None:
        """Leave the group; ranks that still wait for this one raise `PeerError`."""
        self._room.leave(self._rank)
        self._queue.shutdown(wait=False)

    def interrupt(self) -> None:
        """Break the group for everyone, as a dying process does."""
        self._room.shatter()


def _sum(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


class MemoryWork:
    """A collective that runs in the group's thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the result is here."""
        self._future.result()


class MemoryMessage:
    """A message to or from another rank; `wait` takes it from the table."""

    def __init__(self, take: Callable[[], None] | None = None) -> None:
        self._take = take

    def wait(self) -> None:
        """Return when the message is here."""
        if self._take is not None:
            self._take()
            self._take = None


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
