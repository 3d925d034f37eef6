"""Small stand-ins for a model's parameters, and the recipe's optimizers for them.

What an optimizer does with numbers does not depend on how many there are. So it is tried, before
the first step, on parameters with the model's names and few elements, and with made-up gradients:
that costs neither passes nor memory. Optimizers and schedulers of torch are known, and not tried
where they call nothing of the user's.
"""

from __future__ import annotations

import copy
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer, lr_scheduler

from instep.data.order import key
from instep.data.reading.generators import preserved
from instep.job.start import StartSpec
from instep.recipe.build import Built, build_optimizer, set_generators
from instep.recipe.isolated import isolated
from instep.recipe.optimizers.combined import parts_of, step_hooks
from instep.recipe.optimizers.plateau import Plateau
from instep.recipe.recipe import Recipe
from instep.recipe.tuning import NOTHING, Begun
from instep.usercode.places import places

SMALL, _SIDE = 1024, 16
"""Elements up to which a parameter keeps its shape; above, the longest that a dimension is."""

_COPIED = 20_000_000
"""Parameters up to which a whole model is copied."""

STEADY = frozenset(
    (
        *(optim.ASGD, optim.Adadelta, optim.Adafactor, optim.Adagrad, optim.Adam, optim.AdamW),
        *(optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
        optim.SparseAdam,
    )
)
"""Their state dict has all that they keep, and they do not amplify rounding."""

_KEPT = STEADY | {optim.Muon}

_CALLING = lr_scheduler.LambdaLR, lr_scheduler.MultiplicativeLR
"""Schedulers that call functions of the user's."""

_METHODS = frozenset(("step", "get_lr", "state_dict", "load_state_dict"))


_MOST, _WORK = 12, 2000
"""Steps at most, for what happens every few of them; fewer where so many single updates are
done."""


class StandIn(NamedTuple):
    """Parameters, and what moves them."""

    model: nn.Module
    """Has them, and little else where that is enough."""
    parameters: dict[str, nn.Parameter]
    """By their names in the model; those that are trained."""
    made: Sequence[tuple[Optimizer, Any]]
    """Optimizers, each with its scheduler; one, or those of the turns."""

    @property
    def steps(self) -> int:
        """Number of steps that are tried."""
        return max(2, min(_MOST, _WORK // len(self.parameters)))

    @property
    def kept(self) -> bool:
        """Whether it is known that a checkpoint has all that these keep."""
        return all(_known(*each) for each in self.made)

    @property
    def optimizers(self) -> list[Optimizer]:
        """Those of the recipe, one by one."""
        return [part for optimizer, _ in self.made for part in parts_of(optimizer)]

    @property
    def called(self) -> Iterator[Any]:
        """Code that decides of steps, beside the objects that state dicts are of: classes, hooks
        before steps, and functions of schedulers."""
        for optimizer, scheduler in self.made:
            for each in (optimizer, *parts_of(optimizer)):
                yield type(each)
                yield from step_hooks(each)[0]
            if scheduler is not None:
                yield type(scheduler)
                yield from vars(scheduler).values()

    @property
    def called_after(self) -> Iterator[Any]:
        """Hooks after steps. Mostly they follow the model for a person; what a loss reads of what
        they change decides of later steps."""
        for optimizer, _ in self.made:
            for each in (optimizer, *parts_of(optimizer)):
                yield from step_hooks(each)[1]

    @property
    def stateful(self) -> list[Any]:
        """Objects that state dicts are of."""
        made = [each for pair in self.made for each in pair if each is not None]
        return [*made, *self.optimizers]

    def step(self, gradients: Iterable[tuple[str, Tensor]], number: int, seed: int) -> None:
        """Take a step of all, and of their schedulers."""
        for name, gradient in gradients:
            self.parameters[name].grad = gradient
        with _quiet():
            for optimizer, scheduler in self.made:
                set_generators(key(seed, number))
                optimizer.step()
                if scheduler is not None:
                    scheduler.step()


class Maker:
    """Makes stand-ins, each with an optimizer of its own.

    Args:
        recipe: of the user.
        model: has the parameters, which are not read.
        seed: of the job.
        steps: of the whole run, for schedulers.
        start: learning rates.
        begun: what the model was loaded from and has adapters of.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        seed: int,
        steps: int,
        start: StartSpec | None = None,
        begun: Begun = NOTHING,
    ) -> None:
        self._recipe, self._model, self.seed = recipe, model, seed
        self._given = steps, start, begun
        self._small, self._whole = True, bool(recipe.turns or recipe.parameters)
        self._sparse = {
            f"{prefix}.weight".lstrip(".")
            for prefix, module in model.named_modules()
            if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
        }

    def copy_models(self) -> bool:
        """Give the optimizers whole copies of the model from now on, as their hooks may want it.

        Returns:
            Whether that is new, and the model small enough for it.
        """
        new = self._small and sum(p.numel() for p in self._model.parameters()) <= _COPIED
        if new:
            self._small, self._whole = False, True
        return new

    def make(self) -> StandIn:
        """One more; equal to the one before.

        Raises:
            Exception: of whatever kind, the recipe's functions need the model itself.
        """
        memo: dict[int, Any] = {}
        for number, (name, own) in enumerate(self._model.named_parameters()):
            seed = key(self.seed, number, zlib.crc32(name.encode()))
            memo[id(own)] = _made_up(own, self._shape(own), seed)
        for buffer in self._model.buffers():
            memo[id(buffer)] = torch.zeros(self._shape(buffer), dtype=buffer.dtype)
        recipe = self._recipe
        model = copy.deepcopy(self._model, memo) if self._whole else _names_alone(self._model, memo)
        memo.setdefault(id(self._model), model)
        anew = object.__new__(Recipe)  # its checks are of the user's own
        vars(anew).update(vars(recipe))
        names = ("optimizer", "scheduler", "parameters", "turns")
        for name, own in zip(
            names, isolated([getattr(recipe, name) for name in names], memo), strict=True
        ):
            object.__setattr__(anew, name, own)
        with preserved(), _quiet():
            built = build_optimizer(anew, model, *self._given)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        return StandIn(model, parameters, _made(built))

    def shared_with_losses(self) -> set[str]:
        """Find the names of what the losses read that functions of the optimizer may change."""
        recipe = self._recipe
        made = (recipe.optimizer, recipe.scheduler, recipe.parameters)
        changed = {
            (id(place.space), place.key)
            for place in places([each for each in made if each is not None], (self._model,))
        }
        losses = [recipe.loss, recipe.compute_loss, recipe.embed, recipe.batch_loss, recipe.weight]
        losses += [turn.compute_loss for turn in recipe.turns]
        named = places([each for each in losses if each is not None], (self._model,))
        return {place.name for place in named if (id(place.space), place.key) in changed}

    def gradients(self, number: int, *, rank: int = 0) -> Iterator[tuple[str, Tensor]]:
        """Made up, as large as gradients are.

        Args:
            number: of the step.
            rank: of those that are matrices, as gradients of a few samples have it; 0 for any.
        """
        for name, own in self._model.named_parameters():
            if not own.requires_grad:
                continue
            shape, seed = self._shape(own), key(self.seed, zlib.crc32(name.encode()), number)
            noise = torch.Generator().manual_seed(seed)
            made = torch.randn(shape, generator=noise, dtype=torch.float64) / 10
            if rank and len(shape) > 1 and min(shape) > rank:
                flat = made.reshape(shape[0], -1)
                by = torch.randn(rank, flat.shape[1], generator=noise, dtype=torch.float64)
                made = (flat[:, :rank] @ by).reshape(shape)
            made = made.to(own.dtype)
            yield name, made.to_sparse(1) if name in self._sparse else made

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        if tensor.numel() <= SMALL or not self._small:
            return tuple(tensor.shape)
        longest = _SIDE if tensor.dim() > 1 else _SIDE * _SIDE
        return tuple(min(size, longest) for size in tensor.shape)


def known(built: Built) -> bool:
    """Whether there is nothing to try: all optimizers and schedulers are of torch."""
    made = _made(built)
    return all(_known(*each) and steady(each[0]) for each in made)


def steady(optimizer: Optimizer) -> bool:
    """Whether an optimizer is known not to amplify rounding."""
    return all(type(each) in STEADY and not hooked(each) for each in parts_of(optimizer))


def hooked(optimizer: Optimizer) -> bool:
    """Whether something is called before or after its steps, or in their place."""
    if any(step_hooks(optimizer)):
        return True
    step = vars(optimizer).get("step")  # schedulers of torch count its calls there
    counted = getattr(step, "_wrapped_by_lr_sched", False)
    return step is not None and not (counted and step.__wrapped__ is type(optimizer).step)


def _without_own_code(scheduler: Any) -> bool:
    """Whether a scheduler and those within it are of torch, and call no function of the user's."""
    if isinstance(scheduler, Plateau):
        return True
    if type(scheduler).__module__ != lr_scheduler.__name__ or type(scheduler) in _CALLING:
        return False
    own = vars(scheduler)
    replaced = own.get("_scale_fn_custom") is not None or not own.keys().isdisjoint(_METHODS)
    return not replaced and all(map(_without_own_code, own.get("_schedulers", ())))


def _known(optimizer: Optimizer, scheduler: Any) -> bool:
    every = [optimizer, *parts_of(optimizer)]
    kept = all(type(each) in _KEPT for each in every[1:]) and not any(map(hooked, every))
    return kept and (scheduler is None or _without_own_code(scheduler))


def _made(built: Built) -> list[tuple[Optimizer, Any]]:
    turns = [(turn.optimizer, turn.scheduler) for turn in built.turns]
    return turns or [(built.optimizer, built.scheduler)]


def _made_up(own: nn.Parameter, shape: tuple[int, ...], seed: int) -> nn.Parameter:
    noise = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=noise, dtype=torch.float64) / 10
    made = nn.Parameter(values.to(own.dtype), own.requires_grad)
    vars(made).update(vars(own))  # what the user has marked it with
    return made


def _names_alone(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A model that has nothing but parameters, by the same names."""
    shell = nn.Module()
    for name, own in model.named_parameters(remove_duplicate=False):
        *path, last = name.split(".")
        at = shell
        for each in path:
            if each not in at._modules:
                at.add_module(each, nn.Module())
            inside = at._modules[each]
            assert inside is not None
            at = inside
        at.register_parameter(last, memo[id(own)])
    return shell


@contextmanager
def _quiet() -> Iterator[None]:
    """Optimizers and schedulers that are made to be thrown away warn nobody, and use one thread:
    what they compute is small, and others wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)
