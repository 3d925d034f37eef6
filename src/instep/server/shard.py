"""What one server has of the parameters: given to workers, and moved by what they push.

With one server that is all of them. Pieces are views of the model's own memory, so what moves is
in the model. What each worker holds of them is kept: its gradients are of that. Which push counts
is not known here. Way in: `give`, then `receive` and `move`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.engine.served.leased_optimizer import LeasedUpdate
from instep.server.coding import Coding, Given, Held, Wrapped, part_of
from instep.server.micro_batches import Parcel, pieces_of
from instep.sync.generation import Piece
from instep.sync.servers.server_async import ServerAsync

_PARAMETERS = "parameters/"


class _Worker(NamedTuple):
    """What a worker computes with."""

    version: int
    held: Held


class Holding:
    """The pieces of one server.

    Args:
        parameters: those that are trained.
        update: moves them; its optimizer has the state of all of them.
        strategy: how.
        servers: how many there are.
        place: which of them this is.
        buffers: those that travel with the pieces.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        update: LeasedUpdate,
        strategy: ServerAsync,
        *,
        servers: int = 1,
        place: int = 0,
        buffers: Sequence[Tensor] = (),
    ) -> None:
        self._parameters, self._update, self._strategy = list(parameters), update, strategy
        self._buffers = list(buffers)
        self.shares = pieces_of(parameters, servers, by_element=update.by_element)
        """The pieces of each server."""
        self._held = {piece: _own(piece, parameters) for piece in self.shares[place]}
        if servers > 1:
            update.hold(self._held)
        self._coding = Coding(strategy, parameters)
        encoded = [piece for piece in self._held if self._coding.encodes(piece)]
        self._decoded = dict(zip(encoded, Parcel(parameters, encoded).pieces, strict=True))
        self._given: dict[int, _Worker] = {}
        self._rate = 1.0

    @property
    def coded(self) -> bool:
        """Whether there is a codec."""
        return self._coding.codec is not None

    def room(self) -> Wrapped:
        """Room for what a worker pushes."""
        return Wrapped(self._coding, list(self._held), self._buffers)

    def give(self, worker: int, token: int, version: int) -> Given:
        """What a worker computes with under a lease.

        Args:
            worker: who.
            token: of the lease.
            version: number of the last update.
        """
        last = self._given.get(worker)
        held = last.held if last else Held(self._coding, list(self._held), self._buffers)
        self._given[worker] = _Worker(version, held)
        return held.give(token, (version, worker))

    def gave(self, worker: int, token: int) -> bool:
        """Whether that worker computes with what it was given under this lease."""
        return worker in self._given and self._given[worker].held.token == token

    def leave(self, worker: int) -> None:
        """A worker is gone, or has come again: what it holds is not known."""
        self._given.pop(worker, None)

    def forget(self) -> None:
        """What workers compute with is of updates that did not happen."""
        self._given.clear()

    def receive(
        self, worker: int, version: int, present: Sequence[bool], gradients: Sequence[Tensor]
    ) -> list[float]:
        """Get ready to move by what a worker has pushed.

        Args:
            worker: who; `give` was the last that it asked for.
            version: number of the update that this is to be.
            present: which parameters have a gradient.
            gradients: of each piece, as in `room`; what is not present holds anything. They may
                change.

        Returns:
            The squares of the gradient, by block; nothing where nobody wants its norm.
        """
        given = self._given[worker]
        lag = version - 1 - given.version
        self._rate = self._strategy.rate(lag)
        late = bool(self._strategy.compensation and lag)
        every = zip(self._held.items(), gradients, given.held.parcel.pieces, strict=True)
        for (piece, own), gradient, before in every:
            if present[piece.slot] and piece in self._decoded:
                values = self._coding.decode(piece, gradient)
                gradient = self._decoded[piece].copy_(values.view(own.shape))
            own.grad = gradient if present[piece.slot] else None
            if late and own.grad is not None:
                self._strategy.compensate(gradient, own.detach(), before)
        return self._update.squares()

    def move(self, version: int, factor: float) -> None:
        """Move the pieces by what `receive` got, multiplied by a factor."""
        self._update.move(version, self._rate, factor)
        self.drop()

    def options(self) -> list[dict[str, Any]]:
        """What the groups of the optimizer say, as other servers are told."""
        return self._update.options()

    def take_options(self, options: Sequence[Mapping[str, Any]]) -> None:
        """Have them say what those of the first server do."""
        self._update.take_options(options)

    def drop(self) -> None:
        """What `receive` got moves nothing."""
        for own in self._held.values():
            own.grad = None

    # ---- for a server that takes this one's place, and for checkpoints

    def kept(self) -> dict[str, Tensor]:
        """The pieces, and the state that the optimizer has for them."""
        return self._own_parameters | self._update.states()

    @torch.no_grad()
    def take(self, kept: Mapping[str, Tensor]) -> None:
        """Be where `kept` was called."""
        own = self._own_parameters
        for name, parameter in own.items():
            parameter.copy_(kept[name])
        self._update.load_states({n: each for n, each in kept.items() if n not in own})
        self.drop()

    @property
    def _own_parameters(self) -> dict[str, Tensor]:
        every = self._held.items()
        return {f"{_PARAMETERS}{p.slot}/{p.start}:{p.stop}": own.detach() for p, own in every}

    def shard(self, names: Sequence[str]) -> dict[str, Tensor]:
        """That state, as it is in a checkpoint.

        Args:
            names: of the parameters.
        """
        states = ((name.split("/", 1), state) for name, state in self._update.states().items())
        return {f"{names[int(slot)]}/{rest}": state for (slot, rest), state in states}


def _own(piece: Piece, parameters: Sequence[nn.Parameter]) -> nn.Parameter:
    whole = parameters[piece.slot]
    if piece.stop - piece.start == whole.numel():
        return whole
    return nn.Parameter(part_of(parameters, piece))
