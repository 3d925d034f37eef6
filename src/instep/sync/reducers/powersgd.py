"""Sum matrices as products of two thin factors, and lose nothing in the long run (PowerSGD).

Of each matrix M, the sum over the ranks of what each has, only the part along a few directions
travels (Vogels et al. 2019, arXiv:1905.13727). With the right factor Q of the step before: every
rank multiplies its own matrix with Q, and the products are summed, and made orthonormal: P. Every
rank multiplies its own matrix, transposed, with P, and these products are summed: the new Q. Then
P Q^T is M, projected on the columns of P. What that leaves out of a rank's own matrix is its
residual, for the next step; residuals after + results = contributions + residuals before.

The thread that calls does all talking, bucket by bucket: first all sums for P, in which vectors and
small matrices travel as they are, then all for Q. So any number of buckets may be under way.
Letters: a matrix is [n, m], its factors P^T [rank, n] and Q^T [rank, m], so that loops run over
rows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.comm.base import Comm, Work
from instep.comm.codecs.factor_kernels import multiply, orthonormalise
from instep.comm.codecs.powersgd import PowerSGD
from instep.sync.reducers import OWN_ROOM, Place, Room
from instep.sync.reducers.residuals import Residuals
from instep.sync.reducers.whole_buckets import WholeBuckets

_WORTH = 2
"""A matrix travels in factors if these have so many times fewer elements, at least."""

_STATE = "powersgd/"


class _Matrix(NamedTuple):
    """A parameter that travels in factors."""

    name: str
    n: int
    m: int
    rank: int
    at: int  # in its bucket

    def of(self, flat: Tensor) -> Tensor:
        """[n, m] in its bucket's memory."""
        return flat[self.at : self.at + self.n * self.m].view(self.n, self.m)

    def drawn(self) -> Tensor:
        """What a right factor begins from, Q^T [rank, m]: the same wherever it is drawn."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.name.encode()))
        return torch.randn(self.rank, self.m, generator=generator)


class PowerSgd(Residuals[PowerSGD]):
    """A `Reducer`: right factors are alike on all ranks, residuals each rank's own."""

    @staticmethod
    def kinds(codec: PowerSGD) -> tuple[str, ...]:
        """What a projection leaves out."""
        return ("residual",)

    def __init__(
        self, codec: PowerSGD, comm: Comm, layout: WholeBuckets, room: Room = OWN_ROOM
    ) -> None:
        super().__init__(codec, comm, layout, room)
        self._buckets = [_Bucket(bucket, codec.rank, room.device) for bucket in layout.buckets]
        self._right = {
            matrix.name: matrix.drawn().to(room.device)
            for bucket in self._buckets
            for matrix in bucket.matrices
        }

    def _forget(self) -> None:
        super()._forget()
        self._work: list[Work] = []
        self._next = dict[str, Tensor]()
        self._whole = False

    @torch.no_grad()
    def begin(self, number: int, flat: Tensor, *, key: int = 0) -> None:
        """Send a bucket's products with the right factors, or early in the run the whole of it."""
        bucket, values = self._buckets[number], self._taken(number, flat)
        self._whole = key <= self._codec.start_after
        before, after = self._residuals[self._committed], self._residuals[1 - self._committed]
        if self._whole:  # there is something only where a run began with factors
            after[number].copy_(before[number])
        else:
            values += before[number]
            after[number].zero_()
        last = number == len(self._buckets) - 1
        if last and (self._whole or not any(each.matrices for each in self._buckets)):
            self._stage()
        if self._whole or not bucket.matrices:
            sent = values if len(values) else values.new_zeros(1)  # never nothing
            self._work.append(self._comm.all_reduce(sent))
            return
        for matrix, out in bucket.left_factors():
            right = self._right[matrix.name].clone()
            _orthonormalise(right, matrix.drawn().to(right.device))
            torch.mm(right, matrix.of(values).t(), out=out)
        for part, room in bucket.plain():
            room.copy_(values[part])
        self._work.append(self._comm.all_reduce(bucket.first))

    @torch.no_grad()
    def finish(self) -> None:
        """Find and send the right factors; then multiply."""
        assert self._is_complete(), "each bucket begins first"
        factored = [
            number
            for number, bucket in enumerate(self._buckets)
            if bucket.matrices and not self._whole
        ]
        for number, work in enumerate(self._work):
            work.wait()
            if number in factored:
                self._project(number)
                if number == factored[-1]:
                    self._still_carry_residuals()
                    self._stage()
                self._work[number] = self._comm.all_reduce(self._buckets[number].second)
        if not self._flats:
            self._stage()
        for number in factored:
            self._work[number].wait()
            bucket, values = self._buckets[number], self._flats[number]
            every = zip(bucket.left_factors(), bucket.right_factors(), strict=True)
            for (matrix, left), (_, right) in every:
                _multiply(left, right, matrix.of(values))
                known = matrix.name not in self.unused and right.isfinite().all()
                if known:  # else the next step begins where this one did
                    self._next[matrix.name] = right.clone()
            self._leave_out(number)

    def _project(self, number: int) -> None:
        """This rank's products with the left factors, and what is left of its matrices."""
        bucket, values = self._buckets[number], self._flats[number]
        residuals = self._residuals[1 - self._committed][number]
        every = zip(bucket.left_factors(), bucket.right_factors(), strict=True)
        for (matrix, left), (_, right) in every:
            _orthonormalise(left, left[:0])
            own = matrix.of(values)
            torch.mm(left, own, out=right)
            rest = torch.addmm(own, left.t(), right, alpha=-1, out=matrix.of(residuals))
            if not rest.isfinite().all():
                rest.zero_()
        for part, room in bucket.plain():
            values[part].copy_(room)

    def apply(self) -> None:
        """What is staged is committed."""
        self._right |= self._next
        super().apply()

    def state(self) -> dict[str, Tensor]:
        """The right factors."""
        return {_STATE + name: right.clone() for name, right in self._right.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up right factors of this rank; one of another shape is drawn anew."""
        for name, right in self._right.items():
            known = state.get(_STATE + name)
            if known is not None and known.shape == right.shape:
                right.copy_(known)


class _Bucket:
    """What of a bucket travels in factors and what does not, and the memory for both."""

    def __init__(self, places: Sequence[Place], rank: int, device: torch.device | str) -> None:
        self.matrices: list[_Matrix] = []
        self._plain: list[slice] = []
        at = 0
        for place in places:
            count = math.prod(place.shape)
            n = place.shape[0] if place.shape else 1
            m = count // n if n else 0
            few = min(n, m, rank)
            if len(place.shape) > 1 and _WORTH * few * (n + m) < n * m:
                self.matrices.append(_Matrix(place.name, n, m, few, at))
            else:
                self._plain.append(slice(at, at + count))
            at += count
        self._at = sum(matrix.rank * matrix.n for matrix in self.matrices)
        plain = sum(part.stop - part.start for part in self._plain)
        self.first = torch.zeros(self._at + plain, dtype=torch.float32, device=device)
        self.second = torch.zeros(
            sum(each.rank * each.m for each in self.matrices), dtype=torch.float32, device=device
        )

    def left_factors(self) -> list[tuple[_Matrix, Tensor]]:
        """P^T [rank, n] of each matrix, as a view."""
        parts = self.first[: self._at].split([each.rank * each.n for each in self.matrices])
        pairs = zip(self.matrices, parts, strict=True)
        return [(each, part.view(each.rank, each.n)) for each, part in pairs]

    def right_factors(self) -> list[tuple[_Matrix, Tensor]]:
        """Q^T [rank, m] of each matrix, as a view."""
        parts = self.second.split([each.rank * each.m for each in self.matrices])
        pairs = zip(self.matrices, parts, strict=True)
        return [(each, part.view(each.rank, each.m)) for each, part in pairs]

    def plain(self) -> list[tuple[slice, Tensor]]:
        """Where in the bucket the rest lies, and the memory in which it travels."""
        sizes = [part.stop - part.start for part in self._plain]
        return list(zip(self._plain, self.first[self._at :].split(sizes), strict=True))


def _orthonormalise(rows: Tensor, spare: Tensor) -> None:
    """Few numbers, so that those of a GPU are made so on the CPU."""
    if rows.device.type == "cpu":
        orthonormalise(rows.numpy(), spare.numpy())
        return
    host = rows.cpu()
    orthonormalise(host.numpy(), spare.cpu().numpy())
    rows.copy_(host)


def _multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    if out.device.type == "cpu":
        multiply(left.numpy(), right.numpy(), out.numpy())
    else:
        torch.mm(left.t(), right, out=out)
