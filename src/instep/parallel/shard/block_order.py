"""Keeps the ranks of a replica at the same block, also where their samples take other ways.

A model may run a block only for some samples, or more often, or in another order: experts, heads of
tasks, dropped layers, steps of a sequence. FSDP2 gathers a block's parameters when it runs, so all
ranks have to run the same blocks. So before a block runs, the ranks tell each other which one they
are about to run. If they differ, one of these is next; a rank that is about to run another one
first runs this one as the identity on a number that counts nothing: FSDP2 gathers and sums as on
the other ranks, forward and backward, and its gradients are those of the others.

The number goes through all blocks, and in the end into the loss. So the backward pass comes to
every block on all ranks, also where a rank makes no use of what a block returned. FSDP2 sums the
gradients of a block when the backward pass leaves it, or at the very end if nothing in front of the
block has gradients. Where ranks begin with different blocks that would be another order on each, so
such a block takes its inputs from the number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from instep.parallel.nested import on_tensors, tensors_in
from instep.parallel.shard.lockstep import CollectiveCheck, ShardUnit


class BlockOrder:
    """Which block is next in a pass, and what runs in place of those that a rank leaves out.

    Of several blocks that ranks are about to run, that one is next which was the first to be next
    in all passes so far; so a rank seldom has to wait for a block that another has behind it.

    Args:
        lockstep: of the ranks.
        blocks: modules that FSDP2 gathers one by one, with their units.
        end: the unit that stands for the end of a forward pass.
        device: of the parameters.
    """

    def __init__(
        self,
        lockstep: CollectiveCheck,
        blocks: Sequence[tuple[ShardUnit, nn.Module]],
        end: ShardUnit,
        device: torch.device,
    ) -> None:
        self._lockstep, self._end, self._device = lockstep, end, device
        self._blocks = {unit.number: block for unit, block in blocks}
        self._known: dict[int, int] = {}
        """Of each block, how many were next before it was so first: the same on all ranks."""
        self._busy = False
        self.begin_pass()
        for unit, block in blocks:  # before FSDP2's own hook
            block.register_forward_pre_hook(self._before(unit), prepend=True, with_kwargs=True)
            block.register_forward_hook(self._after(unit))

    def begin_pass(self) -> None:
        """The number is a new one."""
        self._nothing = torch.zeros((), device=self._device, requires_grad=True)

    def end_forward(self, answer: Any) -> Any:
        """Run what other ranks still run, and have the backward pass of `answer` go through all
        blocks."""
        if not self._blocks:
            return answer
        self._wait_for(self._end)
        return _plus(answer, self._nothing)

    def _before(self, unit: ShardUnit) -> Callable[[nn.Module, Any, Any], Any]:
        def before(block: nn.Module, arguments: Any, named: Any) -> Any:
            if not unit.counting or self._busy:
                return None
            self._wait_for(unit)
            given = tensors_in((arguments, named))
            if not torch.is_grad_enabled() or any(tensor.requires_grad for tensor in given):
                return None
            return on_tensors((arguments, named), self._from_number)

        return before

    def _from_number(self, tensor: Tensor) -> Tensor:
        """The same, with a backward pass that continues to the number."""
        return _behind(tensor, self._nothing) if tensor.is_floating_point() else tensor

    def _after(self, unit: ShardUnit) -> Callable[[nn.Module, Any, Any], None]:
        def after(block: nn.Module, arguments: Any, output: Any) -> None:
            if unit.counting and not self._busy and torch.is_grad_enabled():
                returned = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
                self._nothing = _through(self._nothing, *returned)

        return after

    def _wait_for(self, unit: ShardUnit) -> None:
        """Run what comes before a unit on other ranks, until it is next on all."""
        while (following := self._next(unit)) != unit.number:
            self._leave_out(self._blocks[following])

    def _next(self, unit: ShardUnit) -> int:
        """The block that all ranks run next, where this one is about to run `unit`."""
        wanted = self._lockstep.ask(unit) - {self._end.number}
        if not wanted:
            return self._end.number
        following = min(
            wanted, key=lambda number: (self._known.get(number, len(self._blocks)), number)
        )
        self._known.setdefault(following, len(self._known))
        return following

    def _leave_out(self, block: nn.Module) -> None:
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


class _Through(torch.autograd.Function):
    """A number unchanged; its backward pass also goes to tensors, and brings them no gradient."""

    @staticmethod
    def forward(ctx: Any, number: Tensor, *tensors: Tensor) -> Tensor:
        ctx.count = len(tensors)
        return number.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return *gradients, *(None,) * ctx.count


class _Behind(torch.autograd.Function):
    """A tensor unchanged; its backward pass continues to a number, and brings it no gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, number: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, torch.zeros((), device=gradients[0].device)


_behind: Callable[..., Tensor] = _Behind.apply

_through: Callable[..., Tensor] = _Through.apply


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
