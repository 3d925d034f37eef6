"""Average gradients every step: replicas never differ, and equal one big batch.

Gradients are gathered in flat buckets (Li et al. 2020, arXiv:2006.15704). A
bucket is summed over the ranks as soon as its gradients are there, in the
background, while the backward pass goes on with earlier layers. Weights are
applied as a gradient enters its bucket, so the sum is the mean over the true
number of samples, whatever each rank's share. How it is summed, to rounding
or to the bit, is the business of `sums.py`.

Two things ride in the spare end of the last bucket and cost no message of
their own: the caller's notes, and which parameters had a gradient at all. A
parameter that no rank used keeps no gradient, as on one process.

With a codec the buckets travel in two phases (`two_phase.py`), and notes in a message of
their own. What the codec drops is this rank's alone to carry over, so it lies in memory
that outlives the process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm, Work
from instep.comm.buckets import Bucket, lay_out
from instep.comm.codecs.base import Codec
from instep.errors import SpecError, WorkerError
from instep.records import BEGINNING, Attempt, Law
from instep.sync.base import Memory, Price, Result
from instep.sync.sums import Exact, Plain, Sums, Wide
from instep.sync.two_phase import Layout, Place, TwoPhase

_SPARSE = 2.0**-12
"""Added to a parameter's mark where its gradient is sparse; below 1 with up to 4,095 ranks."""


