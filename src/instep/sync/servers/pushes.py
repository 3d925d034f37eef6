"""What a worker sends to servers with a codec: each segment encoded, and the rest kept for later.

What is left out of a segment is added to it in the next step (error feedback: Karimireddy et al.
2019, arXiv:1901.09847), unless the codec is right on average. It lies by parameter, so that it is
the same wherever a part lies. Nothing here knows servers' optimizers, nor what comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.comm.codecs.base import Codec, draw_key
from instep.errors import SpecError
from instep.sync.reducers import Place, Room
from instep.sync.reducers.residuals import Residuals
from instep.sync.reducers.whole_buckets import WholeBuckets
from instep.sync.servers.cuts import BucketSegment


class Pushes(Residuals[Codec]):
    """Of one worker, in one generation. A step: `encode` for each bucket, `finish`, and `apply` or
    `abandon`.

    Args:
        codec, comm, layout, room: as for `Reducer`.
        segments: of the buckets that are encoded.
    """

    @staticmethod
    def kinds(codec: Codec) -> tuple[str, ...]:
        """As of `TwoPhase`."""
        return () if codec.unbiased else ("residual",)

    def __init__(
        self,
        codec: Codec,
        comm: Comm,
        layout: WholeBuckets,
        room: Room,
        segments: Iterable[BucketSegment],
    ) -> None:
        super().__init__(codec, comm, layout, room)
        self._payloads = {segment: payload_of(codec, segment) for segment in segments}

    def encodes(self, number: int) -> bool:
        """Whether a bucket is one of those that are encoded, which are the first."""
        return number < len(self._layout.lengths)

    @torch.no_grad()
    def encode(
        self, number: int, flat: Tensor, segments: Sequence[BucketSegment], key: int
    ) -> Mapping[BucketSegment, Tensor]:
        """The payload of each segment of the next bucket; they are good until the next step.

        Args:
            number: of the bucket.
            flat: its gradients, float32; they are changed.
            segments: of the bucket.
            key: the number of the commit.
        """
        values = self._taken(number, flat)
        left = self._add_left(number, values)
        for segment in segments:
            part = slice(segment.start, segment.stop)
            rest = left[part] if left is not None else None
            drawn = draw_key(key, number, segment.start, self._comm.rank)
            self._codec.encode(values[part], self._payloads[segment], key=drawn, left=rest)
        return self._payloads

    def finish(self, unused: Collection[int]) -> None:
        """All is sent, and what is left out lies staged.

        Args:
            unused: the parameters that no rank has used: servers leave them as they are, and what
                is still to be sent of them stays so.
        """
        self.unused = {str(slot) for slot in unused}
        self._still_carry_residuals()
        self._stage()


def check_codec(codec: Codec, *, copy: bool = False) -> None:
    """Refuse a codec that servers cannot use.

    Args:
        copy: whether servers are to keep copies of each other's parts.

    Raises:
        SpecError: it is one.
    """
    if hasattr(codec, "reducer") or not (codec.segmentable and codec.fixed_size):
        raise SpecError(
            "sync.codec: servers need a codec that is segmentable and of fixed size. Use int8."
        )
    if copy:
        raise SpecError(
            "sync.options.copy = true does not go with sync.codec: the server that keeps the copy "
            "is sent sums as they are. Leave one of the two out."
        )


def layout_of(buckets: Iterable[Sequence[int]], parameters: Sequence[Tensor]) -> WholeBuckets:
    """How residuals lie.

    Args:
        buckets: that are encoded: their members.
        parameters: by slot.
    """
    return WholeBuckets(
        ("residual",),
        [[Place(str(slot), tuple(parameters[slot].shape)) for slot in slots] for slots in buckets],
    )


def nothing_left(
    parameters: Sequence[Tensor], encoded: Callable[[Tensor], bool]
) -> dict[str, Tensor]:
    """A worker's residuals, where there are none."""
    every = [(slot, each) for slot, each in enumerate(parameters) if encoded(each)]
    return {f"residual/{slot}": torch.zeros(p.shape, dtype=torch.float32) for slot, p in every}


def payload_of(codec: Codec, segment: BucketSegment) -> Tensor:
    """[bytes] Room for what a segment is encoded to."""
    return torch.zeros(codec.size(segment.stop - segment.start), dtype=torch.uint8)
