"""Servers hold the optimizer, each for a part of the parameters; workers hold none of it.

As in the parameter server of Li et al. (2014, OSDI), but in lockstep: every step waits for all
workers. Gradients fill buckets as in `all_reduce.py`, whose promises about sums hold here. But a
full bucket is not summed by all: each segment of it goes to the server that has it (`cuts.py`),
which adds up in rank order. When all have agreed on the step, `prepare` has the servers move
their parts, and send them to all; so all hold the same parameters, servers too, and
any that is left can give them to a new worker.

A server's optimizer state is its own alone. It lies in ordinary memory, moves there before it is
known whether the step happens, and is copied into a slot of memory that outlives the process. A
step that does not happen is undone by the other slot.

It knows nothing of how an optimizer works (`base.Mover`), nor of votes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket, laid_out_like, lay_out
from instep.errors import RecipeError, SpecError, WorkerError
from instep.records import BEGINNING, Attempt, Law
from instep.sync import norm
from instep.sync.base import InMesh, Memory, Mover, Piece, Price, Result, Servers
from instep.sync.cuts import Packed, Part, cut
from instep.sync.gathering import Gathering
from instep.sync.sums import Exact, Plain


class _Shared(NamedTuple):
    """How the parameters are shared out; the same in all generations of a process."""

    parts: list[Part]
    """Of each server."""
    new: list[Packed]
    """Each part, moved towards the next commit. Of this server it is what its optimizer moves."""


class ServerSync(Gathering):
    """Weighted mean of the gradients of all workers, and an optimizer on servers.

    Args:
        bucket_mb: megabytes at which a bucket is full and starts on its way.
        overlap: send during the backward pass; off, all is sent after it.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(self, *, bucket_mb: float = 8.0, overlap: bool = True) -> None:
        super().__init__(bucket_mb=bucket_mb, overlap=overlap)
        self.laws = {"optimizer": Law.MOVE}
        self._shared: _Shared | None = None
        self._left: dict[str, Tensor] | None = None  # of the process before, until `start`
        self._held: Attempt | None = None  # under which memory has the state of the last commit
        self._begins = False  # from what the optimizer has
        self._mine = -1  # which server this is; -1 for a worker
        self._moved = False  # whether this server's part has moved in this step
        self._memory: Memory | None = None
        self._attempt = BEGINNING
        self._mover: Mover

    start_in_doubt = -1

    def resolve(self, generation: int) -> None:
        """Nothing changes hands."""

    # ---- generations

    def start(
        self,
        parameters: Sequence[Parameter],
        comm: Comm,
        *,
        notes: int,
        parts: int = 0,
        memory: Memory | None = None,
        at: Attempt = BEGINNING,
        draining: Sequence[int] = (),
        servers: Servers | None = None,
        mesh: InMesh | None = None,
    ) -> None:
        """Lay out buckets and parts; a server makes sure that its memory has what it holds."""
        if servers is None or not servers.ranks or len(servers.ranks) == comm.size:
            raise SpecError(
                "sync.name = 'server_sync' needs at least one server and one worker. Set "
                "sync.servers, or use all_reduce."
            )
        if parameters[0].device.type != "cpu":
            raise SpecError(
                f"sync.name = 'server_sync' works in the memory of the host, and the model is on "
                f"{parameters[0].device}. Set train.device = 'cpu', or use all_reduce."
            )
        sums = Exact(parameters, comm, parts) if parts else Plain()
        self._gather(parameters, comm, sums, notes)
        self._servers, self._mover, self._memory = list(servers.ranks), servers.mover, memory
        self._workers = [rank for rank in range(comm.size) if rank not in self._servers]
        self._mine = self._servers.index(comm.rank) if comm.rank in self._servers else -1
        if self._shared is None:
            self._share_out()
        assert self._shared is not None
        if self._mine >= 0:
            self._shared.new[self._mine].load()
            self._hold(at)
        comm.all_reduce(torch.zeros(1)).wait()  # after it, each knows that all servers hold
        self._moved = False

    def _share_out(self) -> None:
        """Cut the parameters, and the state that the optimizer has for them."""
        mover, count = self._mover, len(self._servers)
        every = cut(self._buckets[:-1], self._parameters, count, by_element=mover.by_element)
        new = [Packed(part.pieces, self._parameters) for part in every]
        self._shared = _Shared(every, new)
        own = new[self._mine].views if self._mine >= 0 else {}
        mover.hold({piece: Parameter(view) for piece, view in own.items()})
        if self._left is not None and self._mine >= 0:
            assert self._memory is not None
            mover.load_states(self._left)
            self._held = Attempt(*self._memory.stamps()[0])
        self._left = None

    def _hold(self, at: Attempt) -> None:
        """Have memory hold the state of the last commit, which is what the optimizer has now.

        Raises:
            WorkerError: it was lost with the process before.
        """
        assert self._memory is not None, "a server needs memory that outlives it"
        held = self._held
        if (held is None and at.number and not self._begins) or (held and held[:2] != at[:2]):
            raise WorkerError(
                f"the optimizer state of server {self._mine} of {len(self._servers)} was lost with "
                "the memory of its host, or its fork server, and no other process has it. Resume "
                "the run: it continues from the newest checkpoint."
            )
        if held is None:
            self._stage(at)
            self._held = at

    def _stage(self, attempt: Attempt) -> None:
        """Copy the optimizer's state into the slot of a commit."""
        assert self._memory is not None
        states = self._mover.states()
        layout = {name: (tuple(state.shape), state.dtype) for name, state in states.items()}
        if layout != self._layout:  # an optimizer makes its state in its first steps
            self._memory.lay_out(layout)
            self._layout = layout
        slot = self._memory.stage(*attempt)
        with torch.no_grad():
            for name, state in states.items():
                slot[name].copy_(state)
        self._memory.staged(*attempt)

    _layout: Mapping[str, tuple[tuple[int, ...], torch.dtype]] | None = None

    def _with_room(self, spare: int) -> list[Bucket]:
        """The buckets, and one for the notes, which goes to all."""
        buckets = lay_out(self._parameters, [self._bucket_bytes], types=self._sums.types)
        room = torch.zeros(spare, dtype=torch.float64)
        return [*buckets, Bucket(room, (), (), room)]

    def begin_step(self, attempt: Attempt) -> None:
        """What the servers move from here on belongs to this commit."""
        self._attempt = attempt

    # ---- gradients

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Move a fresh gradient into its bucket, weighted; send what is full."""
        if gradient.is_sparse:
            raise RecipeError(
                "a parameter has a sparse gradient, which sync.name = 'server_sync' cannot send to "
                "its servers. Use nn.Embedding(..., sparse=False), or all_reduce."
            )
        super().gradient(slot, gradient)

    def _send(self, number: int, bucket: Bucket) -> Work:
        if not bucket.members:
            return self._comm.all_reduce(bucket.flat)
        assert self._shared is not None
        under_way = list[Work]()
        for server, part in enumerate(self._shared.parts):
            for segment in part.segments:
                if segment.bucket != number:
                    continue
                flat = bucket.flat[segment.start : segment.stop]
                if self._mine < 0:
                    under_way.append(self._comm.send(flat, self._servers[server]))
                elif self._mine == server:
                    under_way.append(_Sum(flat, self._comm, self._workers))
        return _All(under_way)

    # ---- the commit

    @torch.no_grad()
    def prepare(self, step: int, scale: float) -> None:
        """Servers move their parts and send them; everybody has then all that is new."""
        shared, comm = self._shared, self._comm
        assert shared is not None
        assert self._agreed, "exchange comes first"
        coming = [
            comm.receive(packed.flat, self._servers[server])
            for server, packed in enumerate(shared.new)
            if server != self._mine and len(packed.flat)
        ]
        gradients = self._gradients(scale) if self._mine >= 0 else {}
        factor = self._tell_all(gradients)
        if self._mine >= 0:
            if factor != 1.0:
                for gradient in gradients.values():
                    gradient.mul_(factor)
            self._moved = True
            self._mover.step(step)
            self._stage(self._attempt)
            own = shared.new[self._mine].flat
            others = [rank for rank in range(comm.size) if rank != comm.rank]
            coming += [comm.send(own, rank) for rank in others if len(own)]
        for work in coming:
            work.wait()

    def _gradients(self, scale: float) -> dict[Piece, Tensor]:
        """Of this server's part, where any worker had one; the optimizer's parameters get them."""
        gradients = {}
        for piece, parameter in self._mover.held.items():
            parameter.grad = None
            if self._agreed[piece.slot]:
                _, whole = self._home[piece.slot]
                agreed = whole.view(-1)[piece.start : piece.stop].view(parameter.shape)
                gradient = laid_out_like(self._sums.gradient(piece.slot, agreed), parameter)
                if scale != 1.0:
                    gradient.mul_(scale)
                parameter.grad = gradients[piece] = gradient
        return gradients

    def _tell_all(self, gradients: Mapping[Piece, Tensor]) -> float:
        """Sum the norm over the servers, and tell all what the sums were like.

        Returns:
            What the gradients are multiplied by, so that their norm is within its limit.
        """
        firsts, blocks = [], 0
        for parameter in self._parameters if self._mover.clips else ():
            firsts.append(blocks)
            blocks += norm.blocks(parameter.numel())
        seen = self._sums.sizes()  # of each parameter; or nothing
        told = torch.zeros(blocks + len(self._servers) * len(seen), dtype=torch.float64)
        for piece, gradient in gradients.items() if blocks else ():
            first = firsts[piece.slot] + piece.start // norm.BLOCK
            own = norm.squares([gradient])
            told[first : first + len(own)] = own
        if self._mine >= 0 and seen:
            at = blocks + self._mine * len(seen)
            told[at : at + len(seen)] = torch.tensor(seen, dtype=torch.float64)
        if len(told):
            self._comm.all_reduce(told).wait()
        self._sizes: list[int] | None = None
        if seen:
            table = told[blocks:].view(len(self._servers), len(seen))
            self._sizes = [int(size) for size in table.amax(0).tolist()]
        return self._mover.limit(told[:blocks]) if blocks else 1.0

    def hand_out(self) -> None:
        """Gradients are with the servers, and have moved what they are for."""

    def apply(self, update: Callable[[], Result]) -> Result:
        """Give the model the parameters that the servers have moved."""
        assert self._shared is not None
        for packed in self._shared.new:
            packed.store()
        result = update()
        self._sums.end_step(self._sizes)
        if self._mine >= 0:
            self._held = self._attempt
        self._moved = False
        self._forget()
        return result

    @torch.no_grad()
    def abandon(self) -> None:
        """Undo what this server has moved."""
        if self._moved:
            assert self._shared is not None
            assert self._memory is not None
            assert self._held is not None
            before = self._memory.at(*self._held)
            assert before is not None, "the slot of the last commit is kept"
            self._mover.load_states(before)
            self._shared.new[self._mine].load()
            self._memory.forget(*self._attempt)
            self._moved = False
        self._sums.abandon()
        self._forget()

    def stop(self) -> None:
        """The optimizer stays where it is."""

    # ---- what this rank alone has

    def own_state(self) -> dict[str, Tensor]:
        """The optimizer's state for this server's part."""
        return {f"optimizer/{name}": state for name, state in self._mover.states().items()}

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Begin from what the optimizer itself has."""
        self._shared, self._held, self._left, self._begins = None, None, None, True

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """What lies in memory is what this server holds."""
        self._left = {name: tensor.clone() for name, tensor in tensors.items()}

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """A worker sends its gradient, once."""
        return Price(parameter_bytes, 1)


class _All:
    """Several messages under way."""

    def __init__(self, works: Sequence[Work]) -> None:
        self._works = works

    def wait(self) -> None:
        """Return when all are over."""
        for work in self._works:
            work.wait()


class _Sum:
    """What all workers send of one segment, on its way here.

    Args:
        into: the segment; gets the sum, in rank order.
        comm: the group.
        workers: ranks.
    """

    def __init__(self, into: Tensor, comm: Comm, workers: Sequence[int]) -> None:
        self._into = into
        self._parts = [into, *(torch.empty_like(into) for _ in workers[1:])]
        self._works = [
            comm.receive(part, rank) for part, rank in zip(self._parts, workers, strict=True)
        ]

    @torch.no_grad()
    def wait(self) -> None:
        """Return when the sum is here."""
        for number, (work, part) in enumerate(zip(self._works, self._parts, strict=True)):
            work.wait()
            if number:
                self._into += part
