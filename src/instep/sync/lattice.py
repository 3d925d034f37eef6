"""Sums of gradients that have the same bits in whatever order they are added.

Floating-point addition rounds, so a sum depends on who adds what to what
first. Addition of whole numbers does not. So each gradient is rounded once to
a lattice, whole multiples of a power of two, and the multiples are summed as
integers; only the agreed sum becomes floating point again. The same bytes
move as without it: int32 for float32.

How fine the lattice of each tensor is follows from the sums of the steps
before, which are the same everywhere. A pass whose gradient is too large for
its lattice says so, and one that is large enough says that; where one is too
large, or none is large enough, the ranks choose another lattice together, from
the largest values there are, and run the passes of the step again. All this is
asked of single passes, so it is the same however they are dealt to ranks. The
first step always goes this way.

Nothing here knows buckets, ranks or networks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

WHOLE = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int32,
    torch.float16: torch.int32,
}
"""The type of whole numbers in which gradients of a type are summed."""

_BLOCK = 1 << 16
"""Elements handled at once on a CPU: they stay in its cache from one operation to the next."""

_QUARTERS = 4
"""Levels count quarters of a bit, so that a lattice grows finer slowly: what was large once
may be so again soon, and to run a step again costs more than a few bits."""

_UNKNOWN = 1 << 20
"""The level of a tensor that had no gradient other than zero yet."""

_GROWTH_BITS = 2
"""A gradient may grow so far from one step to the next before it does not fit."""

_LEAST_BITS = 14
"""Of the largest number of a step's passes; with fewer, the lattice is too coarse."""

_LARGE_ENOUGH, _NOT_ZERO = 1.0, 2.0**-12
"""What a rank adds to a flag; up to 4,095 of the second are less than one of the first."""

_BITS = {torch.int32: (-120, 100), torch.int64: (-1000, 900)}
"""Fractional bits, least and most, so that the scale is a number of the gradient's type."""


class Report(NamedTuple):
    """What one rank's passes of a step met, [tensors] each, for the ranks to sum."""

    too_large: list[float]
    """Above 0 where a gradient did not fit its lattice."""
    not_finite: list[float]
    """Above 0 where one held an infinity or no number."""
    size: list[float]
    """Above 0 where one was not zero; 1 or more where one was large enough for its lattice."""


