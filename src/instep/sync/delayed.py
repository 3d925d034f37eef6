"""All-reduce that hides behind the next step's passes: each gradient is applied one step late.

The gradient of a step is summed while the next step's passes compute, and applied with that step's
commit: w(t+1) = w(t) - update(g(w(t-1))), w(t) being the parameters after t updates. The delay is
exactly one step on every rank, so the result is a function of the job, whatever the number of
ranks. The first step applies nothing, and the job's last one applies its own gradient too, in a
second update.

A commit holds its step's gradient as contributions of the ranks (`reducers/late.py`): they are
handed over, copied and kept as what codecs drop is. What all ranks must know of a gradient beside
its sum (who had one, which rows, its scale, its lattice) is agreed on in its own step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from instep.comm.base import Comm
from instep.comm.codecs.base import Codec
from instep.errors import SpecError
from instep.records import Attempt
from instep.sync.all_reduce import AllReduce
from instep.sync.base import Result
from instep.sync.gathering import check_switch
from instep.sync.reducers import Reduction
from instep.sync.reducers.late import KIND, Late
from instep.sync.sums import Exact, Plain, Sums

_ROWS = "late-rows/"
"""Begins the names of the rows of what waits; the number of the parameter follows."""


class Delayed(AllReduce):
    """`AllReduce` that is one step late.

    Args:
        bucket_mb, overlap: as for `AllReduce`.

    Raises:
        SpecError: an option is refused.
    """

    def __init__(self, *, bucket_mb: float = 8.0, overlap: bool = True) -> None:
        late = Reduction((KIND,), Late.layout, Late)
        super().__init__(bucket_mb=bucket_mb, overlap=overlap, reduction=late)
        self._rows_waiting: Mapping[int, Tensor] = {}  # of what waits, as `SparseRows.agreed`
        self.last: int | None = None
        """The number of the job's last commit, which leaves nothing for a later one."""

    def _make_sums(self, parameters: Sequence[Parameter], comm: Comm, parts: int) -> Sums:
        if not parts:
            return Plain()
        return InTurns(Exact(parameters, comm, parts), Exact(parameters, comm, parts))

    def _is_encoded(self, parameter: Tensor) -> bool:
        return True

    def begin_step(self, attempt: Attempt) -> None:
        """What the step before left is on its way while the passes compute."""
        super().begin_step(attempt)
        self._there.begin_step(last=attempt.number == self.last)

    @property
    def _there(self) -> Late:
        assert isinstance(self._reducer, Late), "no generation yet"
        return self._reducer

    def exchange(self, notes: Tensor) -> Tensor | None:
        """As ever; where gradients did not fit their lattices, they are given again."""
        agreed = super().exchange(notes)
        if agreed is None:
            self._there.abandon()
        return agreed

    def prepare(self, step: int, scale: float) -> float:
        """Remember what all know of this step's gradient; that of the step before has its own."""
        self._there.tell([scale, *self._agreed])
        return 1.0

    def hand_out(self) -> None:
        """Give each parameter the gradient of the step before."""
        assert self._agreed, "exchange comes first"
        self._hand_out_scaled(self._there.told, self._rows_waiting)

    def _hand_out_scaled(self, told: Sequence[float], rows: Mapping[int, Tensor]) -> None:
        if not told:
            for parameter in self._parameters:
                parameter.grad = None
            return
        scale, *marks = told
        self._hand_out(marks, rows)
        if scale == 1.0:
            return
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)

    def apply(self, update: Callable[[], Result]) -> Result | None:
        """Move by what was handed out; in the last step by its own gradient too."""
        late, result = self._there, None
        if late.told:
            result = update()
        self._sums.end_step()
        if late.rest:
            for bucket, total in zip(self._buckets, late.rest, strict=False):
                bucket.flat[: len(total)] = total
            self._hand_out_scaled(late.told_of_rest, self._sparse_rows.agreed)
            result = update()
            self._sums.end_step()
        late.apply()
        self._rows_waiting = self._sparse_rows.agreed
        self._forget()
        return result

    def state(self) -> dict[str, Tensor]:
        """What the sums remember, what was told of what waits, and its rows."""
        rows = {f"{_ROWS}{slot}": had > 0 for slot, had in self._rows_waiting.items()}
        return super().state() | rows

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Kept until `start`."""
        super().load_state(state)
        names = (name for name in state if name.startswith(_ROWS))
        self._rows_waiting = {int(name.removeprefix(_ROWS)): state[name] for name in names}


def all_reduce(
    *,
    bucket_mb: float = 8.0,
    overlap: bool = True,
    encode_vectors: bool = False,
    delayed: bool = False,
    codec: Codec | None = None,
) -> AllReduce:
    """The mean of all gradients in every step, at once or one step late.

    Raises:
        SpecError: an option is refused.
    """
    check_switch("delayed", delayed)
    if not delayed:
        return AllReduce(
            bucket_mb=bucket_mb, overlap=overlap, encode_vectors=encode_vectors, codec=codec
        )
    if codec is not None or encode_vectors:
        raise SpecError(
            "sync.options.delayed = true sends plain numbers: leave out sync.codec and "
            "sync.options.encode_vectors, or delayed."
        )
    return Delayed(bucket_mb=bucket_mb, overlap=overlap)


class InTurns:
    """Two of them in turns: while the gradients of a step go into one, the sums of the step before
    come out of the other, on the lattices that they went in by.

    Args:
        filled: what this step's gradients go into.
        summed: the other.
    """

    types: Mapping[torch.dtype, torch.dtype] = Exact.types
    flags = Exact.flags

    def __init__(self, filled: Exact, summed: Exact) -> None:
        self._filled, self._summed = filled, summed

    def begin_pass(self) -> None:
        """Of this step."""
        self._filled.begin_pass()

    def add(self, index: int, gradient: Tensor, weight: float, into: Tensor, fresh: bool) -> None:
        """To this step's."""
        self._filled.add(index, gradient, weight, into, fresh)

    def raised(self) -> list[float]:
        """Of this step's gradients."""
        return self._filled.raised()

    def settle(self, raised: Sequence[float]) -> bool:
        """Whether this step's gradients fit."""
        return self._filled.settle(raised)

    def finite(self) -> bool:
        """Whether this step's gradients are."""
        return self._filled.finite()

    def gradient(self, index: int, agreed: Tensor) -> Tensor:
        """Of the step before."""
        return self._summed.gradient(index, agreed)

    def sizes(self) -> list[int]:
        """Of the sums of the step before."""
        return self._summed.sizes()

    def take_back(self) -> None:
        """The sums of the step before are handed out anew."""
        self._summed.take_back()

    def end_step(self, sizes: Sequence[int] | None = None) -> None:
        """This step's are the next to be handed out."""
        self._summed.end_step(sizes)
        self._filled.end_step([])  # it keeps its lattices, and learns when its sums are known
        self._filled, self._summed = self._summed, self._filled

    def abandon(self) -> None:
        """Those of the step before are handed out anew."""
        self._filled.abandon()
        self._summed.take_back()

    def state(self) -> dict[str, Tensor]:
        """How fine the lattices of both are, and which of the sums to come are finite."""
        late = {f"late_{name}": tensor for name, tensor in self._summed.state().items()}
        return self._filled.state() | late | {"late_finite": torch.tensor(self._summed.each_finite)}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` gave."""
        self._filled.load_state(state)
        self._summed.load_state({"lattice": state["late_lattice"]})
        self._summed.each_finite = state["late_finite"].tolist()
