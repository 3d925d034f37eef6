"""Servers hold the optimizer, each for a part of the parameters; workers hold none of it.

As in the parameter server of Li et al. (2014, OSDI), but in lockstep: every step waits for all
workers. Gradients fill buckets as in `all_reduce.py`, whose promises about sums hold here. But a
full bucket is not summed by all: each segment of it goes to the server that has it (`cuts.py`),
which adds up in rank order, moves its part, and sends it to the workers. So all workers
hold the same parameters, and each server those of its part.

A server moves a segment as soon as all workers have sent it, and sends it back while others are
still coming (`traffic.py`): both directions of its link are busy. It guesses then what is known
only when all have told their notes: that the step is like the last one (`guess.py`). Where it was
not, servers undo what they have moved, and move all after the exchange, in `prepare`; as they do
where something has to be known of the whole gradient, such as its norm.

A server's optimizer state is its own alone, and moves before it is known whether the step happens:
`own_part.py` keeps it, and undoes what does not happen.

With `copy` the next server keeps a copy of a server's part: it is sent the summed gradients, and
takes the same steps. Who lacks a part when a generation begins gets it from the other that has it
(`copies.py`).

With a codec each segment of a gradient is encoded, and a worker carries over what is left out
(`pushes.py`). What comes back is encoded too: by how much the parameters of the workers are to move
(`differences.py`). The parameters of the run are those that the workers hold; a server has its own
besides, which only its optimizer moves, as it has state. Vectors (biases, norms) have buckets of
their own, and travel as they are.

Embeddings on servers (`tables.py`) take part in the same steps, and in the same slots.

It knows nothing of how an optimizer works (`generation.Mover`), nor of votes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket, laid_out_like, lay_out
from instep.comm.codecs.base import Codec
from instep.errors import RecipeError, SpecError
from instep.records import BEGINNING, Attempt, Law
from instep.sync import norm
from instep.sync.base import Price, Result
from instep.sync.carried_over import CarriedOver
from instep.sync.gathering import Gathering, check_switch
from instep.sync.generation import Generation, Memory, Mover, Piece
from instep.sync.reducers import Room
from instep.sync.reducers.whole_buckets import WholeBuckets
from instep.sync.servers.copies import gather_parts, lost, take_copies
from instep.sync.servers.cuts import Packed, Part, Segment, cut, pieces_of
from instep.sync.servers.differences import Differences
from instep.sync.servers.guess import Guess
from instep.sync.servers.own_part import OwnPart, rows_of
from instep.sync.servers.pushes import Pushes, check_codec, layout_of
from instep.sync.servers.tables import Tables
from instep.sync.servers.traffic import Traffic
from instep.sync.sums import Sums, Wide, sums_of


class _Shared(NamedTuple):
    """How the parameters are shared out; the same in all generations of a process."""

    parts: list[Part]
    """Of each server."""
    held: dict[int, Packed]
    """By server, its part as the workers hold it, moved towards the next commit. A worker has all;
    a server has its own, and that of which it keeps a copy."""
    back: Differences | None
    """With a codec, what goes back to the workers."""
    own: OwnPart | None
    """Of a server."""


class ServerSync(Gathering):
    """Weighted mean of the gradients of all workers, and an optimizer on servers.

    Args:
        bucket_mb: megabytes at which a bucket is full and starts on its way; few, since a message
            is a segment of it anyway, and nothing is sent before the first one is full.
        overlap: send during the backward pass, and have servers move what is there; off, all is
            sent after the pass, and moved when all is there.
        copy: have the next server keep a copy of each server's part and state.
        encode_vectors: encode also parameters of fewer than two dimensions.
        codec: how gradients, and what comes back, look on the wire; None sends them as they are.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(
        self,
        *,
        bucket_mb: float = 1.0,
        overlap: bool = True,
        copy: bool = False,
        encode_vectors: bool = False,
        codec: Codec | None = None,
    ) -> None:
        super().__init__(
            bucket_mb=bucket_mb, overlap=overlap, codec=codec, encode_vectors=encode_vectors
        )
        check_switch("copy", copy)
        if codec is not None:
            check_codec(codec)
            if copy:
                raise SpecError(
                    "sync.options.copy = true does not go with sync.codec: the server that keeps "
                    "the copy is sent sums as they are. Leave one of the two out."
                )
        self._copy = copy
        self.laws = {"optimizer": Law.MOVE}
        self._carries = codec is not None and bool(Pushes.kinds(codec))
        if codec is not None:
            self.laws |= dict.fromkeys(Pushes.kinds(codec), Law.SUM)
        self._carry = CarriedOver()  # of a worker: what was left out of its gradients
        self._pushes: Pushes | None = None
        self._residuals: WholeBuckets  # how they lie
        self._shared: _Shared | None = None
        self._left: dict[str, Tensor] | None = None  # of the process before, until `start`
        self._begins = False  # from what the optimizer has
        self._mine = -1  # which server this is; -1 for a worker
        self._early = False  # whether servers move in this step what has come, before all has
        self._attempt = BEGINNING
        self._sizes: list[int] | None = None
        self._mover: Mover
        self.tables: Tables | None = None
        """The embeddings that are on servers; to be set before `start`."""
        self.whole = True
        """Whether this rank has all parameters of the last commit; a server has those of its part,
        once it has moved them."""

    @property
    def start_in_doubt(self) -> int:
        """As of `CarriedOver`: nothing else changes hands."""
        return self._carry.start_in_doubt

    def resolve(self, generation: int) -> None:
        """What was handed over counts, or does not, on every rank alike."""
        self._carry.resolve(generation)

    # ---- generations

    def start(self, parameters: Sequence[Parameter], comm: Comm, generation: Generation) -> None:
        """Lay out buckets and parts; a server makes sure that its memory has what it holds."""
        servers, parts, memory = generation.servers, generation.parts, generation.memory
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
        if self._pushes is not None and self._carries:
            self._carry.keep(self._residuals, self._comm.rank, self._pushes.carried)
        self._pushes = None
        sums = sums_of(parameters, comm, parts, encoded=self.codec is not None)
        self._gather(parameters, comm, sums, generation.notes)
        self._residuals = self._laid_out(self._buckets, parameters)
        self._servers, self._mover = list(servers.ranks), servers.mover
        self._mine = self._servers.index(comm.rank) if comm.rank in self._servers else -1
        self._check_copy()
        if self.tables is not None:
            if self._left is not None:
                self.tables.load_left(rows_of(self._left))
            self.tables.start(comm, self._servers, memory, by_unit=parts > 0)
        if self._shared is None:
            self._shared = self._share_out(memory)
        shared = self._shared
        if shared.own is not None:
            assert memory is not None, "a server has memory"
            shared.own.begin(memory, self.tables.kept if self.tables is not None else None)
        for packed in shared.held.values() if self._mine >= 0 or self.codec is not None else ():
            packed.load()
        self._hold(shared, generation.at)
        slots = None
        if self._carries:
            slots = self._carry_over(generation)
        else:
            comm.all_reduce(torch.zeros(1)).wait()  # after it, each knows that all servers hold
        if self.codec is not None and self._mine < 0:
            every = [s for part in shared.parts for s in part.segments if self._codes(s)]
            room = Room(slots=slots, staged=self._carry.stamp)
            self._pushes = Pushes(self.codec, comm, self._residuals, room, every)
        self._traffic = Traffic(
            comm,
            self._servers,
            shared.parts,
            self._buckets,
            shared.held,
            copies=self._copy,
            codec=self.codec,
            back=shared.back,
            pushes=self._pushes,
        )
        self._early = False
        self._guess = Guess()
        mover = self._mover
        self._moves_early = self._overlap and mover.by_element and not mover.clips

    def _check_copy(self) -> None:
        if self._copy and len(self._servers) < 2:
            raise SpecError(
                "sync.options.copy = true: another server keeps the copy, so there must be two. "
                "Set sync.servers = 2 or more, or leave it out."
            )
        if self._copy and self.tables is not None:
            raise SpecError(
                "sync.options.copy = true keeps no copies of embeddings (sparse=True). Leave "
                "one of the two out."
            )

    def _carry_over(self, generation: Generation) -> tuple[Tensor, Tensor]:
        """A worker begins with what it has left out before; all ranks know when all have got so
        far."""
        comm, works = self._comm, self._mine < 0
        return self._carry.start(
            comm,
            self._residuals if works else None,
            everyone=comm,
            memory=generation.memory if works else None,
            at=generation.at,
            place=[comm.rank],
            draining=generation.draining,
            like=self._nothing_left() if generation.draining else {},
            idle=self._servers,
        )

    def _laid_out(self, buckets: Sequence[Bucket], parameters: Sequence[Tensor]) -> WholeBuckets:
        """How a worker's residuals lie."""
        return layout_of([b.members for b in buckets if self._encodes(b)], parameters)

    def _nothing_left(self) -> dict[str, Tensor]:
        """A worker's residuals, where there are none."""
        encoded = [(n, p) for n, p in enumerate(self._parameters) if self._is_encoded(p)]
        return {
            f"residual/{slot}": torch.zeros(p.shape, dtype=torch.float32) for slot, p in encoded
        }

    def _codes(self, segment: Segment) -> bool:
        return self._is_encoded(self._parameters[segment.pieces[0].slot])

    def _share_out(self, memory: Memory | None) -> _Shared:
        """Cut the parameters, and the state that the optimizer has for them."""
        mover, count = self._mover, len(self._servers)
        every = cut(self._buckets[:-1], self._parameters, count, by_element=mover.by_element)
        kept = range(count) if self._mine < 0 else [self._mine]
        if self._mine >= 0 and self._copy:
            kept = [self._mine, (self._mine - 1) % count]
        held = {server: Packed(every[server].pieces, self._parameters) for server in kept}
        back, own = self._differences(every, held), None
        left, self._left = self._left, None
        if self._mine < 0:
            mover.hold({})
        else:
            own = OwnPart(self._mine, held, self._parameters, mover, back)
            if left is not None:
                assert memory is not None, "it has left something there"
                own.take(left)
                own.at = Attempt(*memory.stamps()[0])
        return _Shared(every, held, back, own)

    def _differences(self, parts: Sequence[Part], held: Mapping[int, Packed]) -> Differences | None:
        if self.codec is None:
            return None
        every = ((s, packed) for n, packed in held.items() for s in parts[n].segments)
        return Differences(self.codec, {s: packed for s, packed in every if self._codes(s)})

    def _hold(self, shared: _Shared, at: Attempt) -> None:
        """Have memory hold the state of the last commit, which is what the optimizer has then.

        Raises:
            WorkerError: it was lost with the process before.
        """
        own, lacks, has = shared.own, False, None
        if own is not None:
            has = own.at
            lacks = bool(at.number) and not self._begins if has is None else has[:2] != at[:2]
        if self._copy:
            take_copies(self._comm, self._servers, self._mine, shared.parts, self._mover, lacks)
        elif lacks:
            raise lost(self._mine, len(self._servers))
        if own is not None and (has is None or lacks):
            own.stage(at)
            own.at = at

    @property
    def _own(self) -> OwnPart | None:
        """What this server has; None on a worker, and before a generation has begun."""
        return self._shared.own if self._shared is not None else None

    def _with_room(self, spare: int) -> list[Bucket]:
        """The buckets, and one for the notes, which goes to all."""
        buckets = self._cut(self._parameters, self._sums)
        room = torch.zeros(spare, dtype=torch.float64)
        return [*buckets, Bucket(room, (), (), room)]

    def _cut(self, parameters: Sequence[Tensor], sums: Sums) -> list[Bucket]:
        """With a codec, the buckets of those that are not encoded are the last."""
        plain = [slot for slot, p in enumerate(parameters) if not self._is_encoded(p)]
        last = plain if self.codec is not None else ()
        return lay_out(parameters, [self._bucket_bytes], types=sums.types, last=last)

    def begin_step(self, attempt: Attempt) -> None:
        """What the servers move from here on belongs to this commit."""
        self._attempt = attempt
        self._carry.begin_step(attempt)
        self._early = self._moves_early and self._guess.counts(attempt.number)
        if self.tables is not None:
            self.tables.begin_step()

    # ---- gradients

    def begin_pass(self, weight: float, *, last: bool, unit: int = 0) -> None:
        """As in `Gathering`; embeddings ask for no row once buckets leave."""
        if self.tables is not None:
            self.tables.begin_pass(weight, unit)
            if last:
                self.tables.close()
        super().begin_pass(weight, last=last, unit=unit)

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Move a fresh gradient into its bucket, weighted; send what is full."""
        if gradient.is_sparse:
            raise RecipeError(
                "a parameter has a sparse gradient, which sync.name = 'server_sync' cannot send to "
                "its servers: those of layers nn.Embedding and nn.EmbeddingBag with sparse=True it "
                "can. Use one of them, sparse=False, or all_reduce."
            )
        super().gradient(slot, gradient)

    def _send(self, number: int, bucket: Bucket) -> Work:
        if not bucket.members:
            return self._comm.all_reduce(bucket.flat)
        key = self._attempt.number
        return self._traffic.send(number, bucket.flat, pull=self._early, key=key)

    def _finish(self) -> None:
        """Servers add up what the workers send, and move what is complete, if they may."""
        for segment in self._traffic.summed() if self._mine >= 0 else ():
            if self._early:
                self._move_early(segment)
                self._give([segment], self._guess.there)
        for segment in self._traffic.followed() if self._mine >= 0 and self._copy else ():
            if self._early:
                self._move_early(segment)
        super()._finish()
        self._traffic.wait()

    def _move_early(self, segment: Segment) -> None:
        gradients = self._gradients([segment], self._guess.there, self._guess.scale)
        self._move([segment], gradients)

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor | None:
        """All that the workers have to send; where servers moved it at once, all that is new."""
        if self.tables is not None:
            self.tables.close()
        agreed = super().exchange(notes)
        if agreed is None:
            self._undo()
        elif self.tables is not None:
            self.tables.exchange()
        return agreed

    def _undo(self) -> None:
        if self._own is not None:
            self._own.undo(self._attempt)

    # ---- the commit

    @torch.no_grad()
    def prepare(self, step: int, scale: float) -> float:
        """If that has not been done yet: servers move their parts, and send them to the workers."""
        shared = self._shared
        assert shared is not None
        assert self._agreed, "exchange comes first"
        there = [seen > 0 for seen in self._agreed]
        known = there if self._sums.finite() else []
        right = self._guess.compare(self._attempt.number, known, scale, used=self._early)
        factor = 1.0
        if self._early and not right:
            self._undo()
            self._sums.take_back()
        if shared.own is not None and not (self._early and right):
            segments = shared.parts[self._mine].segments
            kept = [segment for server in shared.held for segment in shared.parts[server].segments]
            gradients = self._gradients(kept, there, scale)
            own = {p: gradients[p] for p in pieces_of(segments) if p in gradients}
            factor = self._limit(own, scale)
            if factor != 1.0:
                for gradient in gradients.values():
                    gradient.mul_(factor)
            self._move(kept, gradients)
            self._give(segments, there)
        elif not (self._early and right):
            for server, part in enumerate(shared.parts):
                for segment in part.segments:
                    self._traffic.pull(server, segment)
            self._limit({}, scale)
        if shared.own is not None:
            if shared.own.rows is not None:
                shared.own.rows.move(scale * factor)
            shared.own.stage(self._attempt)
        elif self._pushes is not None:
            self._pushes.finish([slot for slot, used in enumerate(there) if not used])
        self._traffic.wait()
        self._tell_sizes()
        return scale

    def _gradients(
        self, segments: Sequence[Segment], there: Sequence[bool], scale: float
    ) -> dict[Piece, Tensor]:
        """Of segments of this server, for the parameters that have one."""
        gradients = {}
        for piece in pieces_of(segments):
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

    def _give(self, segments: Sequence[Segment], there: Sequence[bool]) -> None:
        """Send what is new of segments of this server to the workers."""
        assert self._own is not None, "a server gives"
        self._own.give(self._attempt.number, segments, there)
        self._traffic.give(segments)

    def _move(self, segments: Sequence[Segment], gradients: Mapping[Piece, Tensor]) -> None:
        """Have the optimizer move these segments by the gradients that there are."""
        assert self._own is not None, "a server moves"
        self._own.move(self._attempt.number, pieces_of(segments), gradients)

    def _limit(self, gradients: Mapping[Piece, Tensor], scale: float) -> float:
        """What gradients are multiplied by, so that the norm of all is within its limit; all ranks
        call it, servers with those of their parts. Those of embeddings are still to be scaled."""
        firsts, blocks = [], 0
        for parameter in self._parameters if self._mover.clips else ():
            firsts.append(blocks)
            blocks += norm.blocks(parameter.numel())
        if not blocks:
            return 1.0
        squares = torch.zeros(blocks + len(self._servers), dtype=torch.float64)
        if self._own is not None and self._own.rows is not None:
            squares[blocks + self._mine] = self._own.rows.square(scale)
        for piece, gradient in gradients.items():
            first = firsts[piece.slot] + piece.start // norm.BLOCK
            own = norm.squares([gradient])
            squares[first : first + len(own)] = own
        self._comm.all_reduce(squares).wait()
        return self._mover.limit(squares)

    def _tell_sizes(self) -> None:
        """Tell all what the sums were like; it returns once every server has staged its part.

        Else a server could be gone that had not, when all others have voted: for them the
        step happens, if none of them can know.
        """
        seen = self._sums.sizes()  # of each parameter; or nothing
        told = torch.zeros(len(self._servers), max(1, len(seen)), dtype=torch.float64)
        if self._mine >= 0 and seen:
            told[self._mine] = torch.tensor(seen, dtype=torch.float64)
        self._comm.all_reduce(told).wait()
        self._sizes = [int(size) for size in told.amax(0).tolist()] if seen else None

    def hand_out(self) -> None:
        """Gradients are with the servers, and have moved what they are for."""

    def apply(self, update: Callable[[], Result]) -> Result:
        """Give the model the parameters that the servers have moved."""
        assert self._shared is not None
        _, held, back, own = self._shared
        there = [seen > 0 for seen in self._agreed]
        for segment in back.payloads if back is not None and own is None else ():
            assert back is not None
            back.take(segment, there)
        for packed in held.values():
            packed.store()
        result = update()
        if self._pushes is not None:
            self._pushes.apply()
        self._sums.end_step(self._sizes)
        if own is not None:
            own.apply(self._attempt)
            self.whole = len(held) == len(self._servers)
        self._forget()
        return result

    @torch.no_grad()
    def abandon(self) -> None:
        """Undo what this server has moved."""
        if self._own is not None:
            self._own.abandon(self._attempt)
        if self._pushes is not None:
            self._pushes.abandon()
        self._traffic.forget()
        self._sums.abandon()
        self._forget()

    def stop(self) -> None:
        """The optimizer stays where it is."""

    # ---- what this rank alone has

    def own_state(self) -> dict[str, Tensor]:
        """The optimizer's state for this server's part; of a worker, what it has left out."""
        if self._shared is None or self._shared.own is None:
            pushes = self._pushes
            return pushes.own_state() if pushes is not None else dict(self._carry.totals)
        left = self._nothing_left() if self._carries else {}
        return left | self._shared.own.states(self._shared.parts[self._mine])

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Begin from what the optimizer itself has."""
        self._carry.load(state)
        self._pushes = None
        self._shared, self._left, self._begins = None, None, True
        self.whole = True

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """What lies in memory is what this server holds, or what this worker has left out."""
        if "residual" not in tensors:
            self._left = {name: tensor.clone() for name, tensor in tensors.items()}
            return
        layout = self._laid_out(self._cut(parameters, Wide(parameters)), parameters)
        if len(tensors["residual"]) == layout.room(0):
            self._carry.keep(layout, 0, tensors["residual"])

    @torch.no_grad()
    def make_whole(
        self, comm: Comm, root: int, servers: Sequence[int], memory: Memory | None
    ) -> None:
        """Give this server the parts of the others, if it is `root` and lacks them."""
        lacks = None
        if comm.rank == root and not self.whole:
            lacks = self._own.at if self._own is not None else None
            assert lacks is not None, "it has been part of a commit"
        gather_parts(comm, root, servers, memory, lacks, self._room)
        self.whole = self.whole or comm.rank == root

    def _room(self, server: int) -> Packed:
        assert self._shared is not None, "a generation has begun"
        return Packed(self._shared.parts[server].pieces, self._parameters)

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """A worker sends its gradient, once."""
        return Price(parameter_bytes, 1)
