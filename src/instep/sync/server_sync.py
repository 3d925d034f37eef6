"""Servers hold the optimizer, each for a part of the parameters; workers hold none of it.

As in the parameter server of Li et al. (2014, OSDI), but in lockstep: every step waits for all
workers. Gradients fill buckets as in `all_reduce.py`, whose promises about sums hold here. But a
full bucket is not summed by all: each segment of it goes to the server that has it (`cuts.py`),
which adds up in rank order, moves its part, and sends it to the workers. So all workers
hold the same parameters, and each server those of its part.

A server moves a segment as soon as all workers have sent it, and sends it back while others are
still coming: both directions of its link are busy. It guesses then what is known only when
all have told their notes: that the step is like the last one (`_Guess`). Where it was not, servers
undo what they have moved, and move all after the exchange, in `prepare`; as they do where
something has to be known of the whole gradient, such as its norm.

A server's optimizer state is its own alone. It lies in ordinary memory, moves there before it is
known whether the step happens, and is copied with the parameters of the part into a slot of memory
that outlives the process. A step that does not happen is undone by the other slot.

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
from instep.sync.arriving import summed
from instep.sync.base import InMesh, Memory, Mover, Piece, Price, Result, Servers
from instep.sync.cuts import Packed, Part, Segment, cut
from instep.sync.gathering import Gathering
from instep.sync.sums import Exact, Plain

_PARAMETERS = "parameters"
"""In memory that outlives a server: the part that it has moved, [bytes]."""


class _Shared(NamedTuple):
    """How the parameters are shared out; the same in all generations of a process."""

    parts: list[Part]
    """Of each server."""
    new: dict[int, Packed]
    """By server, its part, moved towards the next commit. A worker has all; a server has its own,
    which is what its optimizer moves."""


class ServerSync(Gathering):
    """Weighted mean of the gradients of all workers, and an optimizer on servers.

    Args:
        bucket_mb: megabytes at which a bucket is full and starts on its way.
        overlap: send during the backward pass, and have servers move what is there; off, all is
            sent after the pass, and moved when all is there.

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
        self._moved = False  # whether anything of this server's part has moved in this step
        self._early = False  # whether servers move in this step what has come, before all has
        self._under_way: list[Work] = []  # new parameters
        self._memory: Memory | None = None
        self._attempt = BEGINNING
        self._mover: Mover
        self.whole = True
        """Whether this rank has all parameters of the last commit; a server has those of its part,
        once it has moved them."""

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
        self._segments: list[list[tuple[int, Segment]]] = [[] for _ in self._buckets]
        for server, part in enumerate(self._shared.parts):
            for segment in part.segments:
                self._segments[segment.bucket].append((server, segment))
        if self._mine >= 0:
            self._shared.new[self._mine].load()
            self._hold(at)
        comm.all_reduce(torch.zeros(1)).wait()  # after it, each knows that all servers hold
        self._moved = self._early = False
        self._under_way = []
        self._guess = _Guess()
        mover = self._mover
        self._moves_early = self._overlap and mover.by_element and not mover.clips

    def _share_out(self) -> None:
        """Cut the parameters, and the state that the optimizer has for them."""
        mover, count = self._mover, len(self._servers)
        every = cut(self._buckets[:-1], self._parameters, count, by_element=mover.by_element)
        new = {
            server: Packed(part.pieces, self._parameters)
            for server, part in enumerate(every)
            if self._mine in (server, -1)
        }
        self._shared = _Shared(every, new)
        own = new[self._mine].views if self._mine >= 0 else {}
        mover.hold({piece: Parameter(view) for piece, view in own.items()})
        if self._left is not None and self._mine >= 0:
            assert self._memory is not None
            mover.load_states(_of_optimizer(self._left))
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
            raise _lost(self._mine, len(self._servers))
        if held is None:
            self._stage(at)
            self._held = at

    def _stage(self, attempt: Attempt) -> None:
        """Copy the optimizer's state, and what it has moved, into the slot of a commit."""
        assert self._memory is not None
        assert self._shared is not None
        states = self._mover.states() | {_PARAMETERS: self._shared.new[self._mine].flat}
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
        self._early = self._moves_early and self._guess.counts(attempt.number)

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
        under_way = list[Work]()
        for server, segment in self._segments[number] if self._mine < 0 else ():
            flat = bucket.flat[segment.start : segment.stop]
            under_way.append(self._comm.send(flat, self._servers[server]))
            if self._early:
                self._pull(server, segment)
        return _All(under_way)

    def _pull(self, server: int, segment: Segment) -> None:
        """Have the new parameters of a segment come to this worker."""
        assert self._shared is not None
        into = self._shared.new[server].of(segment)
        self._under_way.append(self._comm.receive(into, self._servers[server]))

    def _finish(self) -> None:
        """Servers add up what the workers send, and move what is complete, if they may."""
        if self._mine >= 0:
            assert self._shared is not None
            segments = self._shared.parts[self._mine].segments
            places = [self._buckets[s.bucket].flat[s.start : s.stop] for s in segments]
            arrived = summed(self._comm, self._workers, places)
            for segment, _ in zip(segments, arrived, strict=True):
                if self._early:
                    guess = self._guess
                    self._move([segment], self._gradients([segment], guess.there, guess.scale))
                    self._give([segment])
        super()._finish()
        self._await_new()

    def _await_new(self) -> None:
        works, self._under_way = self._under_way, []
        for work in works:
            work.wait()

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor | None:
        """All that the workers have to send; where servers moved it at once, all that is new."""
        agreed = super().exchange(notes)
        if agreed is None:
            self._undo()
        return agreed

    # ---- the commit

    @torch.no_grad()
    def prepare(self, step: int, scale: float) -> None:
        """If that has not been done yet: servers move their parts, and send them to the workers."""
        shared = self._shared
        assert shared is not None
        assert self._agreed, "exchange comes first"
        there = [seen > 0 for seen in self._agreed]
        known = there if self._sums.finite() else []
        right = self._guess.compare(self._attempt.number, known, scale, used=self._early)
        if self._early and not right:
            self._undo()
            self._sums.take_back()
        if self._early and right:
            self._tell_all({})
        elif self._mine >= 0:
            segments = shared.parts[self._mine].segments
            gradients = self._gradients(segments, there, scale)
            factor = self._tell_all(gradients)
            if factor != 1.0:
                for gradient in gradients.values():
                    gradient.mul_(factor)
            self._move(segments, gradients)
            self._give(segments)
        else:
            for server, part in enumerate(shared.parts):
                for segment in part.segments:
                    self._pull(server, segment)
            self._tell_all({})
        if self._mine >= 0:
            self._stage(self._attempt)
        self._await_new()

    def _gradients(
        self, segments: Sequence[Segment], there: Sequence[bool], scale: float
    ) -> dict[Piece, Tensor]:
        """Of segments of this server, for the parameters that have one."""
        gradients = {}
        for piece in _pieces(segments):
            if not there[piece.slot]:
                continue
            parameter = self._mover.held[piece]
            _, whole = self._home[piece.slot]
            agreed = whole.view(-1)[piece.start : piece.stop].view(parameter.shape)
            if not self._agreed:  # a guess: the sum may be needed once more
                agreed = agreed.clone()
            gradient = laid_out_like(self._sums.gradient(piece.slot, agreed), parameter)
            gradients[piece] = gradient.mul_(scale) if scale != 1.0 else gradient
        return gradients

    def _move(self, segments: Sequence[Segment], gradients: Mapping[Piece, Tensor]) -> None:
        """Have the optimizer move these segments by the gradients that there are."""
        self._moved = True
        pieces, held = _pieces(segments), self._mover.held
        for piece in pieces:
            held[piece].grad = gradients.get(piece)
        self._mover.step(self._attempt.number, pieces)
        for piece in pieces:
            held[piece].grad = None

    def _give(self, segments: Sequence[Segment]) -> None:
        """Send what has moved of this server's part to the workers."""
        assert self._shared is not None
        own = self._shared.new[self._mine]
        self._under_way += [
            self._comm.send(own.of(segment), rank) for segment in segments for rank in self._workers
        ]

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
        for packed in self._shared.new.values():
            packed.store()
        result = update()
        self._sums.end_step(self._sizes)
        if self._mine >= 0:
            self._held, self.whole = self._attempt, len(self._servers) == 1
        self._moved = False
        self._forget()
        return result

    @torch.no_grad()
    def abandon(self) -> None:
        """Undo what this server has moved."""
        self._undo()
        self._under_way = []
        self._sums.abandon()
        self._forget()

    def _undo(self) -> None:
        """This server's part, and the optimizer's state for it, are those of the last commit."""
        if self._moved:
            assert self._shared is not None
            assert self._memory is not None
            assert self._held is not None
            before = self._memory.at(*self._held)
            assert before is not None, "the slot of the last commit is kept"
            self._mover.load_states(_of_optimizer(before))
            self._shared.new[self._mine].load()
            self._memory.forget(*self._attempt)
            self._moved = False

    def stop(self) -> None:
        """The optimizer stays where it is."""

    # ---- what this rank alone has

    def own_state(self) -> dict[str, Tensor]:
        """The optimizer's state for this server's part."""
        return {f"optimizer/{name}": state for name, state in self._mover.states().items()}

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Begin from what the optimizer itself has."""
        self._shared, self._held, self._left, self._begins = None, None, None, True
        self.whole = True

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """What lies in memory is what this server holds."""
        self._left = {name: tensor.clone() for name, tensor in tensors.items()}

    @torch.no_grad()
    def make_whole(
        self, comm: Comm, root: int, servers: Sequence[int], memory: Memory | None
    ) -> None:
        """Give this server the parts of the others, if it is `root` and lacks them."""
        wanted = torch.tensor([0, *BEGINNING])
        if comm.rank == root and not self.whole:
            assert self._held is not None, "it has been part of a commit"
            wanted = torch.tensor([1, *self._held])
        comm.broadcast(wanted, root)
        lacks, *commit = wanted.tolist()
        for server, rank in enumerate(servers) if lacks else ():
            if comm.rank == root != rank:
                assert self._shared is not None
                packed = Packed(self._shared.parts[server].pieces, self._parameters)
                if len(packed.flat):
                    comm.receive(packed.flat, rank).wait()
                    packed.store()
            elif comm.rank == rank != root:
                left = memory.at(*commit) if memory is not None else None
                if left is None:
                    raise _lost(server, len(servers))
                if len(left[_PARAMETERS]):
                    comm.send(left[_PARAMETERS], root).wait()
        self.whole = self.whole or comm.rank == root

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


class _Guess:
    """That a step is like the one before it, as far as it matters to who moves parameters early.

    The same parameters have a gradient, it is finite, and it needs the same scale. After a wrong
    guess twice as many steps as the last time have none: moving in vain costs time.
    """

    def __init__(self) -> None:
        self.there: Sequence[bool] = ()
        """Which parameters have a gradient; empty where nothing is guessed."""
        self.scale = 1.0
        self._wrong = 0
        self._next = 0

    def counts(self, step: int) -> bool:
        """Whether there is a guess for a step."""
        return bool(self.there) and step >= self._next

    def compare(self, step: int, there: Sequence[bool], scale: float, *, used: bool) -> bool:
        """Whether the guess was right; the next one is that all is as in this step.

        Args:
            step: its number.
            there: as it was; empty where it is not to be guessed from.
            scale: as it was.
            used: whether parameters were moved by the guess.
        """
        right = bool(there) and (there, scale) == (self.there, self.scale)
        if used and not right:
            self._wrong += 1
            self._next = step + 2**self._wrong
        self.there, self.scale = there, scale
        return right


def _pieces(segments: Sequence[Segment]) -> list[Piece]:
    return [piece for segment in segments for piece in segment.pieces]


def _of_optimizer(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in kept.items() if name != _PARAMETERS}


def _lost(server: int, servers: int) -> WorkerError:
    return WorkerError(
        f"the optimizer state of server {server} of {servers} was lost with the memory of its "
        "host, or its fork server, and no other process has it. Resume the run: it continues from "
        "the newest checkpoint."
    )
