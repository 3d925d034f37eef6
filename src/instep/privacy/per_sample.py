"""Gradients of single samples, clipped one by one, as whole numbers that are then summed.

Nothing that two samples have together is computed before each is clipped and rounded to the grid.
`torch.func` computes the gradients of many samples at once. Where it cannot, or where it gives
something else than the samples one by one, or where the content of one sample shows in the last
bits of another's, they are computed one by one. Way in: `PerSample`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from instep.errors import RecipeError
from instep.parallel.nested import leaves, on_tensors, tensors_in
from instep.privacy.grid import MARGIN, Grid

Loss = Callable[[nn.Module, Any], Tensor]
"""From a model and a batch to the mean loss of its samples."""

ROOM = 1 << 26
"""Numbers of the gradients that are computed at once."""

_FEW = 1 << 12
"""Numbers of a parameter, below which samples are added at once."""

_TRIED = 4
"""Samples on which `torch.func` is compared with one by one."""

_NEAR = 1e-4
"""How far their gradients may be apart, relative to their norm."""


class PerSample:
    """Sums of clipped gradients.

    Args:
        model: in train mode; of float32.
        parameters: whose gradients are wanted.
        loss: of a batch; it is called with one sample at a time.
        grid: on which they are summed.
        seed: called with a sample's number within its micro-batch before it is computed alone.

    Raises:
        RecipeError: the model has a part that looks at other samples, or remembers them.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        loss: Loss,
        grid: Grid,
        seed: Callable[[int], None] = lambda number: None,
    ) -> None:
        refuse(model, parameters)
        self._model, self._parameters, self._grid = model, list(parameters), grid
        self._seed = seed
        self._names = names_of(model, parameters)
        self._whole = _WithLoss(model, loss)
        self._at_once = max(1, ROOM // max(1, grid.numbers))
        self.batched: bool | None = None
        """Whether samples are computed at once; None before the first."""
        self.why = ""
        """The reason why not."""
        self._compared = ""

    @torch.no_grad()
    def sums(self, batch: Any, samples: int) -> list[Tensor]:
        """The sum over the samples of a micro-batch of their clipped gradients.

        Args:
            batch: nested tensors, [samples, ...] each.
            samples: 1 or more.

        Returns:
            Of each parameter, whole numbers of the grid's units, int32. A sample whose gradient is
            not finite counts as nothing.

        Raises:
            RecipeError: the batch has something that is not of each sample, or a buffer or
                parameter moved.
        """
        if self.batched is None:
            self._choose(batch, samples)
        before = self._versions()
        found = [torch.zeros_like(each, dtype=torch.float64) for each in self._parameters]
        for gradients in self._gradients(batch, samples):
            for total, each in zip(found, self._on_grid(gradients), strict=True):
                if total.numel() < _FEW:
                    total += each.sum(0, dtype=torch.float64)
                    continue
                for one in each:  # quicker where they are long, and as exact: they are whole
                    total += one
        if self._versions() != before:
            raise RecipeError(
                "[privacy]: a buffer or parameter of the model changed in a forward pass, and what "
                "it holds then follows from samples without noise. Use layers that keep nothing of "
                "their inputs."
            )
        return [each.to(torch.int32) for each in found]

    def _gradients(self, batch: Any, samples: int) -> Iterator[list[Tensor]]:
        """[some, *shape] of each parameter, a few samples at a time."""
        step = self._at_once if self.batched else 1
        for first in range(0, samples, step):
            some = _samples(batch, samples, first, min(first + step, samples))
            if self.batched:
                yield self._together(some)
            else:
                self._seed(first)
                yield [each[None] for each in self._alone(some)]

    def _on_grid(self, gradients: list[Tensor]) -> list[Tensor]:
        """Clip each sample's gradient, and round it to the grid; in place."""
        norms = torch.stack([_norms(each) for each in gradients]).square().sum(0).sqrt()
        limit = self._grid.clip * (1 - MARGIN)
        factors = torch.clamp(limit / norms.clamp_min(1e-300), max=1.0)
        factors = (factors / self._grid.unit).to(torch.float32)
        finite = norms.isfinite()
        if not finite.all():
            factors = torch.where(finite, factors, torch.zeros_like(factors))
        for each in gradients:
            if not finite.all():
                each[~finite] = 0.0
            each.mul_(factors.to(each.device).view(-1, *[1] * (each.dim() - 1))).round_()
        return gradients

    def _together(self, batch: Any) -> list[Tensor]:
        held = [each.detach() for each in self._parameters]
        tensors, rebuilt = _flat(batch)

        def of_one(values: list[Tensor], *one: Tensor) -> Tensor:
            alone = rebuilt([each.unsqueeze(0) for each in one])
            pairs = zip(self._names, values, strict=True)
            named = {f"model.{name}": value for names, value in pairs for name in names}
            # tied ones are named; torch's own way leaves a layer that is used twice replaced
            found = functional_call(self._whole, named, (alone,), tie_weights=False)
            assert isinstance(found, Tensor)
            return found

        axes = (None, *[0] * len(tensors))
        with sdpa_kernel(SDPBackend.MATH):  # vmap has rules for no other
            gradients = vmap(grad(of_one), in_dims=axes, randomness="different")(held, *tensors)
        return [each.contiguous() for each in gradients]

    def _alone(self, batch: Any) -> list[Tensor]:
        with torch.enable_grad():
            loss = self._whole(batch)
            found = torch.autograd.grad(loss, self._parameters, allow_unused=True)
        pairs = zip(found, self._parameters, strict=True)
        return [torch.zeros_like(p) if each is None else each.clone() for each, p in pairs]

    def _versions(self) -> list[tuple[int, int]]:
        held = (*self._model.buffers(), *self._model.parameters())
        return [(id(each), each._version) for each in held]

    # ---- how

    def _choose(self, batch: Any, samples: int) -> None:
        """Compare, on a few samples, in eval mode: then nothing is drawn."""
        few = min(samples, _TRIED)
        some = _samples(batch, samples, 0, few)
        trained = [each for each in self._model.modules() if each.training]
        self._model.eval()
        try:
            apart = [self._alone(_samples(some, few, place, place + 1)) for place in range(few)]
            self.why = self._differs(some, few, apart)
            self._compare_losses(some, few)
        finally:
            for each in trained:
                each.training = True
        self.batched = not self.why

    def compared(self) -> str:
        """A sentence where the loss of several samples is not the mean of those of each; once."""
        said, self._compared = self._compared, ""
        return said

    def _compare_losses(self, some: Any, few: int) -> None:
        """Look whether the loss says something of several samples that none has alone."""
        try:
            together = float(self._whole(some))
        except Exception:  # it may take one sample alone
            return
        each = sum(float(self._whole(_samples(some, few, n, n + 1))) for n in range(few)) / few
        if abs(together - each) > _NEAR * (abs(together) + abs(each)):
            self._compared = (
                "the loss of several samples is not the mean of their losses: [privacy] trains on "
                "the loss of each sample alone, so what the loss compares between samples, or "
                "weighs, is not trained. Have compute_loss be a mean over samples."
            )

    def _differs(self, some: Any, few: int, apart: list[list[Tensor]]) -> str:
        try:
            together = self._together(some)
            if few > 1:
                other = on_last(some, few)
                changed = self._together(other)
        except Exception as error:  # whatever a user's model raises within vmap
            return f"torch.func cannot: {type(error).__name__}"
        for place, alone in enumerate(apart):
            norm = float(torch.stack([each.norm() for each in alone]).norm())
            if not math.isfinite(norm):  # it counts as nothing, and is not to choose for others
                continue
            pairs = zip(together, alone, strict=True)
            away = float(torch.stack([(t[place] - each).norm() for t, each in pairs]).norm())
            if not away <= _NEAR * norm:
                return "torch.func gives other gradients"
        if few > 1:
            for one, two in zip(together, changed, strict=True):
                if not torch.equal(one[: few - 1].nan_to_num(), two[: few - 1].nan_to_num()):
                    return "the content of one sample shows in the last bits of another's gradient"
        return ""


class _WithLoss(nn.Module):
    """A model whose forward pass gives the loss, so that its parameters can be replaced."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def on_last(batch: Any, samples: int) -> Any:
    """A batch whose last sample has the content of its first."""
    tensors, rebuilt = _flat(batch)
    others = [torch.cat([each[: samples - 1], each[:1]]) for each in tensors]
    return rebuilt(others)


def names_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[list[str]]:
    """The names of each parameter, one for each layer that has it."""
    found: dict[int, list[str]] = {id(each): [] for each in parameters}
    for path, layer in model.named_modules():
        for name, each in layer.named_parameters(recurse=False, remove_duplicate=False):
            if id(each) in found:
                found[id(each)].append(f"{path}.{name}" if path else name)
    return [found[id(each)] for each in parameters]


def refuse(model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Refuse what cannot be private.

    Raises:
        RecipeError: a layer looks at other samples, remembers them, or shows which rows it used.
    """
    for name, layer in model.named_modules():
        what = f"layer {name!r} ({type(layer).__name__})"
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            raise RecipeError(
                f"[privacy]: {what} looks at all samples of a batch, so no gradient is of one "
                "sample alone. Use GroupNorm or LayerNorm."
            )
        if getattr(layer, "track_running_stats", False):
            raise RecipeError(
                f"[privacy]: {what} keeps means of its inputs, which would be published without "
                "noise. Set track_running_stats=False."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.max_norm is not None:
            raise RecipeError(
                f"[privacy]: {what} shortens the rows that a batch reads (max_norm), without "
                "noise. Leave max_norm out."
            )
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse:
            raise RecipeError(
                f"[privacy]: {what} has sparse gradients: which rows they have says what was in a "
                "batch. Set sparse=False."
            )
    for name, each in model.named_parameters():
        if any(each is one for one in parameters) and each.dtype != torch.float32:
            raise RecipeError(
                f"[privacy]: parameter {name!r} is of {each.dtype}; float32 is wanted."
            )


def _norms(gradients: Tensor) -> Tensor:
    """[samples] float64, of [samples, ...]."""
    found: Tensor = torch.linalg.vector_norm(gradients.flatten(1), dim=1, dtype=torch.float64)
    return found.cpu()


def _samples(batch: Any, samples: int, first: int, stop: int) -> Any:
    """Samples [first, stop) of a batch."""
    tensors, rebuilt = _flat(batch)
    for each in tensors:
        if not each.dim() or len(each) != samples:
            raise RecipeError(
                f"[privacy]: a batch of {samples} samples has a tensor of shape "
                f"{list(each.shape)}: its first dimension is to be that of the samples, or no "
                "gradient is of one sample alone. Change collate."
            )
    return rebuilt([each[first:stop] for each in tensors])


def _flat(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors of a nested batch, and what makes such a batch of others.

    Raises:
        RecipeError: it has something else than tensors.
    """
    if strange := [each for each in leaves(batch) if not isinstance(each, Tensor)]:
        raise RecipeError(
            f"[privacy]: a batch has a {type(strange[0]).__name__} ({strange[0]!r:.40}) beside its "
            "tensors, which cannot be divided into samples. Have collate leave it out."
        )
    tensors = tensors_in(batch)

    def rebuilt(others: list[Tensor]) -> Any:
        each = iter(others)
        return on_tensors(batch, lambda tensor: next(each))

    return tensors, rebuilt
