"""Servers hold the optimizer, each for a part of the parameters; workers hold none of it.

As in the parameter server of Li et al. (2014, OSDI), but in lockstep: every step waits for all
workers. Gradients fill buckets as in `all_reduce.py`, whose promises about sums hold here. But a
full bucket is not summed by all: each segment of it goes to the server that has it (`cuts.py`),
which adds up in rank order, moves its part, and sends it to the workers. So all workers
hold the same parameters, and each server those of its part.

A server moves a segment as soon as all workers have sent it, and sends it back while others are
still coming (`moves.py`): both directions of its link are busy (`traffic.py`). It undoes what it
moved by a wrong guess, and moves all in `prepare`. Its optimizer's state is its own alone, and
moves before it is known whether the step happens (`own_part.py`).

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

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket, lay_out
from instep.comm.codecs.base import Codec
from instep.errors import RecipeError
from instep.records import Attempt, Law
from instep.sync.base import Price, Result
from instep.sync.carried_over import CarriedOver
from instep.sync.gathering import Gathering, check_switch
from instep.sync.generation import Generation, Memory
from instep.sync.reducers import Room
from instep.sync.reducers.whole_buckets import WholeBuckets
from instep.sync.servers.copies import gather_parts
from instep.sync.servers.moves import PartMoves
from instep.sync.servers.own_part import OwnPart, rows_of
from instep.sync.servers.pushes import Pushes, check_codec, layout_of, nothing_left
from instep.sync.servers.shared_parts import SharedParts, checked
from instep.sync.servers.tables import Tables
from instep.sync.servers.traffic import ServerTraffic
from instep.sync.sums import Sums, Wide, sums_of


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
            check_codec(codec, copy=copy)
        self._copy = copy
        self.laws = {"optimizer": Law.MOVE}
        self._carries = codec is not None and bool(Pushes.kinds(codec))
        if codec is not None:
            self.laws |= dict.fromkeys(Pushes.kinds(codec), Law.SUM)
        self._carry = CarriedOver()  # of a worker: what was left out of its gradients
        self._pushes: Pushes | None = None
        self._residuals: WholeBuckets  # how they lie
        self._shared: SharedParts | None = None
        self._left: dict[str, Tensor] | None = None  # of the process before, until `start`
        self._begins = False  # from what the optimizer has
        self._mine = -1  # which server this is; -1 for a worker
        self._sizes: list[int] | None = None
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
        parts, memory, device = generation.parts, generation.memory, parameters[0].device
        tables = self.tables is not None
        servers = checked(generation.servers, comm, device, copy=self._copy, tables=tables)
        if self._pushes is not None and self._carries:
            self._carry.keep(self._residuals, self._comm.rank, self._pushes.carried)
        self._pushes = None
        sums = sums_of(parameters, comm, parts, encoded=self.codec is not None)
        self._gather(parameters, comm, sums, generation.notes)
        self._residuals = self._laid_out(self._buckets, parameters)
        self._servers = list(servers.ranks)
        self._mine = self._servers.index(comm.rank) if comm.rank in self._servers else -1
        if self.tables is not None:
            if self._left is not None:
                self.tables.load_left(rows_of(self._left))
            self.tables.start(comm, self._servers, memory, by_unit=parts > 0)
        if self._shared is None:
            self._shared = SharedParts(
                self._buckets[:-1],
                self._parameters,
                servers.mover,
                servers=len(self._servers),
                mine=self._mine,
                copy=self._copy,
                codec=self.codec,
                encoded=self._is_encoded,
            )
            self._shared.take(self._left, memory)
            self._left = None
        shared = self._shared
        shared.begin(memory, self.tables.kept if self.tables is not None else None)
        shared.hold(comm, self._servers, generation.at, begins=self._begins)
        slots = None
        if self._carries:
            slots = self._carry_over(generation)
        else:
            comm.all_reduce(torch.zeros(1)).wait()  # after it, each knows that all servers hold
        if self.codec is not None and self._mine < 0:
            room = Room(slots=slots, staged=self._carry.stamp)
            self._pushes = Pushes(self.codec, comm, self._residuals, room, shared.encoded)
        self._traffic = ServerTraffic(comm, self._servers, shared, self._buckets, self._pushes)
        places = {slot: view for slot, (_, view) in self._home.items()}
        self._moves = PartMoves(
            comm, self._servers, shared, self._traffic, self._sums, places, early=self._overlap
        )

    def _carry_over(self, generation: Generation) -> tuple[Tensor, Tensor]:
        """A worker begins with what it has left out; all ranks know when all have got so far."""
        comm, works = self._comm, self._mine < 0
        return self._carry.start(
            comm,
            self._residuals if works else None,
            everyone=comm,
            memory=generation.memory if works else None,
            at=generation.at,
            place=[comm.rank],
            draining=generation.draining,
            like=nothing_left(self._parameters, self._is_encoded) if generation.draining else {},
            idle=self._servers,
        )

    def _laid_out(self, buckets: Sequence[Bucket], parameters: Sequence[Tensor]) -> WholeBuckets:
        """How a worker's residuals lie."""
        return layout_of([b.members for b in buckets if self._encodes(b)], parameters)

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
        self._carry.begin_step(attempt)
        self._moves.begin_step(attempt)
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
        moves = self._moves
        return self._traffic.send(number, bucket.flat, pull=moves.early, key=moves.attempt.number)

    def _finish(self) -> None:
        """Servers add up what the workers send, and move what is complete, if they may."""
        for segment in self._traffic.summed() if self._mine >= 0 else ():
            self._moves.move_early(segment, give=True)
        for segment in self._traffic.followed() if self._mine >= 0 and self._copy else ():
            self._moves.move_early(segment, give=False)
        super()._finish()
        self._traffic.wait()

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor | None:
        """All that the workers have to send; where servers moved it at once, all that is new."""
        if self.tables is not None:
            self.tables.close()
        agreed = super().exchange(notes)
        if agreed is None:
            self._moves.undo()
        elif self.tables is not None:
            self.tables.exchange()
        return agreed

    # ---- the commit

    @torch.no_grad()
    def prepare(self, step: int, scale: float) -> float:
        """If that has not been done yet: servers move their parts, and send them to the workers."""
        assert self._agreed, "exchange comes first"
        there = [seen > 0 for seen in self._agreed]
        self._moves.settle(there, scale)
        if self._pushes is not None:
            self._pushes.finish([slot for slot, used in enumerate(there) if not used])
        self._traffic.wait()
        self._sizes = self._moves.tell_sizes()
        return scale

    def hand_out(self) -> None:
        """Gradients are with the servers, and have moved what they are for."""

    def apply(self, update: Callable[[], Result]) -> Result:
        """Give the model the parameters that the servers have moved."""
        assert self._shared is not None
        own = self._shared.own
        self._shared.store([seen > 0 for seen in self._agreed])
        result = update()
        if self._pushes is not None:
            self._pushes.apply()
        self._sums.end_step(self._sizes)
        if own is not None:
            own.apply(self._moves.attempt)
            self.whole = self._shared.whole
        self._forget()
        return result

    @torch.no_grad()
    def abandon(self) -> None:
        """Undo what this server has moved."""
        if self._own is not None:
            self._own.abandon(self._moves.attempt)
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
        left = nothing_left(self._parameters, self._is_encoded) if self._carries else {}
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
        room = self._shared.room if self._shared is not None else None
        gather_parts(comm, root, servers, memory, lacks, room)
        self.whole = self.whole or comm.rank == root

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """A worker sends its gradient, once."""
        return Price(parameter_bytes, 1)
