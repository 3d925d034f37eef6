"""A copy of the model for the trial: its passes change nothing, and compute as exactly as possible.

What is compared is in `comparison.py` and `compared/`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.engine.state.buffers import grown
from instep.engine.state.frozen import written
from instep.engine.state.kept_buffers import KeptBuffers
from instep.parallel.copies import copied
from instep.parallel.global_batch.batch_norm import use_running_statistics
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward, Losses, is_narrow, to_device, widened
from instep.recipe.rehearsal import called_backward
from instep.recipe.weights import derive
from instep.worker.trial.casts import WideCasts
from instep.worker.trial.moves import Moves

DERIVES = 4
"""Spots, or steps, that may show what the loss of a Hugging Face model is a mean of."""


class PassResult(NamedTuple):
    """The results of one forward and backward pass."""

    loss: float
    weight: float
    """At 0, loss and gradients are of the total."""
    gradients: dict[str, Tensor]
    """Of the mean loss, by parameter; those without a gradient are missing."""
    buffers: dict[str, Tensor]
    """After the pass."""


class Copied(NamedTuple):
    """A model, and the losses, which may refer to parts of it."""

    model: nn.Module
    losses: Losses

    def again(self, *, by_batch: bool = False) -> Copied:
        """A copy in training mode; parts that losses and model share, their copies share too.

        Batch normalisation over the global batch uses running statistics in it, or with `by_batch`
        those of the batch of the pass.

        Functions and their closures are not copied: `TrialModel.reached` detects that.
        """
        try:
            model, *losses = copied((self.model, *self.losses), of=self.model)
        except Exception:  # a loss may hold what cannot be copied
            model, losses = copied(self.model), list(self.losses)
        if not by_batch:
            use_running_statistics(model)
        return Copied(model.train(), Losses(*losses))

    def widen(self, wide: torch.dtype) -> None:
        """Compute in a wider type, in place."""
        for each in (self.model, *self.losses):
            if isinstance(each, nn.Module):
                each._apply(lambda tensor: widened(tensor, wide))


class TrialModel:
    """A copy of the model that passes do not change.

    Args:
        forward: computes with the copy during the trial (`trial_model`).
        copied: copies of the model and its losses.
        original: of which they are copies.
        seed: of the random draws of the passes, and of the new values of parameters.
        wide: the type to compute in; None for the model's own.
    """

    def __init__(
        self,
        forward: Forward,
        copied: Copied,
        original: Copied,
        seed: int,
        wide: torch.dtype | None = None,
    ) -> None:
        self.forward, self._seed, self._wide = forward, seed, wide
        model, self._losses = copied
        self.model = model
        self._original = original
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # the values that passes must not change; those of the original stay as they are
        self._place({n: p.detach() for n, p in original.model.named_parameters()})
        self._buffers = KeptBuffers(model)
        self.committed = self._buffers.values
        self._grown = ""  # the name of a buffer that a pass has given another shape
        self.draws: Callable[[], Any] = nullcontext
        self._casts: WideCasts | None = None

    @property
    def all_wide(self) -> bool:
        """Whether its first pass was seen to compute everything in float64."""
        return self._casts is not None and self._casts.all_wide

    def move(self) -> None:
        """Move every parameter away from its initial value."""
        moves = Moves(self.model, self._seed)
        for name, parameter in self.parameters.items():
            moves.move(name, parameter)
        self._place(self._values())

    @torch.no_grad()
    def move_back(self) -> None:
        """Restore the initial value of every parameter.

        Raises:
            RecipeError: passes wrote to one.
        """
        self.refuse_written()
        start = dict(self._original.model.named_parameters())
        for name, parameter in self.parameters.items():
            parameter.copy_(start[name])
        self._place(self._values())

    def _values(self) -> dict[str, Tensor]:
        return {n: p.detach().clone() for n, p in self.model.named_parameters()}

    def _place(self, values: dict[str, Tensor]) -> None:
        self._placed, self._compared = values, False
        self._versions = _versions(self.model)

    def moved(
        self,
        batch: Any,
        samples: int,
        most_s: float = math.inf,
        note: Callable[[TrialModel], None] = lambda model: None,
        *,
        trained: bool = False,
    ) -> tuple[TrialModel, PassResult | None]:
        """The same in float64, if model and loss can; on a GPU in float32, which is faster there.
        Its parameters are moved, unless they are trained. Small differences show only then.

        Args:
            batch: of the first pass.
            samples: in it.
            most_s: CPU seconds of a pass; if it takes more, the model computes in its own type.
            note: given the model before its first pass.
            trained: whether to leave the parameters where training has them.

        Returns:
            The model, and what the first pass gave.
        """
        on_cpu = all(p.device.type == "cpu" for p in self.parameters.values())
        wide = torch.float64 if on_cpu else torch.float32
        narrow = any(is_narrow(parameter, wide) for parameter in self.model.parameters())
        for casts in (WideCasts(wide), None) if narrow else ():
            copied = self._original.again()  # passes may have changed the other one
            copied.widen(wide)
            other = TrialModel(self.forward, copied, self._original, self._seed, wide)
            other._draw_as(self, casts)
            if not trained:
                other.move()
            since = time.process_time()
            try:
                with self.forward.on(copied.model, "float32", copied.losses):
                    note(other)
                    result = other.run(batch, samples)
            except Exception:  # a part of it needs its own type
                continue
            if time.process_time() - since > most_s:
                break
            self.forward.compute_with(*copied)
            return other, result
        if not trained:
            self.move()
        note(self)
        self._casts = WideCasts(wide, leaves=True) if on_cpu and not narrow else None
        return self, self.run(batch, samples)

    def fresh(self) -> TrialModel:
        """Make another copy, whose passes begin anew, and compute with it from now on."""
        copied = self._original.again()
        other = TrialModel(self.forward, copied, self._original, self._seed)
        other._draw_as(self, None)
        self.forward.compute_with(*copied)
        return other

    def _draw_as(self, other: TrialModel, casts: WideCasts | None) -> None:
        self.draws, self._casts = other.draws, casts

    def run(self, batch: Any, samples: int, *, backward: bool = True) -> PassResult | None:
        """One pass from the initial buffers; None if no sample of the batch counts.

        Args:
            batch: of the pass.
            samples: in it.
            backward: without it there are no gradients, in a third of the time.
        """
        self._reset()
        set_generators(self._seed)
        fitting = self._fit(batch)
        with self.draws(), self._casts or nullcontext():
            try:
                found = self.forward.loss(fitting, samples)
            except Exception as error:
                if self._grown:
                    raise grown(self._grown, error) from error
                raise
            if any(parameter.grad is not None for parameter in self.model.parameters()):
                raise called_backward()
            if found is None:
                return None
            if backward:
                found.loss.backward()
        if not self._compared or self.is_written:
            self.refuse_written()
        trained = self.forward.trained
        gradients = {
            name: (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach()
            for name, p in self.parameters.items()
            if p.grad is not None and (trained is None or name in trained)
        }
        buffers = self._buffers.now()
        self._grown = next((n for n, b in buffers.items() if self._resized(n, b)), self._grown)
        return PassResult(float(found.loss.detach()), found.weight, gradients, buffers)

    def _resized(self, name: str, buffer: Tensor) -> bool:
        before = self.committed.get(name)
        return before is not None and before.numel() > 0 and before.shape != buffer.shape

    @property
    def is_written(self) -> bool:
        """Whether passes wrote to a parameter, if only the value that it had."""
        return _versions(self.model) != self._versions

    def refuse_written(self) -> None:
        """Refuse passes that wrote to parameters; a write through `data` shows in values alone.

        Raises:
            RecipeError: they did.
        """
        self._compared = True
        for name, parameter in self.model.named_parameters():
            placed = self._placed.get(name)  # None if the pass created the parameter
            if placed is not None and not torch.equal(parameter, placed):
                raise written(name, trained=parameter.requires_grad)

    @torch.no_grad()
    def compute(self, batch: Any, samples: int) -> None:
        """The forward pass alone, from the initial buffers."""
        self._reset()
        set_generators(self._seed)
        with self.draws(), self._casts or nullcontext():
            self.forward.loss(self._fit(batch), samples)

    def reached(self) -> bool:
        """Whether passes gave gradients to the original model; they are dropped again."""
        return gradients_dropped(self._original.model)

    def kept_by_loss(self, batch: Any, samples: int) -> str:
        """The name of a buffer of the loss, not of the model, that a pass changes; or empty."""
        modules = [loss for loss in self._losses if isinstance(loss, nn.Module)]
        own = {id(buffer) for buffer in self.model.buffers()}
        named = [
            (n, b) for module in modules for n, b in module.named_buffers() if id(b) not in own
        ]
        before = [buffer.detach().clone() for _, buffer in named]
        self.run(batch, samples)
        now = dict(pair for module in modules for pair in module.named_buffers())
        for (name, _), value in zip(named, before, strict=True):
            if name not in now or not torch.equal(now[name], value):
                return name
        return ""

    def mean_of(self, batches: Iterable[Any]) -> str:
        """What the loss of a Hugging Face model is a mean of: a name of `weights.DERIVED`.

        Empty if the batches do not show it; at least two must.
        """
        compute_loss = self._losses.compute_loss
        may_be: set[str] | None = None
        shown = 0  # batches that showed it
        for batch in batches if compute_loss is not None else ():
            assert compute_loss is not None
            self._reset()
            set_generators(self._seed)
            with self.draws(), self._casts or nullcontext(), self.forward.autocast():
                given = to_device(self._fit(batch), self.forward.device)
                found = derive(self.model, compute_loss, given)
            if found is not None:
                may_be = found if may_be is None else may_be & found
                shown += 1
            if may_be == set() or (may_be and len(may_be) == 1 and shown > 1):
                break
        return may_be.pop() if may_be and len(may_be) == 1 and shown > 1 else ""

    def _fit(self, batch: Any) -> Any:
        wide = self._wide
        return on_tensors(batch, lambda tensor: widened(tensor.clone(), wide))

    @torch.no_grad()
    def _reset(self) -> None:
        self._buffers.put_back()
        gradients_dropped(self.model)


def gradients_dropped(model: nn.Module) -> bool:
    """Drop the gradients of all parameters; whether there were any."""
    found = False
    for parameter in model.parameters():
        found |= parameter.grad is not None
        parameter.grad = None
    return found


def _versions(model: nn.Module) -> list[int]:
    """How often each parameter was written to, as far as autograd knows."""
    return [-1 if p.is_inference() else p._version for p in model.parameters()]


@contextmanager
def trial_model(forward: Forward, seed: int) -> Iterator[TrialModel]:
    """A copy in training mode, without autocast, which would hide small differences.

    Raises:
        Exception: of whatever kind, the model cannot be copied.
    """
    original = Copied(forward.model, forward.tried)
    copied = original.again()
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with forward.on(copied.model, "float32", copied.losses):
            yield TrialModel(forward, copied, original, seed)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
