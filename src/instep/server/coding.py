"""What a codec makes of pieces on their way: differences down to a worker, gradients up from it.

Down: a server knows what each worker holds of its pieces. It encodes by how much its own differ,
and both ends move what the worker holds by what these bytes decode to (`Held`). So what is left out
is a part of the next difference. Up: a worker encodes its gradients, and adds what is left out to
its next ones (error feedback: Karimireddy et al. 2019, arXiv:1901.09847), unless the codec is right
on average (`WorkerPushes`).

Without a codec, and of parameters that none is for, pieces travel as they are. No connection is
known here, nor what counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.codecs.base import aligned, draw_key
from instep.errors import PeerError
from instep.server.micro_batches import Parcel
from instep.sync.generation import Piece
from instep.sync.servers.leases import Unit
from instep.sync.servers.server_async import ServerAsync
from instep.sync.sums import Wide

_DOWN, _UP = 0, 1


class Coding:
    """Which parameters are encoded, and how; of one thread.

    Args:
        strategy: has the codec, if there is one.
        parameters: those that are trained.

    Raises:
        SpecError: one of them is of a type that a codec cannot send.
    """

    def __init__(self, strategy: ServerAsync, parameters: Sequence[Tensor]) -> None:
        self.codec, self._vectors = strategy.codec, strategy.encode_vectors
        self.parameters = list(parameters)
        self._scratch = torch.zeros(0)
        if self.codec is not None:
            Wide(parameters)

    def encodes(self, piece: Piece) -> bool:
        """Whether a piece travels encoded."""
        parameter = self.parameters[piece.slot]
        some = piece.stop > piece.start and (self._vectors or parameter.dim() > 1)
        return self.codec is not None and some

    @property
    def carries(self) -> bool:
        """Whether what is left out of a gradient is carried over."""
        return self.codec is not None and not self.codec.unbiased

    def size(self, piece: Piece) -> int:
        """Bytes of a payload."""
        assert self.codec is not None, "it is encoded"
        return self.codec.size(piece.stop - piece.start)

    def encode(
        self, values: Tensor, payload: Tensor, key: Sequence[int], left: Tensor | None = None
    ) -> None:
        """Encode float32 values, as from `room`; what is left out is written to `left`."""
        assert self.codec is not None, "it is encoded"
        self.codec.encode(values, payload, key=draw_key(*key), left=left)

    def decode(self, piece: Piece, payload: Tensor) -> Tensor:
        """[n] float32: what a payload stands for, until the next call of this or of `room`."""
        assert self.codec is not None, "it is encoded"
        values = self.room(piece).zero_()
        self.codec.add_into(values, payload)
        return values

    def room(self, piece: Piece) -> Tensor:
        """[n] float32 for the values of a piece; they hold anything."""
        count = piece.stop - piece.start
        if len(self._scratch) < count:
            self._scratch = torch.zeros(count)
        return self._scratch[:count]


class Wrapped:
    """Room for a parcel as it travels: pieces that are encoded are payloads.

    Args:
        coding: which are.
        pieces: those of a server.
        buffers: those that travel with them.
    """

    def __init__(
        self, coding: Coding, pieces: Sequence[Piece], buffers: Sequence[Tensor] = ()
    ) -> None:
        plain = [piece for piece in pieces if not coding.encodes(piece)]
        parcel = Parcel(coding.parameters, plain, buffers)
        views, payloads, at = iter(parcel.pieces), dict[Piece, slice](), 0
        for piece in pieces:
            if coding.encodes(piece):
                payloads[piece] = slice(at, at + coding.size(piece))
                at = aligned(payloads[piece].stop)
        flat = torch.zeros(at, dtype=torch.uint8)
        self.flats = [*parcel.flats, flat]
        """[bytes] each, to be sent."""
        self.pieces = [flat[payloads[p]] if p in payloads else next(views) for p in pieces]
        """A payload, [bytes], or room for what is not encoded."""
        self.buffers = parcel.buffers
        self._parcel, self._coding, self._of = parcel, coding, list(pieces)

    @torch.no_grad()
    def load(self, held: Parcel, key: Sequence[int]) -> None:
        """Take by how much the pieces of this process differ from those in a parcel; what is not
        encoded, as it is."""
        self._parcel.load()
        for piece, payload, there in self._each(held):
            if payload is not None:
                own = part_of(self._coding.parameters, piece)
                values = self._coding.room(piece)
                values.view(there.shape).copy_(own).sub_(there)
                self._coding.encode(values, payload, (_DOWN, piece.slot, piece.start, *key))

    @torch.no_grad()
    def store(self, held: Parcel) -> None:
        """Move the pieces of a parcel by these differences; give it the rest as it is."""
        for (piece, payload, there), own in zip(self._each(held), self.pieces, strict=True):
            if payload is None:
                there.copy_(own)
            else:
                there.add_(self._coding.decode(piece, payload).view(there.shape))
        for there, own in zip(held.buffers, self.buffers, strict=True):
            there.copy_(own)

    def _each(self, held: Parcel) -> Iterator[tuple[Piece, Tensor | None, Tensor]]:
        for piece, own, there in zip(self._of, self.pieces, held.pieces, strict=True):
            yield piece, own if self._coding.encodes(piece) else None, there


class Given(NamedTuple):
    """What a server sends a worker to compute with."""

    flats: list[Tensor]
    """[bytes] each; they do not change before its next question."""
    since: int
    """The token under which the worker was given what these are differences from; -1 where they
    are the pieces themselves."""


class Held:
    """The pieces of a server as one worker holds them. Both ends have one, with the same bits: the
    server calls `give`, and the worker `room`, then `take`.

    Args:
        coding, pieces, buffers: as for `Wrapped`.
    """

    def __init__(
        self, coding: Coding, pieces: Sequence[Piece], buffers: Sequence[Tensor] = ()
    ) -> None:
        self.parcel = Parcel(coding.parameters, pieces, buffers)
        encodes = any(coding.encodes(piece) for piece in pieces)
        self._wrapped = Wrapped(coding, pieces, buffers) if encodes else None
        self.token = -1
        """Of the lease under which it was given; -1 where nothing was."""

    def give(self, token: int, key: Sequence[int]) -> Given:
        """Have the worker hold what this server has now.

        Args:
            token: of the lease.
            key: what random rounding is drawn from.
        """
        since, self.token = self.token, token
        if since < 0 or self._wrapped is None:
            self.parcel.load()
            return Given(self.parcel.flats, -1)
        self._wrapped.load(self.parcel, key)
        self._wrapped.store(self.parcel)
        return Given(self._wrapped.flats, since)

    def room(self, since: int) -> list[Tensor]:
        """[bytes] each, for what `give` gave.

        Args:
            since: what it said.

        Raises:
            PeerError: these are differences from what this worker does not hold.
        """
        if since >= 0 and (since != self.token or self._wrapped is None):
            raise PeerError(
                f"parameters that differ from those of lease {since} have arrived, and this "
                f"worker has those of {self.token}."
            )
        self.token = -1
        if since < 0 or self._wrapped is None:
            return self.parcel.flats
        return self._wrapped.flats

    def take(self, token: int, since: int) -> None:
        """What was to come has: hold it, and have the parameters be that.

        Args:
            token, since: as for `give` and `room`.
        """
        if since >= 0 and self._wrapped is not None:
            self._wrapped.store(self.parcel)
        self.parcel.store()
        self.token = token


class WorkerPushes:
    """What one worker pushes to all servers, and what it carries over to its next push.

    What is left out of a gradient is carried over if its push is a commit; else what was carried
    before still is. A push: `pack`, then `settle` once that is known.

    Args:
        coding: of the gradients.
        shares: the pieces of each server.
        buffers: those that travel with the pieces of each.
    """

    def __init__(
        self,
        coding: Coding,
        shares: Sequence[Sequence[Piece]],
        buffers: Sequence[Sequence[Tensor]],
    ) -> None:
        self.rooms = [
            Wrapped(coding, pieces, own) for pieces, own in zip(shares, buffers, strict=True)
        ]
        """What goes to each server."""
        self.unsettled = -1
        """The token of the push of which it is not known whether it is a commit; -1 if none."""
        self._coding, self._shares = coding, [list(pieces) for pieces in shares]
        every = [piece for pieces in shares for piece in pieces]
        carried = [piece for piece in every if coding.carries and coding.encodes(piece)]
        self.carried, self._staged = (
            {piece: torch.zeros(piece.stop - piece.start) for piece in carried} for _ in range(2)
        )

    @torch.no_grad()
    def pack(self, token: int, unit: Unit, gradients: Sequence[Tensor | None]) -> None:
        """Write gradients into `rooms`.

        Args:
            token: of the lease.
            unit: what they are of: random rounding is drawn from it.
            gradients: of each parameter; of one that has none nothing is written, and what is
                carried over of it stays.
        """
        for pieces, room in zip(self._shares, self.rooms, strict=True):
            for piece, into in zip(pieces, room.pieces, strict=True):
                self._pack(piece, gradients[piece.slot], unit, into)
        self.unsettled = token

    def _pack(self, piece: Piece, gradient: Tensor | None, unit: Unit, into: Tensor) -> None:
        carried, left = self.carried.get(piece), self._staged.get(piece)
        if gradient is None:
            if carried is not None and left is not None:
                left.copy_(carried)
            return
        if piece.stop - piece.start < gradient.numel():
            gradient = gradient.reshape(-1)[piece.start : piece.stop]
        if not self._coding.encodes(piece):
            into.copy_(gradient)
            return
        values = self._coding.room(piece)
        values.view(gradient.shape).copy_(gradient)
        if carried is not None:
            values.add_(carried)
        self._coding.encode(values, into, (_UP, piece.slot, piece.start, *unit), left)

    def settle(self, counted: bool) -> None:
        """It is known whether the last push is a commit; a second call does nothing."""
        if self.unsettled >= 0 and counted:
            self.carried, self._staged = self._staged, self.carried
        self.unsettled = -1


def part_of(parameters: Sequence[Tensor], piece: Piece) -> Tensor:
    """A piece of a parameter; its elements lie in order if it is not all of it."""
    whole = parameters[piece.slot]
    if piece.stop - piece.start == whole.numel():
        return whole.detach()
    return whole.detach().view(-1)[piece.start : piece.stop]
