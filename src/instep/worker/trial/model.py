"""A copy of a model to try things on: its passes leave nothing, and compute as exactly as can be.

What is tried on it, and what follows from that, `sameness.py` knows.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from instep.parallel.batch_norm import hold_still
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward, Losses, on_tensors, to_device
from instep.recipe.rehearsal import called_backward
from instep.recipe.weights import derive
from instep.worker.step.buffers import empty, filled, written

_MOVED_BY = 0.05
"""How far parameters are moved off their start, over their root mean square (or 1, where 0)."""


class PassResult(NamedTuple):
    """What one forward and backward pass gave."""

    loss: float
    weight: float
    """At 0, loss and gradients are of the total."""
    gradients: dict[str, Tensor]
    """Of the mean loss; of the parameters that had one."""
    buffers: dict[str, Tensor]
    """As the pass left them."""


class Copied(NamedTuple):
    """A model, and the losses that may know parts of it, as a criterion of the model's does."""

    model: nn.Module
    losses: Losses

    def again(self) -> Copied:
        """A copy in training mode; what losses and model share, their copies share.

        Functions are not copied, nor what they close over: `TrialModel.reached` tells.
        """
        try:
            model, *losses = copy.deepcopy((self.model, *self.losses))
        except Exception:  # a loss may hold what cannot be copied
            model, losses = copy.deepcopy(self.model), list(self.losses)
        hold_still(model)
        return Copied(model.train(), Losses(*losses))


class TrialModel:
    """A copy of the model on which passes leave nothing.

    Args:
        forward: computes with the copy while it is tried (`trial_model`).
        copied: the model and its losses.
        original: what they are copies of.
        seed: for the draws of the passes and the parameters' new places.
        wide: the type that everything computes in; None for the model's own.
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
        self._start = {n: p.detach().clone() for n, p in model.named_parameters()}
        self._placed = self._start  # where passes find the parameters, and must leave them
        self._owners = [
            (f"{prefix}.{name}" if prefix else name, module, name, buffer, buffer.detach().clone())
            for prefix, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]
        self._empty = empty(model)
        self.committed = {name: kept for name, _, _, _, kept in self._owners}
        self.draws: Callable[[], Any] = nullcontext

    @torch.no_grad()
    def move(self) -> None:
        """Move every parameter off its start."""
        generator = torch.Generator().manual_seed(self._seed)
        for name, parameter in self.parameters.items():
            if not parameter.is_floating_point() or not parameter.numel():
                continue
            rms = float(self._start[name].float().square().mean().sqrt())
            noise = torch.randn(parameter.shape, generator=generator)
            by = _MOVED_BY * (rms if 0 < rms < math.inf else 1.0)
            parameter.add_((by * noise).to(parameter.device, parameter.dtype))
        self._placed = {n: p.detach().clone() for n, p in self.model.named_parameters()}

    @torch.no_grad()
    def move_back(self) -> None:
        """Put every parameter back at its start."""
        for name, parameter in self.parameters.items():
            parameter.copy_(self._start[name])
        self._placed = self._start

    def widened(self, batch: Any, samples: int) -> TrialModel:
        """One that computes in float64, where model and loss can; on a GPU, in float32 at least.

        Small differences show there. Most GPUs are slow at float64.
        """
        on_cpu = all(p.device.type == "cpu" for p in self.parameters.values())
        wide = torch.float64 if on_cpu else torch.float32
        if not any(_is_narrow(parameter, wide) for parameter in self.model.parameters()):
            return self
        copied = self._original.again()  # the other may hold what its passes left
        for each in (copied.model, *copied.losses):
            if isinstance(each, nn.Module):
                each._apply(lambda tensor: _widened(tensor, wide))
        other = TrialModel(self.forward, copied, self._original, self._seed, wide)
        other.draws = self.draws
        with self.forward.on(copied.model, "float32", copied.losses):
            try:
                other.run(batch, samples)
            except Exception:  # something in it is made for its own type
                return self
        self.forward.model, self.forward.losses = copied
        return other

    def run(self, batch: Any, samples: int) -> PassResult | None:
        """One pass from the committed buffers; None where nothing in the batch counts."""
        self._reset()
        set_generators(self._seed)
        with self.draws():
            found = self.forward.loss(self._fit(batch), samples)
            if any(parameter.grad is not None for parameter in self.model.parameters()):
                raise called_backward()
            if found is None:
                return None
            found.loss.backward()
        for module, name in self._empty:
            if module._buffers.get(name) is not None:
                raise filled(module, name)
        for name, parameter in self.model.named_parameters():
            placed = self._placed.get(name)  # none, where the pass has made the parameter
            if placed is not None and not torch.equal(parameter, placed):
                raise written(name, trained=parameter.requires_grad)
        trained = self.forward.trained
        gradients = {
            name: (p.grad.to_dense() if p.grad.is_sparse else p.grad).detach()
            for name, p in self.parameters.items()
            if p.grad is not None and (trained is None or name in trained)
        }
        now = {name: module._buffers[own] for name, module, own, _, _ in self._owners}
        buffers = {name: each.detach().clone() for name, each in now.items() if each is not None}
        return PassResult(float(found.loss.detach()), found.weight, gradients, buffers)

    def reached(self) -> bool:
        """Whether passes found a way to the original, whose gradients are dropped again."""
        found = False
        for parameter in self._original.model.parameters():
            found |= parameter.grad is not None
            parameter.grad = None
        return found

    def kept_by_loss(self, batch: Any, samples: int) -> str:
        """The name of a buffer of the loss, and not of the model, that a pass moves; or empty."""
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

        Empty where two batches and more leave open what it is.
        """
        compute_loss = self._losses.compute_loss
        may_be: set[str] | None = None
        told = 0  # batches that did
        for batch in batches if compute_loss is not None else ():
            assert compute_loss is not None
            self._reset()
            set_generators(self._seed)
            with self.draws(), self.forward.autocast():
                given = to_device(self._fit(batch), self.forward.device)
                found = derive(self.model, compute_loss, given)
            if found is not None:
                may_be = found if may_be is None else may_be & found
                told += 1
            if may_be == set() or (may_be and len(may_be) == 1 and told > 1):
                break
        return may_be.pop() if may_be and len(may_be) == 1 and told > 1 else ""

    def _fit(self, batch: Any) -> Any:
        """A copy, as the pass may change what it is given."""
        wide = self._wide
        return on_tensors(batch, lambda tensor: _widened(tensor.clone(), wide))

    @torch.no_grad()
    def _reset(self) -> None:
        for _, module, name, live, kept in self._owners:
            live.copy_(kept)
            module._buffers[name] = live
        for parameter in self.model.parameters():
            parameter.grad = None


def _is_narrow(tensor: Tensor, wide: torch.dtype) -> bool:
    return tensor.is_floating_point() and torch.finfo(tensor.dtype).eps > torch.finfo(wide).eps


def _widened(tensor: Tensor, wide: torch.dtype | None) -> Tensor:
    return tensor.to(wide) if wide is not None and _is_narrow(tensor, wide) else tensor


@contextmanager
def trial_model(forward: Forward, seed: int) -> Iterator[TrialModel]:
    """A copy in training mode, computing without autocast, which would hide small differences.

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
