"""Keeps the ranks of a replica at the same block, also where their samples take other ways.

A model may run a block only for some samples: experts, branches, dropped layers. FSDP2 gathers a
block's parameters when it runs, so all ranks would have to run the same blocks. Here a block that
a rank leaves out runs there as the identity on a number that counts nothing, at its place in the
order of the blocks: FSDP2 gathers and sums as on the other ranks, forward and backward, and its
gradients are those of the others. Where every rank runs every block, nothing is added.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from instep.parallel.lockstep import Unit, all_gather, wait

_PASSES = 16
"""How many passes may be looked at to learn the order."""


class BlockOrder:
    """Which block is next in a pass, and what runs in place of those that are left out.

    The order is that in which the first rank that ran them all did so first, until then that of
    the model. A block that runs again, or earlier than its place, must do so on every rank.

    Args:
        blocks: modules that FSDP2 gathers one by one, with their units.
        device: of the parameters.
    """

    def __init__(self, blocks: Sequence[tuple[Unit, nn.Module]], device: torch.device) -> None:
        self._blocks, self._device = blocks, device
        self._order = list(range(len(blocks)))
        self._place = list(self._order)
        self._looks = _PASSES if len(blocks) > 1 else 0
        self._ran: list[int] = []
        self._next = 0
        self._busy = False
        self._nothing: Tensor | None = None
        for number, (unit, block) in enumerate(blocks):  # before FSDP2's own hook
            block.register_forward_pre_hook(self._before(number, unit), prepend=True)

    def begin_pass(self) -> None:
        """A pass begins with the first block."""
        self._ran, self._next, self._nothing = [], 0, None

    def end_forward(self, answer: Any) -> Any:
        """Run what is left, and have the backward pass of `answer` go through what was left out."""
        self._leave_out(len(self._order))
        return answer if self._nothing is None else _plus(answer, self._nothing)

    def end_pass(self, group: ProcessGroup) -> None:
        """Look at the order in which the ranks ran the blocks, until one has run them all."""
        if not self._looks:
            return
        self._looks -= 1
        first = list(dict.fromkeys(self._ran))
        own = torch.tensor(first if len(first) == len(self._order) else [-1] * len(self._order))
        every = torch.empty(group.size() * len(own), dtype=torch.int64)
        wait(all_gather(group, every, own))
        for order in every.view(group.size(), -1).tolist():
            if -1 not in order:
                self._order, self._looks = order, 0
                for place, number in enumerate(order):
                    self._place[number] = place
                return

    def _before(self, number: int, unit: Unit) -> Callable[[nn.Module, Any], None]:
        def before(block: nn.Module, arguments: Any) -> None:
            if unit.counting and not self._busy:
                self._ran.append(number)
                self._leave_out(self._place[number])
                self._next = max(self._next, self._place[number] + 1)

        return before

    def _leave_out(self, until: int) -> None:
        while self._next < until:
            block = self._blocks[self._order[self._next]][1]
            self._next += 1
            if self._nothing is None:
                self._nothing = torch.zeros((), device=self._device, requires_grad=True)
            forward = block.__dict__.get("forward")
            block.__dict__["forward"] = torch.clone
            self._busy = True
            try:
                self._nothing = block(self._nothing)
            finally:
                self._busy = False
                del block.__dict__["forward"]
                if forward is not None:
                    block.__dict__["forward"] = forward


def _plus(answer: Any, nothing: Tensor) -> Any:
    """Each tensor of an answer plus zero, which leaves its bits."""
    if isinstance(answer, Tensor):
        return answer + nothing.to(answer.dtype) if answer.requires_grad else answer
    if type(answer) in (tuple, list):
        return type(answer)(_plus(each, nothing) for each in answer)
    if isinstance(answer, dict):
        for name, each in answer.items():
            answer[name] = _plus(each, nothing)
    return answer
