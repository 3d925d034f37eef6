"""Which server has which part of the parameters; the same on every rank.

Every bucket is shared out to all servers, so that all of them have something to do as soon as the
first is full. Shares are equal, rounded to where a cut may be: between parameters, or at a
multiple of `CUT` elements within one. A share is cut into segments of at most `LONGEST_BYTES`
where that is possible: a server can send one back while the next is still coming. The norm is
summed in blocks of which no cut divides one. Nothing here knows gradients or optimizers.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.buckets import Bucket
from instep.sync import norm
from instep.sync.generation import Piece

CUT = norm.BLOCK
"""Elements: no cut divides a block of the norm, or what processors add at once."""

LONGEST_BYTES = 1 << 17
"""Of a segment. Until the first one is there from all workers a server has nothing to send, and it
ends that much later (decision 0046)."""

_ALIGNED = 64


class BucketSegment(NamedTuple):
    """Elements [start, stop) of a bucket: what is sent in one message."""

    bucket: int
    start: int
    stop: int
    pieces: tuple[Piece, ...]
    """The same, by parameter."""


class ServerPart(NamedTuple):
    """What one server has."""

    segments: list[BucketSegment]
    """In the order of the buckets."""

    @property
    def pieces(self) -> list[Piece]:
        """The same, by parameter."""
        return pieces_of(self.segments)


def pieces_of(segments: Sequence[BucketSegment]) -> list[Piece]:
    """The same, by parameter."""
    return [piece for segment in segments for piece in segment.pieces]


def cut(
    buckets: Sequence[Bucket],
    parameters: Sequence[Tensor],
    servers: int,
    *,
    by_element: bool,
    longest_bytes: int = LONGEST_BYTES,
) -> list[ServerPart]:
    """The part of each server; together they are all parameters, each element once.

    Args:
        buckets: with the parameters as members.
        parameters: in the order of their slots.
        servers: how many.
        by_element: whether a parameter may be cut, if its elements lie in their order.
        longest_bytes: of a segment.
    """
    parts = [ServerPart([]) for _ in range(servers)]
    bytes_of = [0] * servers
    for number, bucket in enumerate(buckets):
        begins, at = [], 0
        for member in bucket.members:
            begins.append(at)
            at += parameters[member].numel()
        places = [
            place
            for member, begin in zip(bucket.members, begins, strict=True)
            for place in _places(begin, parameters[member], by_element=by_element)
        ]
        shares = list(_shares([*places, at], servers))
        each = parameters[bucket.members[0]].element_size()
        # the largest to who has least so far: a bucket that cannot be cut is not always the same's
        for start, stop in sorted(shares, key=lambda share: share[0] - share[1]):
            server = bytes_of.index(min(bytes_of))
            bytes_of[server] += each * (stop - start)
            inside = [place for place in [*places, at] if start < place <= stop]
            for first, last in _short(start, inside, longest_bytes // each):
                pieces = _pieces(first, last, bucket.members, begins, parameters)
                parts[server].segments.append(BucketSegment(number, first, last, tuple(pieces)))
    return parts


def shares(parameters: Sequence[Tensor], servers: int, *, by_element: bool) -> list[list[Piece]]:
    """The same where nothing is cut into segments: the pieces of each server, in their order.

    A server's list is empty where there is nothing left for it.
    """
    kinds = defaultdict[torch.dtype, list[int]](list)
    for slot, parameter in enumerate(parameters):
        kinds[parameter.dtype].append(slot)
    nothing = torch.empty(0)
    buckets = [Bucket(nothing, tuple(members), (), nothing) for members in kinds.values()]
    every = cut(buckets, parameters, servers, by_element=by_element, longest_bytes=sys.maxsize)
    return [sorted(part.pieces) for part in every]


def _places(begin: int, parameter: Tensor, *, by_element: bool) -> Sequence[int]:
    """Where a cut may be from a parameter on, which begins there in its bucket."""
    if by_element and parameter.is_contiguous() and parameter.numel():
        return range(begin, begin + parameter.numel(), CUT)
    return (begin,)


def _shares(places: Sequence[int], servers: int) -> Iterator[tuple[int, int]]:
    """Of one bucket, which ends with the last place; none is empty."""
    at, length = 0, places[-1]
    for server in range(1, servers + 1):
        wanted = length * server / servers
        stop = min(places, key=lambda place: abs(place - wanted))
        if stop > at:
            yield at, stop
            at = stop


def _short(start: int, places: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Cut what begins at `start`, and ends with the last place, to at most so many elements."""
    last = start
    for place in places:
        if place - start > most and last > start:
            yield start, last
            start = last
        last = place
    if last > start:
        yield start, last


def _pieces(
    first: int,
    last: int,
    members: Sequence[int],
    begins: Sequence[int],
    parameters: Sequence[Tensor],
) -> Iterator[Piece]:
    for member, begin in zip(members, begins, strict=True):
        start, stop = max(first - begin, 0), min(last - begin, parameters[member].numel())
        if start < stop:
            yield Piece(member, start, stop)


class Packed:
    """Pieces in one flat memory, which can be sent as it is.

    Args:
        pieces: in their order.
        parameters: by slot; types, shapes and device are theirs.
    """

    def __init__(self, pieces: Sequence[Piece], parameters: Sequence[Tensor]) -> None:
        places, at = list[int](), 0
        self._ends = dict[Piece, tuple[int, int]]()
        for piece in pieces:
            places.append(at)
            size = (piece.stop - piece.start) * parameters[piece.slot].element_size()
            at += -(-size // _ALIGNED) * _ALIGNED
            self._ends[piece] = places[-1], at
        self.flat = torch.zeros(at, dtype=torch.uint8)
        """[bytes]"""
        self.views: dict[Piece, Tensor] = {}
        """Of `flat`: shaped and laid out like the parameter where the piece is all of it, else
        [elements]."""
        for piece, place in zip(pieces, places, strict=True):
            whole = parameters[piece.slot]
            count = piece.stop - piece.start
            part = self.flat[place : place + count * whole.element_size()].view(whole.dtype)
            if count == whole.numel():
                part = part.as_strided(whole.shape, torch.empty_like(whole, device="meta").stride())
            self.views[piece] = part
        self._parameters = list(parameters)

    def of(self, segment: BucketSegment) -> Tensor:
        """[bytes] of `flat`: a segment of the part whose pieces these are."""
        return self.flat[self._ends[segment.pieces[0]][0] : self._ends[segment.pieces[-1]][1]]

    @torch.no_grad()
    def load(self) -> None:
        """Take the values of the parameters."""
        for piece, view in self.views.items():
            parameter = self._parameters[piece.slot]
            if view.shape == parameter.shape:
                view.copy_(parameter)
            else:
                view.copy_(parameter.view(-1)[piece.start : piece.stop])

    @torch.no_grad()
    def store(self) -> None:
        """Give the parameters these values."""
        for piece, view in self.views.items():
            parameter = self._parameters[piece.slot]
            if view.shape == parameter.shape:
                parameter.copy_(view)
            else:  # only what lies in order is cut
                parameter.view(-1)[piece.start : piece.stop].copy_(view)