class AllReduce:
    """Weighted mean of the gradients of all replicas, every step.

    Args:
        bucket_mb: megabytes at which a bucket is full and starts on its way.
        overlap: send during the backward pass; off, all is sent after it.
        codec: how buckets look on the wire; None sends them as they are.

    Raises:
        SpecError: `bucket_mb` is not a positive number.
    """

    def __init__(
        self, *, bucket_mb: float = 8.0, overlap: bool = True, codec: Codec | None = None
    ) -> None:
        if not isinstance(bucket_mb, (int, float)) or isinstance(bucket_mb, bool) or bucket_mb <= 0:
            raise SpecError(f"sync.options.bucket_mb = {bucket_mb!r}: needs a number above 0.")
        if not isinstance(overlap, bool):
            raise SpecError(f"sync.options.overlap = {overlap!r}: needs to be true or false.")
        self._bucket_bytes = int(bucket_mb * 1e6)
        self._overlap, self._codec = overlap, codec
        self.laws = {"residual": Law.SUM} if codec is not None else {}
        self._sums: Sums = Plain()
        self._loaded: Mapping[str, Tensor] | None = None  # until `start`
        self._two: TwoPhase | None = None
        self._own: Mapping[str, Tensor] | None = None  # until `start`
        self._left: _Left | None = None  # the same, as it lay in memory
        self._memory: Memory | None = None
        self._attempt = BEGINNING
        self._comm: Comm

    def start(
        self,
        parameters: Sequence[Parameter],
        comm: Comm,
        *,
        notes: int,
        parts: int = 0,
        memory: Memory | None = None,
        at: Attempt = BEGINNING,
    ) -> None:
        """Lay out the buckets."""
        state, self._loaded = self.state(), None
        own, left = self.own_state(), self._left
        if left is None and self._two is not None and self._own is None:
            left = _Left(self._comm.size, self._comm.rank, self._two.residual.clone())
        self._own = self._left = None
        self._parameters, self._comm = list(parameters), comm
        if self._codec is not None:
            if parts:
                raise SpecError(
                    "sync.codec with determinism = 'bits': what a codec drops depends on who sends "
                    "what. Leave one of the two out."
                )
            self._sums = Wide(self._parameters)
        else:
            self._sums = Exact(self._parameters, comm, parts) if parts else Plain()
        if state:
            self._sums.load_state(state)
        self._buckets = self._with_room((1 + self._sums.flags) * len(self._parameters) + notes)
        if self._codec is not None:
            self._carry_over(self._codec, own, left, memory, at)
        self._home = {
            member: (number, view)
            for number, bucket in enumerate(self._buckets)
            for member, view in zip(bucket.members, bucket.views, strict=True)
        }
        self._seen = [0.0] * len(self._parameters)
        self._begin_step()

    def _carry_over(
        self,
        codec: Codec,
        own: Mapping[str, Tensor],
        left: _Left | None,
        memory: Memory | None,
        at: Attempt,
    ) -> None:
        """Lay out what the codec drops, beginning with what was dropped before.

        A rank that has its place of before gets it as it lay, so that steps go on to the bit.
        """
        comm, device = self._comm, self._buckets[0].flat.device
        layout = _layout(self._buckets[:-1], self._parameters, comm.size)
        state = {name.removeprefix("residual/"): residual for name, residual in own.items()}
        count = layout.room(comm.rank)
        slots = torch.zeros(count, device=device), torch.zeros(count, device=device)
        if memory is not None:
            place = torch.tensor([comm.size, comm.rank])
            memory.lay_out({"residual": ((count,), torch.float32), "place": ((2,), torch.int64)})
            first = memory.stage(*at)
            first["place"].copy_(place)
            self._fill(first["residual"], layout, state, left)
            memory.staged(*at)
            second = memory.stage(*at._replace(number=at.number + 1))
            second["place"].copy_(place)
            slots = first["residual"], second["residual"]
        else:
            self._fill(slots[0], layout, state, left)
        self._memory = memory
        self._two = TwoPhase(codec, comm, layout, slots, device=device, staged=self._stamp)

    def _fill(
        self, slot: Tensor, layout: Layout, state: Mapping[str, Tensor], left: _Left | None
    ) -> None:
        comm = self._comm
        if left is not None and left[:2] == (comm.size, comm.rank) and len(left.flat) == len(slot):
            slot.copy_(left.flat)
        else:
            layout.fill(slot, comm.rank, state)

    def _stamp(self, _: int) -> None:
        if self._memory is not None:
            self._memory.staged(*self._attempt)

    def begin_step(self, attempt: Attempt) -> None:
        """What is dropped from here on belongs to this commit."""
        self._attempt = attempt
        if self._memory is not None:
            self._memory.stage(*attempt)

    def _with_room(self, spare: int) -> list[Bucket]:
        """The buckets, and at the end of the last one room for notes in full precision."""
        limits, types = [self._bucket_bytes], self._sums.types
        buckets = lay_out(self._parameters, limits, types=types)
        last = buckets[-1].flat
        if self._codec is None and last.dtype in (torch.float32, torch.float64):
            return lay_out(self._parameters, limits, spare=spare)
        wide = torch.float64 if self._sums.types else torch.float32
        room = torch.zeros(spare, dtype=wide, device=last.device)
        return [*buckets, Bucket(room, (), (), room)]

    def _begin_step(self) -> None:
        for index in range(len(self._seen)):
            self._seen[index] = 0.0
        self._missing = [len(bucket.members) for bucket in self._buckets]
        self._work: list[Work] = []
        self._weight, self._sending = 0.0, False
        self._agreed: list[float] = []  # of each parameter, whether a rank had a gradient

    def begin_pass(self, weight: float, *, last: bool) -> None:
        """Remember the weight; on the last pass, full buckets may leave."""
        self._weight = weight
        self._sums.begin_pass()
        self._sending = last and self._overlap and self._comm.size > 1

    def gradient(self, slot: int, gradient: Tensor) -> None:
        """Move a fresh gradient into its bucket, weighted; send what is full."""
        number, view = self._home[slot]
        if number < len(self._work):
            raise WorkerError(
                "a parameter received a second gradient in one backward pass, after its first "
                "was sent. Set sync.options.overlap = false for models that do so "
                "(re-entrant activation checkpointing)."
            )
        self._sums.add(slot, gradient, self._weight, view, not self._seen[slot])
        self._seen[slot] = 1.0 + _SPARSE if gradient.is_sparse else 1.0
        if self._sending:
            self._missing[number] -= 1
            self._send_full()

    def _send_full(self) -> None:
        """Start the buckets that are full, in order; the last one waits for the notes."""
        while len(self._work) < len(self._buckets) - 1 and not self._missing[len(self._work)]:
            self._send_next()

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._work)]
        for member, view in zip(bucket.members, bucket.views, strict=True):
            if not self._seen[member]:
                view.zero_()  # what stands there is the step before
        if self._two is not None and bucket.members:
            self._two.begin(len(self._work), bucket.flat)
            self._work.append(_Begun())
        else:
            self._work.append(self._comm.all_reduce(bucket.flat))

    @torch.no_grad()
    def exchange(self, notes: Tensor) -> Tensor | None:
        """Send what is left, and wait for all of it; what was agreed on stays in the buckets."""
        told = torch.tensor([*self._seen, *self._sums.raised()], dtype=torch.float64)
        spare, count = self._buckets[-1].spare, len(self._parameters)
        spare[: len(told)].copy_(told)
        spare[len(told) :].copy_(notes)
        while len(self._work) < len(self._buckets):
            self._send_next()
        for work in self._work:
            work.wait()
        if self._two is not None:
            self._two.finish()
        agreed = spare.to("cpu", torch.float64, copy=True)
        settled = self._sums.settle(agreed[count : len(told)].tolist())
        self._begin_step()
        if not settled:
            return None
        self._agreed = agreed[:count].tolist()
        return agreed[len(told) :]

    def hand_out(self) -> None:
        """Give each parameter its agreed gradient, if any rank had one."""
        assert self._agreed, "exchange comes first"
        for index, mark in enumerate(self._agreed):
            grad = None
            if mark or self._is_late(index):
                grad = self._sums.gradient(index, self._home[index][1])
                grad = grad if mark == int(mark) else grad.to_sparse(1)
            self._parameters[index].grad = grad

    def _is_late(self, index: int) -> bool:
        """Whether a gradient of an earlier step arrives, of which a codec had dropped it."""
        return self._two is not None and bool(self._home[index][1].any())

    def apply(self, update: Callable[[], Result]) -> Result:
        """Move by what was handed out; the next pass starts from none."""
        result = update()
        self._sums.end_step()  # not before: a step that does not happen must teach nothing
        if self._two is not None:
            self._two.apply()
        self._forget()
        return result

    def abandon(self) -> None:
        """The next step starts from what the last one left."""
        self._sums.abandon()
        if self._two is not None:
            self._two.abandon()
        self._forget()

    def _forget(self) -> None:
        self._begin_step()
        for parameter in self._parameters:
            parameter.grad = None

    def stop(self) -> None:
        """Nothing to let go of: the group is the caller's."""

    def state(self) -> dict[str, Tensor]:
        """What the sums remember: nothing, or how fine their lattices are."""
        return self._sums.state() if self._loaded is None else dict(self._loaded)

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        self._loaded = state

    def own_state(self) -> dict[str, Tensor]:
        """What the codec dropped here, and is still to be sent."""
        if self._own is not None:
            return dict(self._own)
        dropped = self._two.own_state() if self._two is not None else {}
        return {f"residual/{slot}": residual for slot, residual in dropped.items()}

    def load_own(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        self._own, self._left = state, None

    def load_left(self, tensors: Mapping[str, Tensor], parameters: Sequence[Parameter]) -> None:
        """The residuals of a process that was perhaps one of more, or of fewer."""
        size, rank = tensors["place"].tolist()
        buckets = lay_out(parameters, [self._bucket_bytes], types=Wide(parameters).types)
        layout = _layout(buckets, parameters, size)
        if len(tensors["residual"]) == layout.room(rank):
            left = layout.state_of(tensors["residual"], rank)
            self._own = {f"residual/{slot}": residual for slot, residual in left.items()}
            self._left = _Left(size, rank, tensors["residual"].clone())

    @staticmethod
    def price(parameter_bytes: int, replicas: int) -> Price:
        """A ring sends 2(W-1)/W of the bytes in 2(W-1) messages."""
        return Price(2 * (replicas - 1) / replicas * parameter_bytes, 2 * (replicas - 1))


class _Left(NamedTuple):
    """Residuals as they lay in memory, of a rank of a group."""

    size: int
    rank: int
    flat: Tensor


class _Begun:
    """A bucket that `TwoPhase` has under way."""

    def wait(self) -> None:
        """Its `finish` does."""


def _layout(buckets: Sequence[Bucket], parameters: Sequence[Tensor], size: int) -> Layout:
    """Where everything lies: parameters are called by their numbers."""
    return Layout(
        [[Place(str(m), tuple(parameters[m].shape)) for m in bucket.members] for bucket in buckets],
        size,
    )
