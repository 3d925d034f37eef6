"""How gradients of several passes and ranks become one: as they are, or without rounding.

`Plain` adds floating-point numbers: quick, and equal to rounding whatever the
order. `Exact` adds whole numbers on a lattice: equal to the bit. The mover of
the sums (`all_reduce.py`) treats both alike: gradients go in, flat memory is
summed over the ranks, gradients come out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from instep.comm.base import Comm
from instep.errors import SpecError, Unrepeatable
from instep.sync.lattice import WHOLE, Lattice, Report


class Sums(Protocol):
    """What becomes of gradients on their way into memory that is summed, and out of it."""

    types: Mapping[torch.dtype, torch.dtype]
    """The type of that memory, where it is not that of the gradient."""

    flags: int
    """How many numbers ride along for each parameter."""

    def begin_pass(self) -> None:
        """The gradients that come from now on are those of another pass."""

    def add(self, index: int, gradient: Tensor, weight: float, into: Tensor, fresh: bool) -> None:
        """Add a gradient of the present pass, weighted; `fresh`: `into` holds nothing yet."""

    def raised(self) -> list[float]:
        """[flags * parameters]: what this rank has to tell the others, to be summed."""

    def settle(self, raised: Sequence[float]) -> bool:
        """Take in what all ranks told; False if the passes of the step must run again."""

    def finite(self) -> bool:
        """Whether all gradients of the step were, as far as that was asked; after `settle`."""

    def gradient(self, index: int, agreed: Tensor) -> Tensor:
        """The gradient, shaped like `agreed`, of which it may use the memory."""

    def sizes(self) -> list[int]:
        """What this rank has seen of the sums that it handed out, of each parameter, or nothing;
        of parts of a sum on several ranks, the largest counts."""

    def take_back(self) -> None:
        """What was handed out of this step so far does not count: it is handed out anew."""

    def end_step(self, sizes: Sequence[int] | None = None) -> None:
        """All gradients of the step have been handed out; `sizes` where other ranks did."""

    def abandon(self) -> None:
        """The step does not happen: it must teach nothing."""

    def state(self) -> dict[str, Tensor]:
        """What has to survive a restart."""

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""


class WithoutMemory:
    """To inherit from, for sums that ask nothing of the ranks and remember nothing of a step."""

    flags = 0

    def begin_pass(self) -> None:
        """All passes are alike."""

    def raised(self) -> list[float]:
        """Nothing to tell."""
        return []

    def settle(self, raised: Sequence[float]) -> bool:
        """Whatever was summed is the sum."""
        return True

    def finite(self) -> bool:
        """Nobody asked."""
        return True

    def sizes(self) -> list[int]:
        """Nothing is asked of them."""
        return []

    def take_back(self) -> None:
        """Nothing is remembered of it."""

    def end_step(self, sizes: Sequence[int] | None = None) -> None:
        """Nothing is remembered between steps."""

    def abandon(self) -> None:
        """Nothing is remembered between steps."""

    def state(self) -> dict[str, Tensor]:
        """Nothing is remembered between steps."""
        return {}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Nothing to take up."""


class Plain(WithoutMemory):
    """Sums of floating-point numbers: the order of the additions shows in the last bits."""

    types: Mapping[torch.dtype, torch.dtype] = {}

    def add(self, index: int, gradient: Tensor, weight: float, into: Tensor, fresh: bool) -> None:
        """One multiplication, one addition; a sparse gradient touches only its rows."""
        if fresh and not gradient.is_sparse and gradient.dtype == into.dtype:
            torch.mul(gradient, weight, out=into)
            return
        if fresh:
            into.zero_()
        into.add_(gradient, alpha=weight)

    def gradient(self, index: int, agreed: Tensor) -> Tensor:
        """The sum itself."""
        return agreed


class Wide(Plain):
    """The same in float32, whatever the parameters are: what a codec takes.

    Args:
        parameters: whose gradients are summed, in the same order on every rank.

    Raises:
        SpecError: a parameter is of a type that float32 cannot stand for.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.types = {p.dtype: torch.float32 for p in parameters}
        self._types = [p.dtype for p in parameters]
        for strange in self.types.keys() - {torch.float32, torch.bfloat16, torch.float16}:
            raise SpecError(
                f"the model has parameters of {strange}, which sync.codec cannot send: it takes "
                "float32, bfloat16 and float16. Leave sync.codec out."
            )

    def gradient(self, index: int, agreed: Tensor) -> Tensor:
        """Rounded to the parameter's type."""
        return agreed.to(self._types[index])


