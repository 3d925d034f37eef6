"""Sums over several hosts that cross the link of each host as few times as possible.

In a ring of W ranks each sends 2 (W-1)/W of a tensor to the next, over the link of its host where
the next one is elsewhere. Where H hosts have as many ranks each, the ranks of a host first add up
their tensors, a part each; each rank sums its part with the ranks that have its place on the other
hosts; and the ranks of a host collect the parts. So 2 (H-1)/H of the tensor leave a host, as if it
had one rank. A rank sends as much as in the ring. Way in: `over_hosts`.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.torch_comm import LAST_S
from instep.errors import PeerError

LEAST = 1 << 18
"""Bytes below which a sum goes straight: three collectives one after the other take longer."""


def over_hosts(
    comm: Comm, machine: str, among: Callable[[Sequence[int], str], Comm], least: int = LEAST
) -> Comm:
    """The group, with sums by way of the hosts if all have as many of its ranks, two or more.

    Every rank of the group calls this together.

    Args:
        comm: the group; closed if an error is raised.
        machine: what the ranks of one host have in common, and those of two have not.
        among: makes the group of some of the ranks, under a name of its own.
        least: bytes of a sum that is worth the way.

    Raises:
        PeerError: a rank was lost meanwhile.
    """
    made = [comm]
    try:
        hosts = _hosts(comm, machine)
        if (
            len(hosts) == 1
            or {len(ranks) for ranks in hosts} != {len(hosts[0])}
            or hosts[0][1:] == []
        ):
            return comm
        mine = next(ranks for ranks in hosts if comm.rank in ranks)
        place = mine.index(comm.rank)
        made.append(among(mine, f"host of {mine[0]} "))
        made.append(among(mine, f"host of {mine[0]} again "))
        made.append(among([ranks[place] for ranks in hosts], f"place {place} "))
    except PeerError:
        for each in made:
            each.close()
        raise
    return OverHosts(*made, least=least)


def _hosts(comm: Comm, machine: str) -> list[list[int]]:
    """The ranks of each host."""
    number = int.from_bytes(hashlib.sha256(machine.encode()).digest()[:7])
    numbers = torch.zeros(comm.size, dtype=torch.int64)
    comm.all_gather(numbers, torch.tensor([number])).wait()
    ranks: dict[int, list[int]] = {}
    for rank, of in enumerate(numbers.tolist()):
        ranks.setdefault(of, []).append(rank)
    return list(ranks.values())


class OverHosts:
    """A group whose large sums go by way of the hosts; all else is the group's.

    Args:
        whole: the group.
        within, back: the ranks of this host; what is begun in one never waits for the other.
        across: the ranks that have this one's place on their hosts.
        least: bytes of a sum that is worth the way.
    """

    def __init__(self, whole: Comm, within: Comm, back: Comm, across: Comm, *, least: int) -> None:
        self._whole, self._within, self._back, self._across = whole, within, back, across
        self._least = max(least, 1)
        self._broken: PeerError | None = None
        self._crossing: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        self._returning: queue.SimpleQueue[_Sum | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self._whole.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self._whole.size

    def all_reduce(self, tensor: Tensor) -> Work:
        """Begin a sum over the ranks."""
        ranks = self._within.size
        count = tensor.numel() // ranks * ranks
        if count * tensor.element_size() < self._least:
            return self._whole.all_reduce(tensor)
        if self._broken is not None:
            raise self._broken
        flat = tensor.detach().view(-1)
        rest = self._whole.all_reduce(flat[count:]) if count < len(flat) else None
        part = flat.new_empty(count // ranks)
        begun = _Sum(flat[:count], part, self._within.reduce_scatter(part, flat[:count]), rest)
        if not self._threads:
            self._start()
        self._crossing.put(begun)
        return begun

    def _start(self) -> None:
        """Two threads begin the later parts of sums, in the order of the calls on every rank."""
        turns = (self._crossing, self._cross), (self._returning, self._return)
        for sums, take in turns:
            thread = threading.Thread(
                target=self._take_each,
                args=(sums, take),
                name="instep sums over hosts",
                daemon=True,
            )
            thread.start()
            self._threads.append(thread)

    def _take_each(
        self, sums: queue.SimpleQueue[_Sum | None], take: Callable[[_Sum], None]
    ) -> None:
        while (each := sums.get()) is not None:
            try:
                if self._broken is not None:
                    raise self._broken
                take(each)
            except PeerError as error:
                self._break(error)
                each.end(error)

    def _cross(self, each: _Sum) -> None:
        each.work.wait()
        each.work = self._across.all_reduce(each.part)
        self._returning.put(each)

    def _return(self, each: _Sum) -> None:
        each.work.wait()
        each.work = self._back.all_gather(each.whole, each.part)
        each.end()

    def _break(self, error: PeerError) -> None:
        """No later sum may wait for one that never ends."""
        if self._broken is None:
            self._broken = error
            for each in (self._within, self._across, self._back):
                each.interrupt()

    def reduce_scatter(self, out: Tensor, parts: Tensor) -> Work:
        """As the group does."""
        return self._whole.reduce_scatter(out, parts)

    def all_gather(self, out: Tensor, part: Tensor) -> Work:
        """As the group does."""
        return self._whole.all_gather(out, part)

    def all_to_all(self, out: Tensor, parts: Tensor) -> Work:
        """As the group does."""
        return self._whole.all_to_all(out, parts)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """As the group does."""
        self._whole.broadcast(tensor, root)

    def send(self, tensor: Tensor, to: int) -> Work:
        """As the group does."""
        return self._whole.send(tensor, to)

    def receive(self, tensor: Tensor, source: int) -> Work:
        """As the group does."""
        return self._whole.receive(tensor, source)

    def interrupt(self) -> None:
        """Make every `wait` raise."""
        for each in (self._whole, self._within, self._across, self._back):
            each.interrupt()

    def close(self) -> None:
        """Leave the group; sums that are under way are given up."""
        if any(thread.is_alive() for thread in self._threads):
            self._crossing.put(None)
            self._returning.put(None)
            for thread in self._threads:
                thread.join(LAST_S)
        for each in (self._whole, self._within, self._across, self._back):
            each.close()


class _Sum:
    """A sum under way.

    Args:
        whole: [n] of each rank, and at last the sum.
        part: [n / ranks of a host] of it, which this rank brings to the other hosts.
        work: its present stage.
        rest: what does not divide, summed straight.
    """

    def __init__(self, whole: Tensor, part: Tensor, work: Work, rest: Work | None) -> None:
        self.whole, self.part, self.work, self._rest = whole, part, work, rest
        self._last = threading.Event()
        self._error: PeerError | None = None

    def end(self, error: PeerError | None = None) -> None:
        """The last stage has begun, or never will."""
        self._error = error
        self._last.set()

    def wait(self) -> None:
        """Return when the sum is here."""
        self._last.wait()
        if self._error is not None:
            raise self._error
        self.work.wait()
        if self._rest is not None:
            self._rest.wait()
