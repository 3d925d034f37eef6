"""Gradients of single samples, clipped one by one, as whole numbers that are then summed.

Nothing that two samples have together is computed before each is clipped and rounded to the grid.
`torch.func` runs the forward pass of one sample for many at once, and an ordinary backward pass
gives the gradients of each; those of plain layers as what the layers read and what is sent back to
them (`taps.py`). Where that gives something else than the samples one by one, or where the content
of one sample shows in the last bits of another's, no layer is plain, and where that does not do
either, samples are computed one by one. Stand-ins of the samples' shapes decide that
(`stand_ins.py`), never samples. Way in: `PerSample`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from instep.data.reading.generators import preserved, seed_all
from instep.errors import RecipeError
from instep.parallel.nested import tensors_in
from instep.privacy.gradients.dividing import flat, samples_of
from instep.privacy.gradients.forbidden import refuse
from instep.privacy.gradients.padding import PaddingKept
from instep.privacy.gradients.products import IN_CACHE, SampleGradients, WholeGradients
from instep.privacy.gradients.stand_ins import STAND_INS, off_start, on_last, stand_ins
from instep.privacy.gradients.taps import CalledOtherwise, Taps
from instep.privacy.grid import MARGIN, Grid

Loss = Callable[[nn.Module, Any], Tensor]
"""From a model and a batch to the mean loss of its samples."""

ROOM = 1 << 26
"""Numbers of the gradients that are computed at once."""

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
        self._taps: dict[tuple[Any, ...], Taps] = {}  # by the shapes of a sample
        self._untapped = Taps(model, ())
        self._tapping = True
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
            self._choose(samples_of(batch, samples, 0, 1))
        before = self._versions()
        found = [
            torch.zeros(each.shape, dtype=torch.int32, device=each.device)
            for each in self._parameters
        ]
        for some, gradients in self._gradients(batch, samples):
            step = max(1, IN_CACHE // max(1, sum(each.size for each in gradients)))
            for first in range(0, some, step):
                stop = min(first + step, some)
                self._add([each.part(first, stop) for each in gradients], found)
        if self._versions() != before:
            raise RecipeError(
                "[privacy]: a buffer or parameter of the model changed in a forward pass, and what "
                "it holds then follows from samples without noise. Use layers that keep nothing of "
                "their inputs."
            )
        return found

    def _gradients(self, batch: Any, samples: int) -> Iterator[tuple[int, list[SampleGradients]]]:
        """Gradients of each parameter, of some samples, and how many these are."""
        if self.batched:
            one = samples_of(batch, samples, 0, 1)
            yield from self._many(batch, samples, 0, samples, self._taps_of(one))
            return
        for place in range(samples):
            self._seed(place)
            alone = self._alone(samples_of(batch, samples, place, place + 1))
            yield 1, [WholeGradients(each[None]) for each in alone]

    def _many(
        self, batch: Any, samples: int, first: int, last: int, taps: Taps
    ) -> Iterator[tuple[int, list[SampleGradients]]]:
        """Those of samples [first, last), as many at once as there is room for."""
        sizes = [n for n, each in enumerate(self._parameters) if n not in taps.covered]
        made = sum(self._parameters[n].numel() for n in sizes) + taps.numbers
        step = max(1, ROOM // max(1, made))
        for begin in range(first, last, step):
            stop = min(begin + step, last)
            self._seed(begin)  # what a pass draws is the same where it is computed once more
            try:
                found = self._together(samples_of(batch, samples, begin, stop), taps)
            except CalledOtherwise:  # layers are called by chance, as in stochastic depth
                yield from self._many(batch, samples, begin, stop, self._untapped)
            else:
                yield stop - begin, found

    def _add(self, gradients: list[SampleGradients], found: list[Tensor]) -> None:
        """Clip each sample's gradient, round it to the grid, and add it."""
        squares = torch.stack([each.squares() for each in gradients])
        norms = squares.sum(0).sqrt()
        limit = self._grid.clip * (1 - MARGIN)
        factors = torch.clamp(limit / norms.clamp_min(1e-300), max=1.0) / self._grid.unit
        factors = torch.where(norms.isfinite(), factors, 0.0)
        for total, each in zip(found, gradients, strict=True):
            each.add_into(total, factors)

    def _taps_of(self, one: Any) -> Taps:
        """The layers that are asked what they read, for samples of such shapes."""
        shapes = tuple((tuple(each.shape), each.dtype) for each in tensors_in(one))
        if not self._tapping:
            return self._untapped
        if shapes not in self._taps:
            self._taps[shapes] = taps = Taps(self._model, self._parameters)
            stand_in = stand_ins(one, 1)
            # stand-ins may be of a kind that the model cannot take
            with preserved(), suppress(Exception):
                seed_all(0)
                taps.look(lambda: self._whole(stand_in))
        return self._taps[shapes]

    def _together(self, batch: Any, taps: Taps) -> list[SampleGradients]:
        """Gradients of samples that each went through the model by themselves.

        The forward pass is that of one sample, which `vmap` runs for all, each with parameters and
        zeros of its own. So the backward pass of the sum of their losses sends to each sample's own
        what its loss alone sends back, and needs no `vmap`.
        """
        tensors, rebuilt = flat(batch)
        some = len(tensors[0])
        held = {
            place: each.detach().expand(some, *each.shape).requires_grad_()
            for place, each in enumerate(self._parameters)
            if place not in taps.covered
        }
        rest = {
            place: each.detach() for place, each in enumerate(self._parameters) if place not in held
        }
        added = taps.zeros(some)

        def of_one(
            values: dict[int, Tensor], zeros: list[Tensor], *one: Tensor
        ) -> tuple[Tensor, dict[int, Tensor]]:
            alone = rebuilt([each.unsqueeze(0) for each in one])
            pairs = ((self._names[place], value) for place, value in (rest | values).items())
            named = {f"model.{name}": value for names, value in pairs for name in names}
            with taps.adding(zeros) as read:
                # tied ones are named; torch's own way leaves a layer that is used twice replaced
                found = functional_call(self._whole, named, (alone,), tie_weights=False)
            assert isinstance(found, Tensor)
            return found.reshape(()), {place: each.detach() for place, each in read.items()}

        with _as_vmap_can(), torch.enable_grad():
            losses, read = vmap(of_one, randomness="different")(held, added, *tensors)
            slopes = torch.autograd.grad(
                losses.sum(), [*held.values(), *added], materialize_grads=True
            )
        whole = dict(zip(held, slopes, strict=False))
        sent = slopes[len(held) :]
        found: dict[int, SampleGradients] = {}
        seen = {each.untyped_storage().data_ptr() for each in (*sent, *read.values())}
        for place, each in whole.items():  # two that are added have one gradient, in one memory
            own = each.contiguous()
            own = own.clone() if own.untyped_storage().data_ptr() in seen else own
            seen.add(own.untyped_storage().data_ptr())
            found[place] = WholeGradients(own)
        found |= taps.gradients(read, sent)
        return [found[place] for place in range(len(self._parameters))]

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

    def _choose(self, one: Any) -> None:
        """Compare, on stand-ins of samples of this shape, in eval mode: then nothing is drawn."""
        some = stand_ins(one, STAND_INS)
        self._taps_of(one)  # as layers are called in train mode
        trained = [each for each in self._model.modules() if each.training]
        self._model.eval()
        try:
            self.why = self._differs_anywhere(some)
            if self.why:
                self._tapping = False
                self.why = self._differs_anywhere(some)
            self._compare_losses(some)
        except Exception as error:  # stand-ins may be of a kind that the model cannot take
            self.why = f"it cannot be tried on other samples: {type(error).__name__}"
        finally:
            for each in trained:
                each.training = True
        self.why = self.why or self._fails(some)
        self.batched = not self.why

    def compared(self) -> str:
        """A sentence where the loss of several samples is not the mean of those of each; once."""
        said, self._compared = self._compared, ""
        return said

    def _compare_losses(self, some: Any) -> None:
        """Look whether the loss says something of several samples that none has alone."""
        try:
            together = float(self._whole(some))
        except Exception:  # it may take one sample alone
            return
        losses = [
            float(self._whole(samples_of(some, STAND_INS, n, n + 1))) for n in range(STAND_INS)
        ]
        mean = sum(losses) / STAND_INS
        if abs(together - mean) > _NEAR * (abs(together) + abs(mean)):
            self._compared = (
                "the loss of several samples is not the mean of their losses: [privacy] trains on "
                "the loss of each sample alone, so what the loss compares between samples, or "
                "weighs, is not trained. Have compute_loss be a mean over samples."
            )

    def _fails(self, some: Any) -> str:
        """The reason why samples cannot be computed at once in train mode, if they cannot."""
        taps = self._taps_of(samples_of(some, STAND_INS, 0, 1))
        try:
            for _ in self._many(some, STAND_INS, 0, STAND_INS, taps):
                pass
        except Exception as error:
            return f"torch.func cannot, in train mode: {type(error).__name__}"
        return ""

    def _differs_anywhere(self, some: Any) -> str:
        if why := self._differs(some):
            return why
        with off_start(self._parameters), suppress(Exception):  # it may not take such values
            why = self._differs(some)
        return why

    def _differs(self, some: Any) -> str:
        places = range(STAND_INS)
        apart = [self._alone(samples_of(some, STAND_INS, n, n + 1)) for n in places]
        try:
            taps = self._taps_of(samples_of(some, STAND_INS, 0, 1))
            together = [each.whole() for each in self._together(some, taps)]
            changed = [each.whole() for each in self._together(on_last(some), taps)]
        except Exception as error:  # whatever a user's model raises within vmap
            return f"torch.func cannot: {type(error).__name__}"
        for place, alone in enumerate(apart):
            norm = float(torch.stack([each.norm() for each in alone]).norm())
            if not math.isfinite(norm):
                continue
            pairs = zip(together, alone, strict=True)
            apart_by = [(t[place].reshape(each.shape) - each).norm() for t, each in pairs]
            away = float(torch.stack(apart_by).norm())
            if not away <= _NEAR * norm:
                return "torch.func gives other gradients"
        for one, two in zip(together, changed, strict=True):
            if not torch.equal(one[:-1].nan_to_num(), two[:-1].nan_to_num()):
                return "the content of one sample shows in the last bits of another's gradient"
        return ""


@contextmanager
def _as_vmap_can() -> Iterator[None]:
    """Attention by kernels that `vmap` has rules for, and padding rows that it forgets; and nothing
    is computed once more in the backward pass, where samples would be together."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with (
            sdpa_kernel(SDPBackend.MATH),
            disable_saved_tensors_hooks("one by one"),
            PaddingKept(),
        ):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class _WithLoss(nn.Module):
    """A model whose forward pass gives the loss, so that its parameters can be replaced."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model = model
        self._loss = loss

    def forward(self, batch: Any) -> Tensor:
        return self._loss(self.model, batch)


def names_of(model: nn.Module, parameters: Sequence[nn.Parameter]) -> list[list[str]]:
    """The names of each parameter, one for each layer that has it."""
    found: dict[int, list[str]] = {id(each): [] for each in parameters}
    for path, layer in model.named_modules():
        for name, each in layer.named_parameters(recurse=False, remove_duplicate=False):
            if id(each) in found:
                found[id(each)].append(f"{path}.{name}" if path else name)
    return [found[id(each)] for each in parameters]
