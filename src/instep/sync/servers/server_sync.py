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

A server's optimizer state is its own alone. It lies in ordinary memory, moves there before it is
known whether the step happens, and is copied with the parameters of the part into a slot of memory
that outlives the process. A step that does not happen is undone by the other slot.

With `copy` the next server keeps a copy of a server's part: it is sent the summed gradients, and
takes the same steps. Who lacks a part when a generation begins gets it from the other that has it
(`copies.py`).

With a codec each segment of a gradient is encoded, and a worker carries over what is left out
(`pushes.py`). What comes back is encoded too: by how much the parameters of the workers are to move
(`differences.py`). The parameters of the run are those that the workers hold; a server has its own
besides, which only its optimizer moves, as it has state. Vectors (biases, norms) have buckets of
their own, and travel as they are.

Embeddings on servers (`tables.py`) take part in the same steps, and in the same slots.

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
from instep.comm.codecs.base import Codec
from instep.errors import RecipeError, SpecError
from instep.records import BEGINNING, Attempt, Law
from instep.sync import norm
from instep.sync.base import SERVED, InMesh, Memory, Mover, Piece, Price, Result, Servers
from instep.sync.carried_over import CarriedOver
from instep.sync.gathering import Gathering
from instep.sync.reducers.whole_buckets import WholeBuckets
from instep.sync.servers.copies import PARAMETERS, gather_parts, lost, of_part, take_copies
from instep.sync.servers.cuts import Packed, Part, Segment, cut, pieces_of
from instep.sync.servers.differences import Differences
from instep.sync.servers.guess import Guess
from instep.sync.servers.kept_rows import KeptRows
from instep.sync.servers.pushes import Pushes, layout_of
from instep.sync.servers.tables import Tables
from instep.sync.servers.traffic import Traffic
from instep.sync.sums import Sums, Wide, sums_of

_ROWS = "rows/"
"""In memory that outlives a server, before what a step makes of the rows of embeddings."""

_SERVED = "served/"
"""In memory that outlives a server, before its number: with a codec, the parameters of its part as
its optimizer has them, [bytes]."""


