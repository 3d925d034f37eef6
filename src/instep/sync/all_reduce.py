"""Average gradients every step: replicas never differ, and equal one big batch.

Gradients are gathered in flat buckets (Li et al. 2020, arXiv:2006.15704). A
bucket is summed over the ranks as soon as its gradients are there, in the
background, while the backward pass continues with earlier layers. Weights are
applied as a gradient enters its bucket, so the sum is the mean over the true
number of samples, whatever each rank's share. How it is summed, to rounding
or to the bit, is the business of `sums.py`.

Two things ride in the spare end of the last bucket and cost no message of
their own: the caller's notes, and which parameters had a gradient at all. A
parameter that no rank used keeps no gradient, as on one process.

With a codec a reducer sums the buckets (`reducers.py`). Vectors (biases, norms) have buckets
of their own, which are summed as they are and have the notes. What the codec drops is this
rank's alone to carry over, so it lies in memory that outlives the process.
`delayed.py` has a reducer without a codec.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket, laid_out_like, lay_out
from instep.comm.codecs.base import Codec
from instep.records import BEGINNING, Attempt, Law
from instep.sync.base import Price, Result
from instep.sync.carried_over import CarriedOver
from instep.sync.gathering import Gathering, sparse_of
from instep.sync.generation import Generation
from instep.sync.reducers import Layout, Place, Reducer, Reduction, Room, reduction_of
from instep.sync.sparse_rows import with_rows
from instep.sync.sums import Exact, Plain, Sums, Wide, sums_of


class AllReduce(Gathering):
    """Weighted mean of the gradients of all replicas, every step.

    Args:
        bucket_mb: megabytes at which a bucket is full and starts on its way.
        overlap: send during the backward pass; off, all is sent after it.
        encode_vectors: encode also parameters of fewer than two dimensions.
        codec: how buckets look on the wire; None sends them as they are.
        reduction: sums buckets; that of the codec, if it is left out.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(
        self,
        *,
        bucket_mb: float = 8.0,
        overlap: bool = True,
        encode_vectors: bool = False,
        codec: Codec | None = None,
        reduction: Reduction | None = None,
    ) -> None:
        super().__init__(
            bucket_mb=bucket_mb, overlap=overlap, codec=codec, encode_vectors=encode_vectors
        )
        self._reducer: Reducer | None = None
        self._reduction = reduction_of(codec) if codec is not None else reduction
        kinds = self._reduction.kinds if self._reduction is not None else ()
        self.laws: Mapping[str, Law] = dict.fromkeys(kinds, Law.SUM)
        self._encode_vectors |= "momentum" in self.laws  # which they need too
        self._holders: Sequence[tuple[int, ...]] = ()
        self._carry = CarriedOver()  # what was dropped before
        self._attempt = BEGINNING

    def start(self, parameters: Sequence[Parameter], comm: Comm, generation: Generation) -> None:
        """Lay out the buckets."""
        self._keep()
        shared = self.state()
        notes, parts, mesh = generation.notes, generation.parts, generation.mesh
        self._holders = mesh.holders if mesh is not None else ()
        self._gather(parameters, comm, self._make_sums(parameters, comm, parts), notes)
        if self._reduction is not None:
            self._loaded = shared
            layout, room = self._carry_over(generation)
            self._reducer = self._reduction.make(comm, layout, room)
            self._reducer.load_state(shared)
            self._loaded = None

    def _make_sums(self, parameters: Sequence[Parameter], comm: Comm, parts: int) -> Sums:
        """How gradients are added."""
        return sums_of(parameters, comm, parts, encoded=self.codec is not None)

    def _keep(self) -> None:
        """What the group of before has dropped is carried over."""
        if self._reducer is not None:
            if self.laws:
                self._carry.keep(self._layout, self._comm.rank, self._reducer.carried)
            self._loaded, self._reducer = self.state(), None

    def _carry_over(self, generation: Generation) -> tuple[Layout, Room]:
        """Lay out what is carried over, beginning with what was carried before."""
        draining = generation.draining
        comm, device, types = self._comm, self._buckets[0].flat.device, self._sums.types
        layout = self._laid_out(self._buckets, self._parameters, comm.size, draining)
        if not self.laws:
            return layout, Room(device)
        encoded = [(n, p) for n, p in enumerate(self._parameters) if self._is_encoded(p)]
        self._layout = layout
        slots = self._carry.start(
            comm,
            layout,
            everyone=generation.everyone(comm),
            # a GPU's own is lost with the process
            memory=generation.memory if device.type == "cpu" else None,
            at=generation.at,
            place=[comm.rank, comm.size, int(self._sums.flags > 0), *draining],
            draining=draining,
            like={
                f"{kind}/{slot}": torch.empty_like(p, dtype=types.get(p.dtype, p.dtype))
                for kind, (slot, p) in product(self.laws, encoded if draining else ())
            },
            device=device,
        )
        return layout, Room(device, slots, self._carry.stamp)

    @property
    def start_in_doubt(self) -> int:
        """The generation whose start this rank is in doubt about; else -1."""
        return self._carry.start_in_doubt

    def resolve(self, generation: int) -> None:
        """What was handed over counts, or does not, on every rank alike."""
        self._carry.resolve(generation)

    def begin_step(self, attempt: Attempt) -> None:
        """What is dropped from here on belongs to this commit."""
        self._attempt = attempt
        self._carry.begin_step(attempt)

    def exchange(self, notes: Tensor) -> Tensor | None:
        """As in `Gathering`, and which rows sparse gradients have."""
        agreed = super().exchange(notes)
        self._sparse_rows.agree(sparse_of(self._agreed), self._parameters, self._comm)
        return agreed

    def _with_room(self, spare: int) -> list[Bucket]:
        """The buckets, and at the end of the last one room for notes in full precision."""
        buckets = self._cut(self._parameters, self._sums.types, self._holders)
        last, alike = buckets[-1].flat, any(len(each) > 1 for each in self._holders)
        plain = not self._encodes(buckets[-1])
        if plain and not alike and last.dtype in (torch.float32, torch.float64):
            return self._cut(self._parameters, self._sums.types, spare=spare)
        double = self._sums.types or last.dtype == torch.float64
        wide = torch.float64 if double else torch.float32
        room = torch.zeros(spare, dtype=wide, device=last.device)
        return [*buckets, Bucket(room, (), (), room)]

    def _cut(
        self,
        parameters: Sequence[Tensor],
        types: Mapping[torch.dtype, torch.dtype],
        holders: Sequence[tuple[int, ...]] = (),
        spare: int = 0,
    ) -> list[Bucket]:
        """With a codec, the buckets of those that are not encoded are the last."""
        plain = [number for number, p in enumerate(parameters) if not self._is_encoded(p)]
        last = plain if self._reduction is not None else ()
        return lay_out(parameters, [self._bucket_bytes], spare, types, holders, last)

    def _send(self, number: int, bucket: Bucket) -> Work:
        if self._reducer is None or not self._encodes(bucket):
            return self._comm.all_reduce(bucket.flat)
        self._reducer.begin(number, bucket.flat, key=self._attempt.number)
        return _Begun()

    def _finish(self) -> None:
        super()._finish()
        if self._reducer is not None:
            used = self._buckets[-1].spare[: len(self._parameters)].tolist()
            self._reducer.unused = {str(slot) for slot, mark in enumerate(used) if not mark}
            self._reducer.finish()

    def prepare(self, step: int, scale: float) -> float:
        """`exchange` did it all."""
        return scale

    def hand_out(self) -> None:
        """Give each parameter its agreed gradient, if any rank had one."""
        assert self._agreed, "exchange comes first"
        self._hand_out(self._agreed, self._sparse_rows.agreed)

    def _hand_out(self, marks: Sequence[float], rows: Mapping[int, Tensor]) -> None:
        """By parameter, whether a rank had a gradient; and which rows, of sparse ones."""
        sparse = set(sparse_of(marks))
        for index, (mark, parameter) in enumerate(zip(marks, self._parameters, strict=True)):
            parameter.grad = None
            if mark:
                grad = self._sums.gradient(index, self._home[index][1])
                grad = with_rows(grad, rows.get(index)) if index in sparse else grad
                parameter.grad = laid_out_like(grad, parameter)

    def apply(self, update: Callable[[], Result]) -> Result | None:
        """Move by what was handed out; the next pass starts from none."""
        result = update()
        self._sums.end_step()  # not before: a step that does not happen must teach nothing
        if self._reducer is not None:
            self._reducer.apply()
        self._forget()
        return result

    def abandon(self) -> None:
        """The next step starts from what the last one left."""
        self._sums.abandon()
        if self._reducer is not None:
            self._reducer.abandon()
        self._forget()

    def stop(self) -> None:
        """What was dropped is kept for the next group."""

    def own_state(self) -> dict[str, Tensor]:
        """What the codec dropped here, and is still to be sent."""
        return dict(self._carry.totals) if self._reducer is None else self._reducer.own_state()

    def state(self) -> dict[str, Tensor]:
        """What the sums remember, and the reducer."""
        return super().state() | (self._reducer.state() if self._reducer is not None else {})

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        self._carry.load(state)
        self._reducer = None  # what it carries is of what this takes the place of

    def load_left(
        self,
        tensors: Mapping[str, Tensor],
        parameters: Sequence[Parameter],
        holders: Sequence[tuple[int, ...]] = (),
    ) -> None:
        """The residuals of a process that was perhaps one of more, or of fewer."""
        rank, size, exact, *idle = tensors["place"].tolist()
        types = Exact.types if exact else Plain.types
        if self.codec is not None:
            types = Wide(parameters).types
        buckets = self._cut(parameters, types, holders)
        layout = self._laid_out(buckets, parameters, size, idle)
        if len(tensors["residual"]) == layout.room(rank):
            self._carry.keep(layout, rank, tensors["residual"])

    def _laid_out(
        self,
        buckets: Sequence[Bucket],
        parameters: Sequence[Tensor],
        size: int,
        idle: Sequence[int],
    ) -> Layout:
        """How what is carried over lies: parameters are called by their numbers."""
        places = [
            [Place(str(m), tuple(parameters[m].shape), bucket.flat.dtype) for m in bucket.members]
            for bucket in buckets
            if self._encodes(bucket)
        ]
        assert self._reduction is not None, "no other buckets are reduced"
        return self._reduction.layout(places, size, idle)

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """A ring sends 2(W-1)/W of the bytes in 2(W-1) messages."""
        return Price(2 * (replicas - 1) / replicas * parameter_bytes, 2 * (replicas - 1))


class _Begun:
    """A bucket that the reducer has under way."""

    def wait(self) -> None:
        """Its `finish` does."""
