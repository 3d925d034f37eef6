"""What several ranks send to one that adds it up, a few messages of each at a time.

A rank that asks for everything at once lets the quickest sender go far ahead of the others; then
nothing is complete for long, and the room for what has come is as large as all of it. One that asks
for too little has senders wait, more so where each of them sends to several ranks at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm, Work


@torch.no_grad()
def summed(
    comm: Comm, ranks: Sequence[int], places: Sequence[Tensor], *, ahead: int
) -> Iterator[None]:
    """Receive from each rank one message for each place, and add up; yields as each sum is there.

    Args:
        comm: the group.
        ranks: who sends; the sum is added up in this order.
        places: each gets the sum of what is sent for it; like what is sent.
        ahead: how many messages of each rank may be on their way, 1 or more.

    Raises:
        PeerError: a rank went away.
    """
    under_way = deque[list[tuple[Tensor, Work]]]()
    for number in range(len(places) + ahead):
        if number >= ahead:
            _add_up(under_way.popleft())
        if number < len(places):
            parts = [places[number], *(torch.empty_like(places[number]) for _ in ranks[1:])]
            pairs = zip(parts, ranks, strict=True)
            under_way.append([(part, comm.receive(part, rank)) for part, rank in pairs])
        if number >= ahead:
            yield


def _add_up(messages: Sequence[tuple[Tensor, Work]]) -> None:
    (total, first), *others = messages
    first.wait()
    for part, work in others:
        work.wait()
        total += part