class Lattice:
    """The lattices of some tensors, from step to step.

    Args:
        tensors: whose gradients are summed, in the same order on every rank.
        parts: passes of a step over all ranks, at most; each of at most its
            share of the gradient.
    """

    def __init__(self, tensors: Sequence[Tensor], parts: int) -> None:
        self._types = [tensor.dtype for tensor in tensors]
        self._whole = [WHOLE[dtype] for dtype in self._types]
        self._spare_bits = math.ceil(math.log2(parts))
        self._levels = [_UNKNOWN] * len(tensors)
        self._committed = list(self._levels)  # as the last agreed sums left them
        # kept, since the system hands out fresh memory slower than it is computed with
        self._blocks_on_cpu = {
            whole: _room_for(_BLOCK, whole, torch.device("cpu")) for whole in set(self._whole)
        }
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what the passes so far met; levels stay."""
        self._pass = 0
        self._met: list[tuple[int, int, float, Tensor]] = []  # tensor, pass, weight, largest
        self._sums: list[tuple[int, Tensor]] = []
        self._peaks = [0.0] * len(self._types)

    # ---- on one rank, in a pass

    def begin_pass(self) -> None:
        """What is added from now on belongs to another pass."""
        self._pass += 1

    @torch.no_grad()
    def add(self, index: int, gradient: Tensor, weight: float, into: Tensor, fresh: bool) -> None:
        """Add a gradient, weighted and rounded to the lattice of its tensor.

        Args:
            index: of the tensor.
            gradient: dense, of any layout.
            weight: what it counts in the step.
            into: the sum so far, whole numbers, contiguous, of as many elements.
            fresh: there is no sum yet; what `into` holds is overwritten.
        """
        scale = weight * 2.0 ** self._bits(index)
        values, sums = gradient.reshape(-1), into.view(-1)
        peaks: list[Tensor] = []
        for part, total, scaled, whole in self._blocks(index, values, sums):
            peaks += torch.aminmax(part)
            if part.dtype == scaled.dtype:
                torch.mul(part, scale, out=scaled)
            else:
                scaled.copy_(part).mul_(scale)
            scaled.round_()
            if fresh:
                total.copy_(scaled)
            else:
                total.add_(whole.copy_(scaled))
        if peaks:
            # looked at in `report`, all at once: on a GPU, each look would wait for it
            self._met.append((index, self._pass, weight, torch.stack(peaks).abs_().amax()))

    def _blocks(
        self, index: int, values: Tensor, sums: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
        """Blocks of values and of sums, and for each one room for scaled and for whole numbers."""
        if not len(values):
            return
        if values.device.type == "cpu":
            size, room = _BLOCK, self._blocks_on_cpu[self._whole[index]]
        else:
            size = len(values)
            room = _room_for(size, self._whole[index], values.device)
        for part, total in zip(values.split(size), sums.split(size), strict=True):
            count = len(part)
            yield part, total, room[0][:count], room[1][:count]

    def _limit(self, index: int) -> float:
        """How large a pass may be, so that no sum of all passes leaves the type.

        A little less than the power of two, which no float32 rounds up to.
        """
        if self._levels[index] >= _UNKNOWN:
            return 0.0
        return math.ldexp(1 - 2.0**-20, self._room(index) - self._bits(index))

    def _enough(self, index: int) -> float:
        """How large some pass must be; nothing where the lattice cannot be finer."""
        _, most = _BITS[self._whole[index]]
        bits = self._bits(index)
        return math.ldexp(1.0, _LEAST_BITS - bits) if bits < most else 0.0

    def _room(self, index: int) -> int:
        """Bits of a pass, without the sign."""
        return torch.iinfo(self._whole[index]).bits - 1 - self._spare_bits

    def _bits(self, index: int) -> int:
        """Fractional bits: the lattice is the multiples of 2 to the minus this."""
        level = self._levels[index]
        least, most = _BITS[self._whole[index]]
        return max(least, min(most, level // _QUARTERS)) if level < _UNKNOWN else 0

    # ---- between ranks

    def report(self) -> Report:
        """What this rank's passes met, to be summed over the ranks."""
        count = len(self._types)
        report = Report([0.0] * count, [0.0] * count, [0.0] * count)
        largest: dict[tuple[int, int], float] = {}  # a tensor may meet several gradients in a pass
        for (index, number, weight, _), peak in zip(
            self._met, _together([peak for *_, peak in self._met]), strict=True
        ):
            largest[index, number] = largest.get((index, number), 0.0) + weight * peak
        for (index, _), peak in largest.items():
            if not math.isfinite(peak):
                report.not_finite[index] = 1.0
                continue
            self._peaks[index] = max(self._peaks[index], peak)
            if peak > self._limit(index):
                report.too_large[index] = 1.0
            if peak:
                enough = peak >= self._enough(index)
                report.size[index] = max(report.size[index], _LARGE_ENOUGH if enough else _NOT_ZERO)
        return report

    def peaks(self) -> list[float]:
        """[tensors]: the largest value of this rank's finite passes, weighted; after `report`."""
        return self._peaks

    def misfits(self, report: Report) -> list[int]:
        """The tensors whose lattice was too fine or too coarse.

        Args:
            report: those of all ranks, summed.
        """
        found = zip(report.too_large, report.not_finite, report.size, strict=True)
        return [
            index
            for index, (too_large, not_finite, size) in enumerate(found)
            if too_large or (0.0 < size < _LARGE_ENOUGH and not not_finite)
        ]

    def fit(self, misfits: Sequence[int], peaks: Sequence[float]) -> None:
        """Choose other lattices for some tensors, before the passes run again.

        Args:
            misfits: the tensors.
            peaks: [tensors], of all ranks, the largest.
        """
        for index in misfits:
            if peaks[index]:
                _, exponent = math.frexp(peaks[index])
                self._levels[index] = _QUARTERS * (self._room(index) - 1 - exponent)

    # ---- the sum

    @torch.no_grad()
    def value(self, index: int, sums: Tensor, gradient: Tensor, *, finite: bool) -> None:
        """Turn an agreed sum into a gradient.

        Args:
            index: of the tensor.
            sums: whole numbers, contiguous.
            gradient: contiguous, as many elements; takes the result. May be
                the memory of `sums`, where the elements are as wide.
            finite: False makes all of it not a number: some pass's gradient was
                not finite.
        """
        if not finite:
            gradient.fill_(math.nan)
            return
        step = 2.0 ** -self._bits(index)
        tops: list[Tensor] = []
        for result, total, scaled, _ in self._blocks(index, gradient.view(-1), sums.view(-1)):
            scaled.copy_(total)
            tops += torch.aminmax(total)
            result.copy_(scaled.mul_(step))
        if tops:
            self._sums.append((index, torch.stack(tops).abs_().amax()))

    def take_back(self) -> None:
        """Forget what `value` was given in this step."""
        self._sums = []

    def sizes(self) -> list[int]:
        """[tensors]: bits of the largest number of each sum that `value` was given; 0 where none
        was, or only zeros."""
        sizes = [0] * len(self._types)
        tops = _together([top for _, top in self._sums])
        for (index, _), top in zip(self._sums, tops, strict=True):
            sizes[index] = max(sizes[index], int(top).bit_length())
        return sizes

    def learn(self, sizes: Sequence[int]) -> None:
        """Learn from the `sizes` of the step's sums how fine each lattice may be in the next."""
        for index, bits in enumerate(sizes):
            if bits:
                size = bits - self._bits(index)
                fitting = _QUARTERS * (self._room(index) - _GROWTH_BITS - size)
                self._levels[index] = min(fitting, self._levels[index] + 1)
        self._committed = list(self._levels)

    # ---- what survives a restart

    def state(self) -> Tensor:
        """[tensors] int32: how fine each lattice is since the last commit.

        Room that was made in a step that then did not happen is not in it: not
        every rank may have made it.
        """
        return torch.tensor(self._committed, dtype=torch.int32)

    def load_state(self, levels: Tensor) -> None:
        """Take up what `state` gave."""
        self._levels = [int(level) for level in levels.tolist()]
        self._committed = list(self._levels)


def _room_for(size: int, kind: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    wide = torch.float64 if kind == torch.int64 else torch.float32
    whole = torch.empty(size, dtype=kind, device=device)
    return torch.empty_like(whole, dtype=wide), whole


def _together(numbers: list[Tensor]) -> list[float]:
    """Scalars of several types, read in one go for each device."""
    if len({number.device for number in numbers}) > 1:
        return [float(number) for number in numbers]
    return torch.stack([n.to(torch.float64) for n in numbers]).tolist() if numbers else []
