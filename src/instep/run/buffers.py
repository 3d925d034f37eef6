"""Buffers that a forward pass changes, such as BatchNorm's running statistics.

Each pass of a step starts from the committed buffers and proposes new ones;
the step's are the mean of the proposals, weighted by samples, over all passes
of all workers. So they are the same at any number of workers, and for an
exponential average the step counts once, with the mean of its micro-batches'
statistics. Buffers that nothing changes cost nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from instep.comm.base import Comm


class Buffers:
    """The buffers of one model, watched from pass to pass."""

    def __init__(self, model: nn.Module) -> None:
        owners = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        unique = {id(buffer): (module, name, buffer) for module, name, buffer in owners}
        self._owners = [(module, name) for module, name, _ in unique.values()]
        self._live = [buffer for _, _, buffer in unique.values()]
        self._committed = [buffer.detach().clone() for buffer in self._live]
        self._versions = [buffer._version for buffer in self._live]
        self._proposed: dict[int, tuple[float, Tensor]] = {}

    def __len__(self) -> int:
        return len(self._live)

    @torch.no_grad()
    def after_pass(self, weight: float) -> bool:
        """Take in what a pass did to the buffers, undo it, and say whether it did anything."""
        moved = False
        for index, (module, name) in enumerate(self._owners):
            now = module._buffers[name]
            live = self._live[index]
            if now is None or (now is live and now._version == self._versions[index]):
                continue
            moved = True
            sum_of_weights, total = self._proposed.get(index, (0.0, torch.zeros(())))
            total = total.to(now.device) + weight * now.to(torch.float64)
            self._proposed[index] = (sum_of_weights + weight, total)
            self._restore(index)
        return moved

    def _restore(self, index: int) -> None:
        module, name = self._owners[index]
        live = self._live[index]
        live.copy_(self._committed[index])
        module._buffers[name] = live
        self._versions[index] = live._version

    def forget(self) -> None:
        """Drop what passes proposed since the last commit."""
        self._proposed.clear()

    def marks(self) -> list[float]:
        """[buffers]: 1 for each that this rank's passes moved, to be summed over the ranks."""
        return [1.0 if index in self._proposed else 0.0 for index in range(len(self._live))]

    @torch.no_grad()
    def commit(self, marks: list[float], comm: Comm) -> None:
        """Agree on every buffer that some rank's passes moved.

        Args:
            marks: those of all ranks, summed; equal on each.
        """
        moved = [index for index, mark in enumerate(marks) if mark > 0]
        if not moved:
            return
        parts = []
        for index in moved:
            live = self._live[index]
            zero = torch.zeros(live.shape, dtype=torch.float64, device=live.device)
            weight, total = self._proposed.get(index, (0.0, zero))
            parts += [torch.full((1,), weight, dtype=torch.float64, device=live.device)]
            parts += [total.expand(live.shape).reshape(-1)]
        flat = torch.cat(parts)
        comm.all_reduce(flat).wait()
        self._write(moved, flat)
        self._proposed.clear()

    def _write(self, moved: list[int], flat: Tensor) -> None:
        at = 0
        for index in moved:
            committed = self._committed[index]
            weight, mean = flat[at], flat[at + 1 : at + 1 + committed.numel()]
            at += 1 + committed.numel()
            value = mean.view(committed.shape) + (1 - weight) * committed.to(torch.float64)
            committed.copy_(value if committed.is_floating_point() else value.round())
            self._restore(index)
