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
from instep.comm.codecs.base import Codec


@torch.no_grad()
def summed(
    comm: Comm,
    ranks: Sequence[int],
    places: Sequence[Tensor],
    *,
    ahead: int,
    codecs: Sequence[Codec | None] = (),
) -> Iterator[None]:
    """Receive from each rank one message for each place, and add up; yields as each sum is there.

    Args:
        comm: the group.
        ranks: who sends; the sum is added up in this order.
        places: each gets the sum of what is sent for it; like what is sent.
        ahead: how many messages of each rank may be on their way, 1 or more.
        codecs: by place, with what messages for it are encoded: of fixed size; None where they are
            not, as where this is left out.

    Raises:
        PeerError: a rank went away.
    """
    under_way = deque[tuple[Tensor, Codec | None, list[tuple[Tensor, Work]]]]()
    coded = codecs or [None] * len(places)
    for number in range(len(places) + ahead):
        if number >= ahead:
            _add_up(*under_way.popleft())
        if number < len(places):
            place, codec = places[number], coded[number]
            parts = _rooms(place, codec, len(ranks))
            pairs = zip(parts, ranks, strict=True)
            under_way.append(
                (place, codec, [(part, comm.receive(part, rank)) for part, rank in pairs])
            )
        if number >= ahead:
            yield


def _rooms(place: Tensor, codec: Codec | None, count: int) -> list[Tensor]:
    """Where so many messages for a place go; as it is, the first goes there itself."""
    if codec is None:
        return [place, *(torch.empty_like(place) for _ in range(count - 1))]
    return [torch.empty(codec.size(len(place)), dtype=torch.uint8) for _ in range(count)]


def _add_up(place: Tensor, codec: Codec | None, messages: Sequence[tuple[Tensor, Work]]) -> None:
    for number, (part, work) in enumerate(messages):
        work.wait()
        if codec is not None:
            codec.add_into(place if number else place.zero_(), part)
        elif number:
            place += part