class Exact:
    """Sums on a lattice: the same bits in any order, from any number of ranks.

    Args:
        parameters: whose gradients are summed, in the same order on every rank.
        comm: the ranks.
        parts: passes of a step over all ranks, at most.

    Raises:
        SpecError: a parameter is of a type for which there is no lattice.
    """

    types: Mapping[torch.dtype, torch.dtype] = WHOLE
    flags = 3  # too large, not finite, size

    def __init__(self, parameters: Sequence[Tensor], comm: Comm, parts: int) -> None:
        self._parameters, self._comm = list(parameters), comm
        for strange in {p.dtype for p in self._parameters} - WHOLE.keys():
            raise SpecError(
                f"the model has parameters of {strange}, which determinism = 'bits' cannot sum. "
                f"Make them one of {', '.join(str(known) for known in WHOLE)}."
            )
        self._lattice = Lattice(parameters, parts)
        self.each_finite = [True] * len(self._parameters)
        """Of each parameter, whether the gradients of the step were finite; after `settle`."""
        self._again = False
        self._before: list[float] = []  # the largest values of the passes that run again

    def begin_pass(self) -> None:
        """What fits is asked of passes."""
        self._lattice.begin_pass()

    def add(self, index: int, gradient: Tensor, weight: float, into: Tensor, fresh: bool) -> None:
        """Round the gradient to its lattice, and add whole numbers."""
        if gradient.is_sparse:  # it travels dense in any case
            gradient = gradient.coalesce().to_dense()
        self._lattice.add(index, gradient, weight, into, fresh)

    def raised(self) -> list[float]:
        """Which gradients did not fit, and which were not finite."""
        report = self._lattice.report()
        return [*report.too_large, *report.not_finite, *report.size]

    def settle(self, raised: Sequence[float]) -> bool:
        """False after other lattices were chosen, where some gradient did not fit its own.

        Raises:
            Unrepeatable: the same gradients still do not fit: they are not the same.
            PeerError: a rank went away.
        """
        count = len(self._parameters)
        report = Report(*(list(raised[at : at + count]) for at in range(0, 3 * count, count)))
        if misfits := self._lattice.misfits(report):
            if self._again:
                raise Unrepeatable(
                    "a step was computed twice from the same samples and random state, and its "
                    "gradients differ: train.determinism = 'bits' needs a model that gives the "
                    "same again. To see where it does not: instep run JOB --check-determinism",
                    mine=self._lattice.peaks() != self._before,
                )
            self._before = self._lattice.peaks()
            self._lattice.fit(misfits, self._largest(self._before))
            self._lattice.begin_step()
            self._again = True
            return False
        self.each_finite = [not number for number in report.not_finite]
        self._again = False
        return True

    def _largest(self, own: list[float]) -> list[float]:
        """The largest over the ranks, number by number."""
        table = torch.zeros(self._comm.size, len(own), dtype=torch.float64)
        table[self._comm.rank] = torch.tensor(own, dtype=torch.float64)
        shared = table.to(self._parameters[0].device)
        self._comm.all_reduce(shared).wait()
        largest: list[float] = shared.amax(0).tolist()
        return largest

    def finite(self) -> bool:
        """As the ranks told."""
        return all(self.each_finite)

    def gradient(self, index: int, agreed: Tensor) -> Tensor:
        """In the memory of the sum, where that is as wide."""
        dtype = self._parameters[index].dtype
        wide = agreed.dtype.itemsize == dtype.itemsize
        gradient = agreed.view(dtype) if wide else torch.empty_like(agreed, dtype=dtype)
        self._lattice.value(index, agreed, gradient, finite=self.each_finite[index])
        return gradient

    def sizes(self) -> list[int]:
        """Bits of the largest number of each."""
        return self._lattice.sizes()

    def take_back(self) -> None:
        """Sizes that were seen may not have been those of what was agreed on."""
        self._lattice.take_back()

    def end_step(self, sizes: Sequence[int] | None = None) -> None:
        """Learn how fine the lattices of the next step may be."""
        self._lattice.learn(self.sizes() if sizes is None else sizes)
        self._lattice.begin_step()

    def abandon(self) -> None:
        """The lattices are those of the last step that happened."""
        self._again = False
        self._lattice.load_state(self._lattice.state())
        self._lattice.begin_step()

    def state(self) -> dict[str, Tensor]:
        """How fine each lattice is."""
        return {"lattice": self._lattice.state()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self._lattice.load_state(state["lattice"])


def sums_of(parameters: Sequence[Tensor], comm: Comm, parts: int, *, encoded: bool) -> Sums:
    """How gradients are added.

    Args:
        parameters, comm, parts: as for `Strategy.start`.
        encoded: whether they travel with a codec.

    Raises:
        SpecError: with a codec, parts are to be added to the bit.
    """
    if not encoded:
        return Exact(parameters, comm, parts) if parts else Plain()
    if parts:
        raise SpecError(
            "sync.codec with determinism = 'bits': what a codec drops depends on who sends "
            "what. Leave one of the two out."
        )
    return Wide(parameters)
