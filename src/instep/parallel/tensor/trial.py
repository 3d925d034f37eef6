"""The judge of every cut: each rank's part is computed here and compared with the whole model.

One process computes the parts of all ranks, one after the other. What a rank would get from the
others is taken from a pass of the whole model; what it would send is added up and compared. So a
plan that passes gives each rank what the whole model gives, if the others do their part.

The trial works on a copy: in float64 where the model can, with parameters moved off their start,
where zeros would hide errors.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from instep.errors import RecipeError, one_line
from instep.parallel.blocks import repeated_blocks
from instep.parallel.copies import copied
from instep.parallel.nested import on_tensors, tensors_in
from instep.parallel.tensor.alone import Alone, PlanDiffers, RecordedLinks
from instep.parallel.tensor.apply import install
from instep.parallel.tensor.flow import called_modules, container
from instep.parallel.tensor.masks import CutDraws, around
from instep.parallel.tensor.plan import Draw, Plan

ComputeLoss = Callable[[nn.Module, Any], Tensor]

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5}
"""Largest difference, relative to the norm of what is compared, by the type of the trial."""


_SEED = 20_077


class PlanFound(NamedTuple):
    """What a trial that passed says about the plan."""

    summed: tuple[str, ...]
    draws: dict[str, tuple[Draw | None, ...]]


class PlanTrial:
    """Compares plans with the whole model, on one batch.

    Args:
        model: is not changed.
        compute_loss: from a model and a batch to a scalar.
        batch: of any nesting.
        ranks: of the tensor axis.
        whole: names of modules that every rank has to call with whole tensors.
    """

    def __init__(
        self,
        model: nn.Module,
        compute_loss: ComputeLoss,
        batch: Any,
        ranks: int,
        whole: Collection[str] = (),
    ) -> None:
        self.ranks = ranks
        self._compute_loss, self._called_whole = compute_loss, whole
        self._largest = 0.0
        try:
            self._prepare(model, batch, torch.float64)
            self.run()
        except (RuntimeError, TypeError, ValueError):  # it has float32 tensors of its own
            self._prepare(model, batch, torch.float32)
        self._evaluates_with_gradients = False
        try:
            self._whole, _ = self._compute()
        except RuntimeError:  # the loss may take derivatives by the inputs, also in evaluation
            self._evaluates_with_gradients = True
            self._whole, _ = self._compute()
        norms = [float(each.norm()) for each in self._whole.grads.values() if each is not None]
        self._largest = max(norms, default=0.0)
        self.called = called_modules(self.model, self.run)

    def _prepare(self, model: nn.Module, batch: Any, dtype: torch.dtype) -> None:
        self.dtype = dtype
        try:
            own = copied(model)
        except Exception as error:  # a user's module may raise anything
            raise RecipeError(
                f"[mesh] tensor = {self.ranks}: the model cannot be copied to try how it can be "
                f"cut ({type(error).__name__}: {one_line(error)}). Make it such that "
                "copy.deepcopy(model) works, or use another [mesh]."
            ) from error
        self.model = _moved(own.to(dtype))
        self._buffers = [(each, each.clone()) for each in self.model.buffers()]
        self._modes = {module: module.training for module in self.model.modules()}
        self._batch = on_tensors(
            batch, lambda each: each.to(dtype) if each.is_floating_point() else each
        )

    def run(self) -> Tensor:
        """The loss of one pass, with gradients on, always from the same random state."""
        with self._same_start():
            return self._compute_loss(self.model, self._batch)

    def check(self, plan: Plan) -> PlanFound:
        """Compute what each rank would, and compare.

        Raises:
            Failed: it differs from the whole model, or cannot be computed.
        """
        plan = replace(plan, summed=())
        regions, record = self._regions(plan), RecordedLinks()
        undo = install(self.model, replace(plan, edits={}), record, lambda whole, dim: whole)
        try:
            same, _ = self._compute(regions, record.draws)
        except RecipeError as error:
            raise PlanDiffers(str(error)) from error
        finally:
            undo()
        self._compare("the loss", torch.tensor(same.loss), torch.tensor(self._whole.loss))
        ranks = [Alone(rank, self.ranks, record, plan.draws) for rank in range(self.ranks)]
        summed: set[str] = set()
        totals: dict[str, Tensor] = {}
        for links in ranks:
            summed |= self._one_rank(plan, regions, links, totals)
        record.compare(ranks, self._compare)
        for name in summed:
            self._compare(f"the gradient of {name}", totals[name], self._gradient(name))
        self._all_through_copies(replace(plan, summed=tuple(sorted(summed))), regions, record)
        return PlanFound(tuple(sorted(summed)), ranks[0].draws_found())

    def _all_through_copies(self, plan: Plan, regions: set[str], record: RecordedLinks) -> None:
        """Whether gradients to be summed come only from calls of the parameters' own modules."""
        if plan.summed:
            links = Alone(0, self.ranks, record, plan.draws)
            result, _ = self._on_rank(plan, regions, links, {})
            for name in plan.summed:
                if result.grads[name] is not None:
                    raise PlanDiffers(f"{name} is read without a call of its module")

    def _one_rank(
        self, plan: Plan, regions: set[str], links: Alone, totals: dict[str, Tensor]
    ) -> set[str]:
        """Compare one rank; returns the whole parameters whose gradient differs, and adds up."""
        dims: dict[nn.Parameter, int] = {}
        result, parameters = self._on_rank(plan, regions, links, dims)
        for name, shapes in self._whole.given.items():
            if result.given[name] != shapes:
                raise PlanDiffers(
                    f"{name!r}, where a stage begins, is called with a part of a tensor"
                )
        self._compare("the loss", torch.tensor(result.loss), torch.tensor(self._whole.loss))
        self._compare(
            "the loss in eval mode",
            torch.tensor(result.evaluated),
            torch.tensor(self._whole.evaluated),
        )
        for given, wanted in zip(result.outputs, self._whole.outputs, strict=False):
            self._compare("what the model gives", given, wanted)
        differ = set()
        for name in self._whole.grads:
            grad, parameter = result.grads[name], parameters[name]
            grad = torch.zeros_like(parameter) if grad is None else grad
            whole = self._gradient(name)
            if parameter in dims:
                first, stop = links.part(whole.shape[dims[parameter]])
                whole = whole.narrow(dims[parameter], first, stop - first)
                self._compare(f"the gradient of {name}", grad, whole)
                continue
            totals[name] = totals.get(name, torch.zeros_like(whole)) + grad
            try:
                self._compare(f"the gradient of {name}", grad, whole)
            except PlanDiffers:
                differ.add(name)
        return differ

    def _on_rank(
        self, plan: Plan, regions: set[str], links: Alone, dims: dict[nn.Parameter, int]
    ) -> tuple[_Pass, dict[str, nn.Parameter]]:
        """What one rank computes, and its parameters; notes the dimension in which each is cut."""

        def place(whole: nn.Parameter, dim: int) -> nn.Parameter:
            first, stop = links.part(whole.shape[dim])
            part = nn.Parameter(whole.detach().narrow(dim, first, stop - first))
            dims[part] = dim
            return part

        undo = install(self.model, plan, links, place)
        try:
            return self._compute(regions, links.draws)
        except PlanDiffers:
            raise
        except Exception as error:  # whatever the user's model raises when shapes do not fit
            raise PlanDiffers(f"it cannot be computed: {one_line(error)}") from error
        finally:
            undo()

    def _compute(
        self, regions: Collection[str] = (), draws: Callable[[str], CutDraws] | None = None
    ) -> tuple[_Pass, dict[str, nn.Parameter]]:
        """Losses and gradients of the model as it is now, and its parameters."""
        outputs: list[Tensor] = []
        kept = self.model.register_forward_hook(lambda *each: _keep(outputs, each[-1]))
        undo: list[Callable[[], None]] = [kept.remove]
        given: dict[str, list[torch.Size]] = {name: [] for name in self._called_whole}
        for name, shapes in given.items():
            undo.append(
                self.model.get_submodule(name)
                .register_forward_pre_hook(
                    lambda _, args, kwargs, s=shapes: s.extend(_shapes((args, kwargs))),
                    with_kwargs=True,
                )
                .remove
            )
        for name in regions:
            module = self.model.get_submodule(name)
            assert draws is not None
            undo.append(around(module, partial(draws, name)))
            undo.append(module.register_forward_hook(_no_fast_path).remove)
        parameters = dict(self.model.named_parameters())
        try:
            self.model.zero_grad(set_to_none=True)
            loss = self.run()
            loss.backward()
            grads = {name: _dense(each.grad) for name, each in parameters.items()}
            self.model.eval()
            with torch.set_grad_enabled(self._evaluates_with_gradients), self._same_start():
                evaluated = float(self._compute_loss(self.model, self._batch))
        finally:
            for module, mode in self._modes.items():
                module.training = mode
            self.model.zero_grad(set_to_none=True)
            for each in reversed(undo):
                each()
        return _Pass(float(loss.detach()), evaluated, grads, outputs, given), parameters

    def _gradient(self, name: str) -> Tensor:
        grad = self._whole.grads[name]
        return torch.zeros_like(self.model.get_parameter(name)) if grad is None else grad

    def _regions(self, plan: Plan) -> set[str]:
        groups: dict[str, set[str]] = defaultdict(set)
        for name, cut in plan.cuts.items():
            groups[cut.group].add(name)
        regions = {
            container(names, self.called)
            for group, names in groups.items()
            if any(plan.cuts[name].style == "column" for name in names)
        }
        if plan.sequence:  # residuals are cut too
            blocks = repeated_blocks(self.model).keys() & self.called
            within = tuple(f"{region}." for region in regions)
            regions |= {"", *(each for each in blocks if not each.startswith(within))}
        return regions

    def _compare(self, what: str, given: Tensor, wanted: Tensor) -> None:
        if given.shape != wanted.shape:
            raise PlanDiffers(
                f"{what} has shape {list(given.shape)} instead of {list(wanted.shape)}"
            )
        allowed = TOLERANCE[self.dtype]
        if not wanted.is_floating_point():
            given, wanted = given.float(), wanted.float()
        norm = float(wanted.norm())
        floor = 0.1 * self._largest if "gradient" in what else 0.0
        away = 0.0 if given.equal(wanted) else float((given - wanted).norm())
        if not away <= allowed * max(norm, floor):
            raise PlanDiffers(f"{what} differs by {away:.1e} of {norm:.1e}")

    @contextmanager
    def _same_start(self) -> Iterator[None]:
        with torch.no_grad():
            for buffer, value in self._buffers:
                if buffer.shape != value.shape:  # the last pass gave it its shape
                    buffer.data = torch.empty_like(value)
                buffer.copy_(value)
        others = random.getstate(), np.random.get_state()
        random.seed(_SEED)
        np.random.seed(_SEED)
        try:
            with torch.random.fork_rng():
                torch.manual_seed(_SEED)
                yield
        finally:
            random.setstate(others[0])
            np.random.set_state(others[1])


class _Pass(NamedTuple):
    loss: float
    evaluated: float
    grads: dict[str, Tensor | None]
    outputs: list[Tensor]
    """What the model gave, in all passes."""
    given: dict[str, list[torch.Size]]
    """Shapes of what the modules were called with that are to be called with whole tensors."""


def _no_fast_path(*_: Any) -> None:
    """torch's encoder calls all its layers in eval mode too if one of them has a hook."""


def _dense(grad: Tensor | None) -> Tensor | None:
    return grad.to_dense() if grad is not None and grad.is_sparse else grad


def _shapes(value: Any) -> list[torch.Size]:
    return [each.shape for each in tensors_in(value)]


def _keep(outputs: list[Tensor], made: Any) -> None:
    outputs += [each.detach().clone() for each in tensors_in(made)]


def _moved(model: nn.Module) -> nn.Module:
    """With all parameters trained, and moved off their start."""
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator).to(parameter)
                spread = float(parameter.std()) if parameter.numel() > 1 else 0.0
                parameter.add_(noise, alpha=0.02 + 0.1 * spread)
                parameter.requires_grad_(True)
    return model
