"""One encoded sum over participants: to the owners of its parts, and from these to all.

Each rank owns a stretch of the elements. It decodes what all participants give of that, adds up in
the order of the participants, and encodes the sum once; all ranks decode the same bytes. What is
left out is added the next time, by whoever then has it: `carried.py` knows who that is.

Way in: `RoundExchange`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.codecs.base import Codec, aligned, draw_key
from instep.comm.codecs.none import Identity
from instep.sync.rounds.carried import SUM, CarriedPiece, Move, moves_to
from instep.sync.rounds.segments import Segments, Stretch

_PLAIN: Codec = Identity()


class RoundExchange:
    """Of all elements, or of one fragment of them.

    Args:
        codec: how values look on the wire.
        segments: how elements are cut.
        comm: the ranks.
        owners: those that own a stretch.
        device: of what is given.
        fragment: the elements; all, if it is left out.
    """

    def __init__(
        self,
        codec: Codec,
        segments: Segments,
        comm: Comm,
        owners: Sequence[int],
        device: torch.device,
        fragment: Stretch | None = None,
    ) -> None:
        self._codec, self._segments, self._comm, self._device = codec, segments, comm, device
        self.begin, self.end = fragment or (0, segments.length)
        self.stretches = segments.stretches(owners, comm.size, (self.begin, self.end))
        self.own = self.stretches[comm.rank]
        """From where to where this rank owns the sum."""

    def add_up(
        self,
        given: Mapping[int, Tensor],
        room: Mapping[int, Tensor | None],
        gives: Sequence[Collection[int]],
        *,
        number: int,
        median: bool = False,
    ) -> Tensor:
        """The payload of the sum that this rank owns.

        Args:
            given: by participant of this rank and `SUM`: what it gives [elements], or what was
                left out of the sum before, [of the own stretch]; they are changed.
            room: by the same: where to write what is left out now; None where nothing is.
            gives: by rank, its participants.
            number: of the commit.
            median: take the median over the participants instead of adding up.

        Raises:
            PeerError: a rank went away.
        """
        start, stop = self.own
        every = sorted(of for ranks in gives for of in ranks)
        sent = {
            of: self._encoded(values, room[of], (number, of), self.begin)
            for of, values in sorted(given.items())
            if of != SUM
        }
        come = self._to_owners(sent, gives)
        total = torch.zeros(stop - start, dtype=torch.float32, device=self._device)
        if median and every:
            rows = torch.zeros(len(every), stop - start, dtype=torch.float32, device=self._device)
            for row, of in zip(rows, every, strict=True):
                self._decode(row, come[of], start, stop)
            total = median_of(rows)
        else:
            for of in every:
                self._decode(total, come[of], start, stop)
        if stop == start:
            return torch.zeros(0, dtype=torch.uint8, device=self._device)
        return self._encoded(total.add_(given[SUM]), room[SUM], (number, SUM), start)

    def gather(self, own: Tensor) -> Tensor:
        """The whole sum [elements], given the payload of what this rank owns.

        Raises:
            PeerError: a rank went away.
        """
        result = torch.zeros(self.end - self.begin, dtype=torch.float32, device=self._device)
        for owner, payload in self._from_owners(own):
            low, high = self.stretches[owner]
            self._decode(result[low - self.begin : high - self.begin], payload, low, high)
        return result

    def moves(
        self,
        gives: Sequence[Collection[int]],
        holds: Sequence[Sequence[CarriedPiece]],
        whats: Mapping[int, tuple[int, int]],
    ) -> Iterator[Move]:
        """What is to be sent of what was left out before, so that each rank has what it needs.

        Args:
            gives: by rank, its participants.
            holds: by rank, what it has.
            whats: by participant and `SUM`: what stands in its place in a piece, and the commit
                that it is of; nothing for those that have left out nothing.
        """
        for rank, (start, stop) in enumerate(self.stretches):
            wanted = [(of, self.begin, self.end) for of in gives[rank]]
            for of, low, high in [*wanted, (SUM, start, stop)]:
                if high > low and of in whats:
                    what, commit = whats[of]
                    yield from moves_to(rank, CarriedPiece(what, low, high, commit), holds)

    # ---- payloads

    def _encoded(
        self, values: Tensor, left: Tensor | None, keyed: tuple[int, int], start: int
    ) -> Tensor:
        """The payload of whole segments, from `start` on; what it leaves out is written."""
        stop = start + len(values)
        out = torch.zeros(self._bytes(start, stop), dtype=torch.uint8, device=self._device)
        at = 0
        for number, place in self._segments.of(start, stop):
            part, codec = slice(place.start - start, place.stop - start), self._codec_of(number)
            rest = left[part] if left is not None else None
            codec.encode(values[part], out[at:], key=draw_key(*keyed, number), left=rest)
            at += aligned(codec.size(place.stop - place.start))
        return out

    def _decode(self, total: Tensor, payload: Tensor, start: int, stop: int) -> None:
        """Add what a payload of these segments stands for."""
        at = 0
        for number, place in self._segments.of(start, stop):
            part, codec = total[place.start - start : place.stop - start], self._codec_of(number)
            size = codec.size(place.stop - place.start)
            codec.add_into(part, payload[at : at + size])
            at += aligned(size)

    def _bytes(self, start: int, stop: int) -> int:
        return sum(
            aligned(self._codec_of(number).size(place.stop - place.start))
            for number, place in self._segments.of(start, stop)
        )

    def _codec_of(self, segment: int) -> Codec:
        return _PLAIN if self._segments.plain[segment] else self._codec

    # ---- messages

    def _to_owners(
        self, own: Mapping[int, Tensor], gives: Sequence[Collection[int]]
    ) -> dict[int, Tensor]:
        """Send each owner its part of what this rank's participants give; what comes here."""
        comm, work, come = self._comm, list[Work](), dict[int, Tensor]()
        sizes = [self._bytes(self.begin, start) for start, _ in self.stretches]
        pairs = zip(sizes, self.stretches, strict=True)
        parts = [slice(at, at + self._bytes(*stretch)) for at, stretch in pairs]
        mine = parts[comm.rank]
        for step in range(
            comm.size
        ):  # to the next, the one after it, ...: no rank gets all at once
            to, source = (comm.rank + step) % comm.size, (comm.rank - step) % comm.size
            if step == 0:
                come |= {of: payload[mine] for of, payload in own.items()}
                continue
            if own and parts[to].stop > parts[to].start:
                whole = torch.cat([own[of][parts[to]] for of in sorted(own)])
                work.append(comm.send(whole, to))
            if gives[source] and mine.stop > mine.start:
                each = mine.stop - mine.start
                room = torch.empty(each * len(gives[source]), dtype=torch.uint8)
                room = room.to(self._device)
                work.append(comm.receive(room, source))
                come |= dict(zip(sorted(gives[source]), room.split(each), strict=True))
        for one in work:
            one.wait()
        nothing = torch.zeros(0, dtype=torch.uint8, device=self._device)
        return {of: come.get(of, nothing) for ranks in gives for of in ranks}

    def _from_owners(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Owner and payload of each stretch of the sum, as they come: from neighbour to neighbour,
        as a connection that never rests takes more of a line than several that do."""
        comm, rank, payload = self._comm, self._comm.rank, own
        before, after = (rank - 1) % comm.size, (rank + 1) % comm.size
        sent = list[Work]()
        for step in range(comm.size - 1):
            owner = (rank - step) % comm.size
            size = self._bytes(*self.stretches[owner - 1])
            room = torch.empty(size, dtype=torch.uint8, device=self._device)
            coming = comm.receive(room, before) if size else None
            if len(payload):
                sent.append(comm.send(payload, after))
            yield owner, payload
            if coming is not None:
                coming.wait()
            payload = room
        yield after, payload
        for one in sent:
            one.wait()


def median_of(values: Tensor) -> Tensor:
    """Of each column: [n], of [participants, n]; of the two in the middle, their mean.

    A value that is no number counts as a large one.
    """
    values = values.nan_to_num(nan=torch.inf, posinf=torch.inf, neginf=-torch.inf).sort(0).values
    low, high = (len(values) - 1) // 2, len(values) // 2
    return values[low] if low == high else (values[low] + values[high]) / 2
