"""Collectives of messages straight from rank to rank, for what lies in memory of the CPU.

Gloo's own all-gather takes memory for the parts of all ranks once more and copies them from there,
and its own reduce-scatter sends as much as an all-reduce. Here a rank sends from, and receives
into, the tensors that it is given. Other groups use their own collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from instep.comm.torch_work import broken, in_rank_order


def all_gather(group: ProcessGroup, out: Tensor, part: Tensor, tag: int = 0) -> Any:
    """Begin to collect the ranks' parts, [n] each, in [ranks * n]; for `wait`.

    Args:
        group: the ranks.
        out: may have `part` as this rank's part of it.
        part: not to be changed before the end.
        tag: what it is; ranks with another one never meet, and gloo ends a process to which
            another size is sent than it expects.
    """
    if out.device.type != "cpu":
        return begun(lambda: group._allgather_base(out, part))
    parts = out.view(group.size(), -1)
    if parts[group.rank()].data_ptr() != part.data_ptr():
        parts[group.rank()].copy_(part)
    return begun(lambda: swap(group, lambda rank: part, list(parts), tag))


class SumOfParts:
    """A reduce-scatter under way: [ranks, n] on each rank, of which it gets the sum [n] of its row.

    Args:
        group: the ranks.
        parts: contiguous; not to be changed before the end.
        tag: as for `all_gather`.
    """

    def __init__(self, group: ProcessGroup, parts: Tensor, tag: int = 0) -> None:
        ranks, own = group.size(), group.rank()
        if parts.device.type != "cpu":
            got = parts.new_empty(parts.shape)
            self._rows = list(got)
            self._work = begun(lambda: group.alltoall_base(got, parts, [], []))
            return
        others = list(parts.new_empty(ranks - 1, parts.shape[1]))
        self._rows = [*others[:own], parts[own], *others[own:]]
        self._work = begun(lambda: swap(group, lambda rank: parts[rank], self._rows, tag))

    def end(self, out: Tensor | None = None) -> Tensor:
        """Wait for the others; the sum, each rank's part added to those before it: the same bits.

        Raises:
            PeerError: another rank has ended.
        """
        wait(self._work)
        return in_rank_order(self._rows, out)


def swap(
    group: ProcessGroup, sent: Callable[[int], Tensor], got: Sequence[Tensor], tag: int
) -> Any:
    """Begin to send each other rank its tensor, and to receive one from it.

    A rank first says that it can receive: what it sends would keep the others' from coming, on a
    link that is slower than the sender.

    Args:
        group: the ranks.
        sent: the tensor for a rank, not to be changed before the end.
        got: for each rank, where its tensor goes; all are as long.
        tag: as for `all_gather`.
    """
    own, ranks = group.rank(), group.size()
    works = []
    if got[own].numel():
        for step in range(1, ranks):  # no rank is the first of all others
            source, to = (own - step) % ranks, (own + step) % ranks
            works.append(group.recv([got[source]], source, tag))
            works.append(group.send([sent(to)], to, tag))
    return _MessagesWork(works)


class _MessagesWork(dist.Work):
    """Several messages; FSDP2 waits only for what is a `Work`."""

    def __init__(self, works: Sequence[Any]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        for work in self._works:
            work.wait(timeout) if timeout else work.wait()
        return True


def begun(start: Callable[[], Any]) -> Any:
    """What `start` returns; PeerError if a rank has ended."""
    try:
        return start()
    except RuntimeError as error:
        raise broken(error) from error


def wait(work: Any) -> None:
    """Return when a collective has ended; PeerError if a rank has."""
    try:
        work.wait()
    except RuntimeError as error:
        raise broken(error) from error