class _Shared(NamedTuple):
    """How the parameters are shared out; the same in all generations of a process."""

    parts: list[Part]
    """Of each server."""
    new: dict[int, Packed]
    """By server, its part, moved towards the next commit. A worker has all; a server has its own,
    and that of which it keeps a copy: what its optimizer moves."""
    held: dict[int, Packed]
    """The same as the workers hold it; with a codec a server has it apart from `new`."""
    back: Differences | None
    """With a codec, what goes back to the workers."""


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
        super().__init__(bucket_mb=bucket_mb, overlap=overlap)
        for name, value in (("copy", copy), ("encode_vectors", encode_vectors)):
            if not isinstance(value, bool):
                raise SpecError(f"sync.options.{name} = {value!r}: needs to be true or false.")
        if codec is not None:
            _check(codec, copy=copy)
        self._copy, self.codec, self._encode_vectors = copy, codec, encode_vectors
        self.laws = {"optimizer": Law.MOVE}
        self._carries = codec is not None and bool(Pushes.kinds(codec))
        if codec is not None:
            self.laws |= dict.fromkeys(Pushes.kinds(codec), Law.SUM)
        self._carry = CarriedOver()  # of a worker: what was left out of its gradients
        self._pushes: Pushes | None = None
        self._residuals: WholeBuckets  # how they lie
        self._shared: _Shared | None = None
        self._left: dict[str, Tensor] | None = None  # of the process before, until `start`
        self._held: Attempt | None = None  # under which memory has the state of the last commit
        self._begins = False  # from what the optimizer has
        self._mine = -1  # which server this is; -1 for a worker
        self._moved = False  # whether anything of this server's part has moved in this step
        self._early = False  # whether servers move in this step what has come, before all has
        self._memory: Memory | None = None
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
        if self._pushes is not None and self._carries:
            self._carry.keep(self._residuals, self._comm.rank, self._pushes.carried)
        self._pushes = None
        sums = sums_of(parameters, comm, parts, encoded=self.codec is not None)
        self._gather(parameters, comm, sums, notes)
        self._residuals = self._laid_out(self._buckets, parameters)
        self._servers, self._mover, self._memory = list(servers.ranks), servers.mover, memory
        self._mine = self._servers.index(comm.rank) if comm.rank in self._servers else -1
        if self._copy and len(self._servers) < 2:
            raise SpecError(
                "sync.options.copy = true: another server keeps the copy, so there must be two. "
                "Set sync.servers = 2 or more, or leave it out."
            )
        if self.tables is not None:
            if self._copy:
                raise SpecError(
                    "sync.options.copy = true keeps no copies of embeddings (sparse=True). Leave "
                    "one of the two out."
                )
            if self._left is not None:
                self.tables.load_left(_after(_ROWS, self._left))
            self.tables.start(comm, self._servers, memory, by_unit=parts > 0)
        if self._shared is None:
            self._share_out()
        assert self._shared is not None
        shared = self._shared
        for packed in shared.held.values() if self._mine >= 0 or self.codec is not None else ():
            packed.load()
        self._hold(at)
        slots = None
        if self._carries:
            slots = self._carry_over(memory, at, draining)
        else:
            comm.all_reduce(torch.zeros(1)).wait()  # after it, each knows that all servers hold
        if self.codec is not None and self._mine < 0:
            every = [s for part in shared.parts for s in part.segments if self._codes(s)]
            staged = self._carry.stamp
            self._pushes = Pushes(self.codec, comm, self._residuals, slots, every, staged=staged)
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
        self._moved = self._early = False
        self._guess = Guess()
        mover = self._mover
        self._moves_early = self._overlap and mover.by_element and not mover.clips

    def _carry_over(
        self, memory: Memory | None, at: Attempt, draining: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """A worker begins with what it has left out before; all ranks know when all have got so
        far."""
        comm, works = self._comm, self._mine < 0
        return self._carry.start(
            comm,
            self._residuals if works else None,
            everyone=comm,
            memory=memory if works else None,
            at=at,
            place=[comm.rank],
            draining=draining,
            like=self._nothing_left() if draining else {},
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

    def _encodes(self, bucket: Bucket) -> bool:
        return bool(bucket.members) and self._is_encoded(bucket.views[0])

    def _is_encoded(self, parameter: Tensor) -> bool:
        return self.codec is not None and (self._encode_vectors or parameter.dim() > 1)

    def _codes(self, segment: Segment) -> bool:
        return self._is_encoded(self._parameters[segment.pieces[0].slot])

    def _share_out(self) -> None:
        """Cut the parameters, and the state that the optimizer has for them."""
        mover, count = self._mover, len(self._servers)
        every = cut(self._buckets[:-1], self._parameters, count, by_element=mover.by_element)
        new = {
            server: Packed(part.pieces, self._parameters)
            for server, part in enumerate(every)
            if self._mine < 0 or server in self._kept
        }
        held = new
        if self.codec is not None and self._mine >= 0:
            held = {n: Packed(every[n].pieces, self._parameters) for n in new}
        for packed in new.values():
            packed.load()  # with a codec, what is beyond the parameters is taken up below
        self._shared = _Shared(every, new, held, self._differences(every, held))
        own = [packed.views.items() for packed in new.values()] if self._mine >= 0 else []
        mover.hold({piece: Parameter(view) for views in own for piece, view in views})
        if self._left is not None and self._mine >= 0:
            assert self._memory is not None
            self._take_back(self._left)
            self._held = Attempt(*self._memory.stamps()[0])
        self._left = None

    def _differences(self, parts: Sequence[Part], held: Mapping[int, Packed]) -> Differences | None:
        if self.codec is None:
            return None
        every = ((s, packed) for n, packed in held.items() for s in parts[n].segments)
        return Differences(self.codec, {s: packed for s, packed in every if self._codes(s)})

    def _take_back(self, kept: Mapping[str, Tensor]) -> None:
        """Have the optimizer be where it was when it left this in memory."""
        assert self._shared is not None
        self._mover.load_states(_of_optimizer(kept))
        for server, packed in self._shared.new.items() if self.codec is not None else ():
            packed.flat.copy_(kept[f"{_SERVED}{server}"])

    @property
    def _rows(self) -> KeptRows | None:
        """Of embeddings that this server has."""
        return self.tables.kept if self.tables is not None else None

    @property
    def _kept(self) -> list[int]:
        """The servers whose parts this server has: itself, and the one of which it has a copy."""
        count = len(self._servers)
        return [self._mine, (self._mine - 1) % count] if self._copy else [self._mine]

    def _hold(self, at: Attempt) -> None:
        """Have memory hold the state of the last commit, which is what the optimizer has then.

        Raises:
            WorkerError: it was lost with the process before.
        """
        held = self._held
        lacks = (held is None and at.number and not self._begins) or (held and held[:2] != at[:2])
        if self._copy:
            assert self._shared is not None
            parts, lacking = self._shared.parts, bool(self._mine >= 0 and lacks)
            take_copies(self._comm, self._servers, self._mine, parts, self._mover, lacking)
        elif self._mine >= 0 and lacks:
            raise lost(self._mine, len(self._servers))
        if self._mine >= 0 and (held is None or lacks):
            self._stage(at)
            self._held = at

    def _stage(self, attempt: Attempt) -> None:
        """Copy the optimizer's state, and what it has moved, into the slot of a commit."""
        assert self._memory is not None
        assert self._shared is not None
        states = self._mover.states()
        for server in self._kept:
            states[f"{PARAMETERS}{server}"] = self._shared.held[server].flat
            if self.codec is not None:
                states[f"{_SERVED}{server}"] = self._shared.new[server].flat
        if self._rows is not None:
            states |= {f"{_ROWS}{n}": each for n, each in self._rows.staged().items()}
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
        if self._mine >= 0 and not (self._early and right):
            segments = shared.parts[self._mine].segments
            kept = [segment for server in self._kept for segment in shared.parts[server].segments]
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
        if self._mine >= 0:
            if self._rows is not None:
                self._rows.move(scale * factor)
            self._stage(self._attempt)
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
        assert self._shared is not None
        _, new, held, back = self._shared
        if back is not None:
            for segment in segments:
                if segment in back.payloads:
                    back.encode(segment, new[self._mine], there, self._attempt.number)
                else:
                    held[self._mine].of(segment).copy_(new[self._mine].of(segment))
        self._traffic.give(segments)

    def _move(self, segments: Sequence[Segment], gradients: Mapping[Piece, Tensor]) -> None:
        """Have the optimizer move these segments by the gradients that there are."""
        self._moved = True
        pieces, held = pieces_of(segments), self._mover.held
        for piece in pieces:
            held[piece].grad = gradients.get(piece)
        self._mover.step(self._attempt.number, pieces)
        for piece in pieces:
            held[piece].grad = None

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
        if self._rows is not None:
            squares[blocks + self._mine] = self._rows.square(scale)
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
        back, there = self._shared.back, [seen > 0 for seen in self._agreed]
        if back is not None and self._mine < 0:
            for segment in back.payloads:
                back.take(segment, there)
        for packed in self._shared.held.values():
            packed.store()
        result = update()
        if self._pushes is not None:
            self._pushes.apply()
        self._sums.end_step(self._sizes)
        if self._mine >= 0:
            if self._rows is not None:
                self._rows.apply()
            self._held = self._attempt
            self.whole = len(self._kept) == len(self._servers)
        self._moved = False
        self._forget()
        return result

    @torch.no_grad()
    def abandon(self) -> None:
        """Undo what this server has moved."""
        self._undo()
        if self._rows is not None:
            self._rows.abandon()
        if self._pushes is not None:
            self._pushes.abandon()
        self._traffic.forget()
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
            self._take_back(before)
            for packed in self._shared.held.values():
                packed.load()
            self._memory.forget(*self._attempt)
            self._moved = False

    def stop(self) -> None:
        """The optimizer stays where it is."""

    # ---- what this rank alone has

    def own_state(self) -> dict[str, Tensor]:
        """The optimizer's state for this server's part; of a worker, what it has left out."""
        if self._shared is None or self._mine < 0:
            pushes = self._pushes
            return pushes.own_state() if pushes is not None else dict(self._carry.totals)
        part = self._shared.parts[self._mine]
        states = of_part(part, self._mover.states())
        for piece in pieces_of([segment for segment in part.segments if self._codes(segment)]):
            name = f"{piece.slot}/{SERVED}/{piece.start}:{piece.stop}"
            states[name] = self._shared.new[self._mine].views[piece]
        left = self._nothing_left() if self._carries else {}
        return left | {f"optimizer/{name}": state for name, state in states.items()}

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Begin from what the optimizer itself has."""
        self._carry.load(state)
        self._pushes = None
        self._shared, self._held, self._left, self._begins = None, None, None, True
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
            lacks = self._held
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


def _of_optimizer(kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    beside = (PARAMETERS, _ROWS, _SERVED)
    return {name: tensor for name, tensor in kept.items() if not name.startswith(beside)}


def _after(start: str, kept: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {n.removeprefix(start): each for n, each in kept.items() if n.startswith(start)}


def _check(codec: Codec, *, copy: bool) -> None:
    """Refuse a codec that servers cannot use.

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
