"""Which server has which part of the parameters; the same on every rank.

Every bucket is cut into one segment for each server, so that all of them have something to do as
soon as the first is full. A segment is as long as its share, rounded to where a cut may be: between
parameters, or at a multiple of `CUT` elements within one. The norm is summed in blocks of which
no cut divides one. Nothing here knows gradients or optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.buckets import Bucket
from instep.sync.base import Piece

CUT = 1 << 16
"""Elements: a multiple of `norm.BLOCK`, and of what processors add at once."""

_ALIGNED = 64


class Segment(NamedTuple):
    """Elements [start, stop) of a bucket."""

    bucket: int
    start: int
    stop: int


class Part(NamedTuple):
    """What one server has."""

    segments: list[Segment]
    """In the order of the buckets."""
    pieces: list[Piece]
    """The same, by parameter."""


def cut(
    buckets: Sequence[Bucket], parameters: Sequence[Tensor], servers: int, *, by_element: bool
) -> list[Part]:
    """The part of each server; together they are all parameters, each element once.

    Args:
        buckets: with the parameters as members.
        parameters: in the order of their slots.
        servers: how many.
        by_element: whether a parameter may be cut, if its elements lie in their order.
    """
    parts = [Part([], []) for _ in range(servers)]
    bytes_of = [0] * servers
    for number, bucket in enumerate(buckets):
        begins, at = [], 0
        divisible = [by_element and parameters[m].is_contiguous() for m in bucket.members]
        for member in bucket.members:
            begins.append(at)
            at += parameters[member].numel()
        segments = list(_segments(number, begins, at, servers, divisible))
        # the largest to who has least so far: a bucket that cannot be cut is not always the same's
        for segment in sorted(segments, key=lambda one: one.start - one.stop):
            server = bytes_of.index(min(bytes_of))
            pieces = list(_pieces(segment, bucket.members, begins, parameters))
            parts[server].segments.append(segment)
            parts[server].pieces.extend(pieces)
            bytes_of[server] += sum(
                (piece.stop - piece.start) * parameters[piece.slot].element_size()
                for piece in pieces
            )
    return parts


def _segments(
    number: int, begins: Sequence[int], length: int, servers: int, divisible: Sequence[bool]
) -> Iterator[Segment]:
    """Of one bucket; none is empty."""
    ends = [*begins[1:], length]
    places = {
        place
        for begin, end, can in zip(begins, ends, divisible, strict=True)
        for place in (range(begin, end, CUT) if can else (begin,))
    }
    at = 0
    for server in range(1, servers + 1):
        wanted = length * server / servers
        stop = length if server == servers else min(places, key=lambda place: abs(place - wanted))
        if stop > at:
            yield Segment(number, at, stop)
            at = stop


def _pieces(
    segment: Segment, members: Sequence[int], begins: Sequence[int], parameters: Sequence[Tensor]
) -> Iterator[Piece]:
    for member, begin in zip(members, begins, strict=True):
        start = max(segment.start - begin, 0)
        stop = min(segment.stop - begin, parameters[member].numel())
        if start < stop:
            yield Piece(member, start, stop)


class Packed:
    """Pieces in one flat memory, which can be sent as it is.

    Args:
        pieces: in their order.
        parameters: by slot; types, shapes and device are theirs.
    """

    def __init__(self, pieces: Sequence[Piece], parameters: Sequence[Tensor]) -> None:
        places, at = [], 0
        for piece in pieces:
            places.append(at)
            size = (piece.stop - piece.start) * parameters[piece.slot].element_size()
            at += -(-size // _ALIGNED) * _ALIGNED
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
