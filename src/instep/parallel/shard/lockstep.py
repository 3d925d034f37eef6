"""Collectives inside a replica, checked: all ranks must be at the same block of the model.

FSDP2 gathers a block's parameters when its `forward` begins. A model that uses other blocks on
one rank than on another (routing, dropped layers) would gather one block's rows into another, and
compute wrong numbers without an error. So a few integers go along with each collective: which
block, which operation, and which parameters have a gradient. They travel at the same time, so
they cost little; who differs gets an error, and nobody waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from instep.comm.direct import SumOfParts, all_gather, wait
from instep.errors import RecipeError

GATHER, SUM, END, RUN = range(4)
_DOING = ("gathers", "sums the gradients of", "has ended a pass of", "is about to run")
_BITS = 62
"""Parameters in one int64."""


class ShardUnit:
    """Parameters that are gathered, and whose gradients are summed, together.

    Args:
        number: its place among the model's units, the same on all ranks.
        name: what a person calls it.
        parameters: how many take part in a sum.
    """

    def __init__(self, number: int, name: str, parameters: int) -> None:
        self.number, self.name = number, name
        self.used = [False] * parameters
        """Whether a parameter has a gradient: on this rank during a pass, on any after the sum."""
        self.runs = 0
        """How often it ran forward in this pass."""
        self.inside = 0
        """Above 0 while it runs."""
        self.counting = False
        """Whether a forward pass is under way; what runs later runs again, for checkpoints."""

    def begin_pass(self) -> None:
        """Forget the last pass."""
        self.used = [False] * len(self.used)
        self.runs, self.counting = 0, True

    def end_forward(self) -> None:
        """The forward pass is over."""
        self.counting = False

    def enter(self) -> None:
        """It begins to run."""
        self.inside += 1
        self.runs += self.counting

    def leave(self, *_: Any) -> None:
        """It has run."""
        self.inside -= 1


class CollectiveCheck:
    """A few integers that go along with each collective of a group.

    Args:
        group: the ranks that share the model.
        units: all of them, in order.
    """

    def __init__(self, group: ProcessGroup, units: Sequence[ShardUnit]) -> None:
        self.group, self._units = group, units
        self.counts = True
        """Whether this rank's gradients are added; in a pass without samples they are not."""
        most = max((len(unit.used) for unit in units), default=0)
        self._words = 1 + -(-most // _BITS)

    def begin(self, unit: ShardUnit, doing: int) -> _CheckedWork:
        """Send what this rank does; `end` of what is returned compares it with the others."""
        words = [tag_of(unit, doing)]
        for first in range(0, _BITS * (self._words - 1), _BITS):
            bits = unit.used[first : first + _BITS] if doing == SUM and self.counts else []
            words.append(sum(1 << place for place, used in enumerate(bits) if used))
        own = torch.tensor(words)
        every = torch.empty(self.group.size() * len(words), dtype=torch.int64)
        work = all_gather(self.group, every, own)
        return _CheckedWork(work, every.view(-1, len(words)), unit, doing, self._units)

    def ask(self, unit: ShardUnit) -> set[int]:
        """The numbers of the units that the ranks are about to run; this one `unit`."""
        return self.begin(unit, RUN).end()


class _CheckedWork:
    def __init__(
        self, work: Any, every: Tensor, unit: ShardUnit, doing: int, units: Sequence[ShardUnit]
    ) -> None:
        self._work, self._every, self._unit, self._doing = work, every, unit, doing
        self._units = units

    def end(self) -> set[int]:
        """Wait for the others.

        Returns:
            The numbers of the units that the ranks use.

        Raises:
            RecipeError: another rank does something else.
            PeerError: another rank has ended.
        """
        wait(self._work)
        ranks = self._every.tolist()
        every = [divmod(first - 1, len(_DOING)) for first, *_ in ranks]
        for rank, (number, doing) in enumerate(every):
            if doing != self._doing or (doing != RUN and number != self._unit.number):
                raise RecipeError(
                    f"a rank {_DOING[self._doing]} {self._unit.name!r} while rank {rank} of its "
                    f"replica {_DOING[doing]} {self._units[number].name!r}: with [mesh] shard "
                    "every rank must run the same blocks in the same order, from the loss that the "
                    "pass returned. A block that only some samples use, or that is dropped by "
                    "chance, must run in each pass (multiply what it adds by 0 or 1); or leave "
                    "[mesh] shard out."
                )
        if self._doing == SUM:
            used = self._unit.used
            for place in range(len(used)):
                word, bit = 1 + place // _BITS, 1 << place % _BITS
                used[place] = any(words[word] & bit for words in ranks)
        return {number for number, _ in every}


def tag_of(unit: ShardUnit, doing: int) -> int:
    """A number for what is done with a unit; 0 for none."""
    return 1 + unit.number * len(_DOING) + doing


class CheckedGather:
    """FSDP2's all-gather (its hook `set_custom_all_gather`), checked.

    Args:
        lockstep: of the ranks.
        unit: whose parameters.
        asked: whether `CollectiveCheck.ask` came first in a forward pass.
    """

    def __init__(self, lockstep: CollectiveCheck, unit: ShardUnit, *, asked: bool) -> None:
        self._lockstep, self._unit, self._asked = lockstep, unit, asked

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for the parameters of all ranks."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        async_op: bool = False,
    ) -> Any:
        """Collect [n] of each rank in [ranks * n]."""
        known = self._asked and self._unit.counting
        check = None if known else self._lockstep.begin(self._unit, GATHER)
        work = all_gather(group, output_tensor, input_tensor, tag_of(self._unit, GATHER))
        if check is not None:
            check.end()
        if async_op:
            return work
        wait(work)
        return None


class ReduceScatter:
    """FSDP2's reduce-scatter (`set_custom_reduce_scatter`): a sum in rank order, checked."""

    def __init__(self, lockstep: CollectiveCheck, unit: ShardUnit) -> None:
        self._lockstep, self._unit = lockstep, unit

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for gradients."""
        return torch.empty(*size, dtype=dtype, device=device)

    @torch.no_grad()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum [ranks * n] of each rank to [n], this rank's part."""
        check = self._lockstep.begin(self._unit, SUM)
        if not self._lockstep.counts:  # they may be anything, also NaN
            input_tensor.zero_()
        rows = input_tensor.view(group.size(), -1)
        total = SumOfParts(group, rows, tag_of(self._unit, SUM))
        check.end()
        total.end(output_tensor)
        # FSDP2 keeps it until the next block's sum, for streams; it has been sent
        input_tensor.untyped_storage().resize_(0)
