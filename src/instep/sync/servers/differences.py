"""What servers send back with a codec: by how much workers are to move their parameters.

A server has the parameters as its optimizer moves them, and those that the workers hold. It encodes
the difference of the two, and moves the second as the workers will: all decode the same bytes. So
what is left out of one step is a part of the difference in the next, and nothing has to be kept for
it. A parameter that no rank has used in a step stays where it is.

Nothing here knows messages, optimizers or votes. Way in: `Differences`, on servers and workers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.codecs.base import Codec, draw_key
from instep.sync.generation import Piece
from instep.sync.servers.cuts import BucketSegment, Packed
from instep.sync.servers.pushes import payload_of


class Differences:
    """Of the segments that are encoded.

    Args:
        codec: how a difference looks on the wire.
        segments: and what the workers hold of each, or are about to hold.
    """

    def __init__(self, codec: Codec, segments: Mapping[BucketSegment, Packed]) -> None:
        self._codec, self._held = codec, segments
        self.payloads = {segment: payload_of(codec, segment) for segment in segments}
        """What a server sends and a worker receives, [bytes]."""
        longest = max((segment.stop - segment.start for segment in segments), default=0)
        self._values = torch.zeros(longest, dtype=torch.float32)

    @torch.no_grad()
    def encode(
        self, segment: BucketSegment, moved: Packed, there: Sequence[bool], key: int
    ) -> None:
        """Write the payload of a segment, and move what the workers hold by it.

        Args:
            segment: of this server.
            moved: has what its optimizer has made of the parameters.
            there: of each parameter, whether a rank has used it.
            key: the number of the commit.
        """
        values = self._values[: segment.stop - segment.start]
        for piece, part in _parts(segment, values):
            if there[piece.slot]:
                own = moved.views[piece]
                part.view(own.shape).copy_(own).sub_(self._held[segment].views[piece])
            else:
                part.zero_()
        drawn = draw_key(key, segment.bucket, segment.start, -1)
        self._codec.encode(values, self.payloads[segment], key=drawn)
        self.take(segment, there)

    @torch.no_grad()
    def take(self, segment: BucketSegment, there: Sequence[bool]) -> None:
        """Move what the workers hold of a segment by its payload."""
        values = self._values[: segment.stop - segment.start].zero_()
        self._codec.add_into(values, self.payloads[segment])
        for piece, part in _parts(segment, values):
            if there[piece.slot]:
                held = self._held[segment].views[piece]
                held.add_(part.view(held.shape))


def _parts(segment: BucketSegment, values: Tensor) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece of a segment, and its elements among those of all."""
    sizes = [piece.stop - piece.start for piece in segment.pieces]
    return zip(segment.pieces, values.split(sizes), strict=True)
