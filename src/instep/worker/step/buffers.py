"""Buffers that a forward pass changes, such as BatchNorm's running statistics.

Each pass of a step starts from the committed buffers and proposes new ones;
the step's are the mean of the proposals, weighted by samples, over all passes
of all workers. So they are the same at any number of workers, and for an
exponential average the step counts once, with the mean of its micro-batches'
statistics. Where they must be the same to the bit, each pass's proposal
travels in a row of its own, and every worker adds the rows in one order.
Buffers that nothing changes cost nothing. What a hook of the optimizer writes
(an average of the weights) comes after that mean, and is committed as it is.

A change is seen by torch's version counter, which costs no look at the values.
But batch normalisation moves its running statistics without counting (torch
2.11 to 2.13). So values are compared too: of all buffers after the first pass,
of a module's other buffers where one was seen to move, and always of what has
the form of such statistics. What was once found to move uncounted is from then
on taken to move in every pass.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from instep.comm.base import Comm
from instep.errors import RecipeError

_ROUNDING = 1e-9
"""Weights that miss 1 by less are whole; times an infinite old value, it would not be nothing."""


class Buffers:
    """The buffers of one model, watched from pass to pass.

    Args:
        model: whose.
        parts: 0 for means that are equal to rounding; else the passes of a
            step, at most, and the mean has the same bits whichever worker runs which.
        alone: whether each step is one pass, which may do what one machine may.
    """

    def __init__(self, model: nn.Module, *, parts: int = 0, alone: bool = False) -> None:
        self._rows = parts or 1
        owners = [
            (module, name, buffer)
            for module in model.modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._empty = empty(model)
        self._still = [
            (name, p) for name, p in model.named_parameters() if not (p.requires_grad or alone)
        ]
        self._frozen: list[tuple[str, nn.Parameter, int]] = []
        unique = {id(buffer): (module, name, buffer) for module, name, buffer in owners}
        self._owners = [(module, name) for module, name, _ in unique.values()]
        self._live = [buffer for _, _, buffer in unique.values()]
        self._committed = [buffer.detach().clone() for buffer in self._live]
        self._versions = [buffer._version for buffer in self._live]
        self._proposed: dict[int, dict[int, tuple[float, Tensor]]] = {}  # buffer, row
        self._agreed: tuple[list[int], Tensor] | None = None  # staged until `apply`
        self._uncounted: set[int] = set()
        self.moved: set[int] = set()
        """The identity (`id`) of each buffer that a committed step has moved."""
        self._compared = False
        self._note_frozen()

    def __len__(self) -> int:
        return len(self._live)

    @torch.no_grad()
    def after_pass(self, weight: float, number: int, *, beside: bool = False) -> bool:
        """Take in what a pass did to the buffers, undo it, and say whether it did anything.

        Args:
            weight: what the pass counts in the step; at 0 what it did is undone, and no more.
            number: of the pass, among all of the step.
            beside: whether it is one beside those that compute the samples: then it has to do
                only with the buffers that it changes.
        """
        self._refuse()
        moved = self._moved()
        self._compared = True
        if beside:
            moved = [
                i for i in moved if not torch.equal(self._now(i, "batch_loss"), self._committed[i])
            ]
        if not weight:
            for index in moved:
                self._restore(index)
            return False
        for index in moved:
            now = self._now(index, "the forward pass")
            rows = self._proposed.setdefault(index, {})
            sum_of_weights, total = rows.get(number % self._rows, (0.0, torch.zeros(())))
            total = total.to(now.device) + weight * now.to(torch.float64)
            rows[number % self._rows] = (sum_of_weights + weight, total)
            self._restore(index)
        return bool(moved)

    def moved_by_pass(self) -> dict[int, Tensor]:
        """What a pass made of the buffers that it moved, by number; before `after_pass`."""
        return {i: self._now(i, "the forward pass").clone() for i in self._moved()}

    @torch.no_grad()
    def move(self, moved: Mapping[int, Tensor]) -> None:
        """Move them as a pass did, of which `moved_by_pass` told."""
        for index, value in moved.items():
            module, name = self._owners[index]
            buffer = module._buffers[name]
            assert buffer is not None, name
            buffer.copy_(value)

    @torch.no_grad()
    def after_update(self) -> None:
        """What wrote since `apply` was the optimizer or a hook of it, as one that averages the
        weights: alike on every worker, and once in the step. So it is committed as it is."""
        for index in self._moved():
            now = self._now(index, "a hook of the optimizer")
            self._committed[index].copy_(now)
            self.moved.add(id(self._live[index]))
            self._restore(index)
        self._note_frozen()

    def _note_frozen(self) -> None:
        self._frozen = [(name, parameter, parameter._version) for name, parameter in self._still]

    def _refuse(self) -> None:
        """Refuse what a pass may not do, as workers run different numbers of passes."""
        for module, name in self._empty:
            if module._buffers.get(name) is not None:
                raise filled(module, name)
        for name, parameter, version in self._frozen:
            if parameter._version != version:
                raise written(name, trained=False)

    def _moved(self) -> list[int]:
        """Which buffers the pass has moved, or must be taken to have moved."""
        if not self._live:
            return []
        present = [i for i, (m, name) in enumerate(self._owners) if m._buffers[name] is not None]
        counted = {i for i in present if self._counted(i)}
        modules = {id(self._owners[i][0]) for i in counted}
        for i in set(present) - counted - self._uncounted:
            if not self._compared or id(self._owners[i][0]) in modules or self._like_statistics(i):
                self._uncounted |= {i} if self._differs(i) else set()
        return [i for i in present if i in counted or i in self._uncounted]

    def _counted(self, index: int) -> bool:
        module, name = self._owners[index]
        now = module._buffers[name]
        return now is not self._live[index] or now._version != self._versions[index]

    def _like_statistics(self, index: int) -> bool:
        return self._live[index].dim() == 1 and self._live[index].is_floating_point()

    def _differs(self, index: int) -> bool:
        return not torch.equal(self._live[index], self._committed[index])

    def _now(self, index: int, by: str) -> Tensor:
        module, name = self._owners[index]
        now = module._buffers[name]
        assert now is not None
        if now.shape != self._live[index].shape or now.is_complex():
            raise RecipeError(
                f"{by} changed the buffer {name!r} of a {type(module).__name__} "
                f"from shape {list(self._live[index].shape)} to {list(now.shape)}: a buffer "
                "that it writes must keep its shape, and be real."
            )
        return now

    def _restore(self, index: int) -> None:
        module, name = self._owners[index]
        live = self._live[index]
        live.copy_(self._committed[index])
        module._buffers[name] = live
        self._versions[index] = live._version

    def marks(self) -> list[float]:
        """[buffers]: 1 for each that this rank's passes moved, to be summed over the ranks."""
        return [1.0 if index in self._proposed else 0.0 for index in range(len(self._live))]

    def forget(self) -> None:
        """Drop what the passes proposed, and what was agreed on: they run again."""
        self._proposed.clear()
        self._agreed = None

    @torch.no_grad()
    def undo(self) -> None:
        """Give every buffer its committed value: a pass may have ended in the middle."""
        self.forget()
        for index, (module, name) in enumerate(self._owners):
            if module._buffers[name] is not None:
                self._restore(index)

    @torch.no_grad()
    def exchange(self, marks: list[float], comm: Comm, *, read: float = 1.0) -> None:
        """Agree on every buffer that some rank's passes moved; they move with `apply`.

        Args:
            marks: those of all ranks, summed; equal on each.
            read: the weight of all passes of the step together; below 1 where samples
                were left out, whose share then falls to the others.
        """
        moved = [index for index, mark in enumerate(marks) if mark > 0]
        if not moved:
            return
        width = sum(1 + self._live[index].numel() for index in moved)
        device = self._live[moved[0]].device
        table = torch.zeros(self._rows, width, dtype=torch.float64, device=device)
        at = 0
        for index in moved:
            shape, stop = self._live[index].shape, at + 1 + self._live[index].numel()
            for row, (weight, total) in self._proposed.get(index, {}).items():
                table[row, at] = weight
                table[row, at + 1 : stop] = total.expand(shape).reshape(-1)
            at = stop
        comm.all_reduce(table).wait()
        mean = table[0]
        for row in table[1:]:
            mean = mean + row
        if read < 1:
            mean = mean / read
        at = 0
        for index in moved:
            if float(mean[at]) > 1 + _ROUNDING:
                module, name = self._owners[index]
                raise RecipeError(
                    f"the buffer {name!r} of a {type(module).__name__} is moved by Recipe.embed "
                    "and by Recipe.batch_loss: one step would move it twice. Use a layer of "
                    "its own for each."
                )
            at += 1 + self._live[index].numel()
        self._proposed.clear()
        self._agreed = moved, mean

    @torch.no_grad()
    def apply(self) -> None:
        """Give the buffers the values agreed on, with the parameters of the same step."""
        if self._agreed is None:
            return
        (moved, flat), self._agreed = self._agreed, None
        at = 0
        for index in moved:
            committed = self._committed[index]
            weight, mean = flat[at], flat[at + 1 : at + 1 + committed.numel()]
            at += 1 + committed.numel()
            value = mean.view(committed.shape)
            if 1 - weight > _ROUNDING:  # some passes left it as it was
                value = value + (1 - weight) * committed.to(torch.float64)
            self.moved.add(id(self._live[index]))
            committed.copy_(value if committed.is_floating_point() else value.round())
            self._restore(index)


def empty(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The buffers that are None, each as its module and its name there."""
    return [
        (module, name)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is None
    ]


def filled(module: nn.Module, name: str) -> RecipeError:
    """The error of a pass that filled a buffer which was None."""
    return RecipeError(
        f"the forward pass filled the buffer {name!r} of a {type(module).__name__}, "
        "which was None: run one batch through the model in the recipe."
    )


def written(name: str, *, trained: bool) -> RecipeError:
    """The error of a pass that wrote to a parameter."""
    if trained:
        return RecipeError(
            f"the forward pass wrote to the parameter {name!r} (an embedding with max_norm does, "
            "and a clamp in forward): workers run other passes, and would end with other models. "
            "Do it before the optimizer's step, in a parametrization, or with workers = 1 and "
            "train.micro_batches = 1."
        )
    return RecipeError(
        f"the forward pass wrote to the frozen parameter {name!r}: make it a buffer "
        "(register_buffer), so that workers can agree on it."
    )
