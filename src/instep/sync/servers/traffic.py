"""Segments on their way between workers and servers: gradients up, new parameters down.

It knows which segment belongs to whom and where it lies, and nothing of steps or optimizers. One is
made for each generation. With a codec both directions are payloads, gradients (`pushes.py`) and
differences of parameters (`differences.py`). Ways in: `send` and `pull` on workers, `summed` and
`give` on servers, `wait` on all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket
from instep.sync.arriving import summed
from instep.sync.servers.cuts import BucketSegment
from instep.sync.servers.pushes import Pushes
from instep.sync.servers.shared_parts import SharedParts

AHEAD = 4
"""Segments of a worker that may be on their way to a server, for each server that there is. With
more of them the first sum is complete later; a worker that sends to several servers is uneven."""


class ServerTraffic:
    """One rank's.

    Args:
        comm: the group.
        servers: their ranks.
        shared: the parts.
        buckets: where gradients lie.
        pushes: with a codec, on a worker, what goes to the servers.
    """

    def __init__(
        self,
        comm: Comm,
        servers: Sequence[int],
        shared: SharedParts,
        buckets: Sequence[Bucket],
        pushes: Pushes | None,
    ) -> None:
        self._codec, self._pushes = shared.codec, pushes
        self._payloads = shared.back.payloads if shared.back is not None else {}
        self._comm, self._servers, self._parts = comm, list(servers), shared.parts
        self._buckets, self._new, self._copies = buckets, shared.held, shared.copy
        self._workers = [rank for rank in range(comm.size) if rank not in self._servers]
        self._mine = self._servers.index(comm.rank) if comm.rank in self._servers else -1
        self._under_way: list[Work] = []
        self._segments: list[list[tuple[int, BucketSegment]]] = [[] for _ in buckets]
        for server, part in enumerate(self._parts):
            for segment in part.segments:
                self._segments[segment.bucket].append((server, segment))

    # ---- workers

    def send(self, number: int, flat: Tensor, *, pull: bool, key: int = 0) -> Work:
        """Send a bucket's segments to their servers; a server sends nothing.

        Args:
            number: of the bucket.
            flat: its gradients.
            pull: have the new parameters of each come, too.
            key: with a codec, the number of the commit.
        """
        sent = list[Work]()
        payloads: Mapping[BucketSegment, Tensor] = {}
        segments = [segment for _, segment in self._segments[number]]
        if self._pushes is not None and self._pushes.encodes(number):
            payloads = self._pushes.encode(number, flat, segments, key)
        for server, segment in self._segments[number] if self._mine < 0 else ():
            part = payloads.get(segment, flat[segment.start : segment.stop])
            sent.append(self._comm.send(part, self._servers[server]))
            if pull:
                self.pull(server, segment)
        return _All(sent)

    def pull(self, server: int, segment: BucketSegment) -> None:
        """Have the new parameters of a segment come to this worker."""
        into = self._answer(server, segment)
        self._under_way.append(self._comm.receive(into, self._servers[server]))

    def _answer(self, server: int, segment: BucketSegment) -> Tensor:
        """Where what goes back of a segment lies."""
        payload = self._payloads.get(segment)
        return self._new[server].of(segment) if payload is None else payload

    # ---- servers

    def summed(self) -> Iterator[BucketSegment]:
        """Add up what the workers send for this server's part; each segment as its sum is there."""
        places, ahead = self._places(self._mine), AHEAD * len(self._servers)
        codecs = [self._codec if segment in self._payloads else None for segment in places]
        each = list(places.values())
        arrived = summed(self._comm, self._workers, each, ahead=ahead, codecs=codecs)
        follower = self._servers[(self._mine + 1) % len(self._servers)]
        for (segment, place), _ in zip(places.items(), arrived, strict=True):
            if self._copies:
                self._under_way.append(self._comm.send(place, follower))
            yield segment

    def followed(self) -> Iterator[BucketSegment]:
        """Get the sums of the part of which this server keeps a copy; each as it is there."""
        leader = (self._mine - 1) % len(self._servers)
        places = self._places(leader)
        coming = [self._comm.receive(place, self._servers[leader]) for place in places.values()]
        for segment, message in zip(places, coming, strict=True):
            message.wait()
            yield segment

    def give(self, segments: Sequence[BucketSegment]) -> None:
        """Send what is new of this server's part to the workers."""
        self._under_way += [
            self._comm.send(self._answer(self._mine, segment), rank)
            for segment in segments
            for rank in self._workers
        ]

    def _places(self, server: int) -> dict[BucketSegment, Tensor]:
        """Where the sums of a server's part lie."""
        return {
            segment: self._buckets[segment.bucket].flat[segment.start : segment.stop]
            for segment in self._parts[server].segments
        }

    # ---- all

    def wait(self) -> None:
        """Until all new parameters, and copies of sums, are where they belong."""
        works, self._under_way = self._under_way, []
        for work in works:
            work.wait()

    def forget(self) -> None:
        """The group is broken: nothing more comes."""
        self._under_way = []


class _All:
    """Several messages under way."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are over."""
        for work in self._works:
            work.wait()
