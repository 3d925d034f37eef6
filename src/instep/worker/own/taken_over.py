"""The optimizer, scheduler and scaler of an own loop: their methods go through the loop.

They stay the objects that they are, so what else refers to them keeps working. What a call
means in which iteration is the loop's affair (`loop.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ExitStack
from types import MethodType
from typing import Any, Protocol

from torch.optim import Optimizer

from instep.engine.state.committed import CommittedState
from instep.errors import SpecError
from instep.recipe.optimizers.two_points import TwoPoints

_SAID = (
    "(its step() is taken over by instep: it moves once all processes have agreed on a gradient)"
)


class Takes(Protocol):
    """Loop that calls of optimizer, scheduler and scaler go through."""

    optimizer: Optimizer
    scheduler: Any
    scaler: Any

    @property
    def state(self) -> CommittedState:
        """State as of the last commit."""

    def optimizer_step(self, move: Callable[[], Any]) -> None:
        """Take `optimizer.step()`, or `scaler.step(optimizer)`."""

    def zeroed(self, *, to_none: bool) -> None:
        """Take `optimizer.zero_grad()`."""

    def scheduler_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take `scheduler.step()`."""

    def after_move(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Take `scaler.update()`."""

    def unscale(self, original: Callable[..., Any]) -> None:
        """Take `scaler.unscale_(optimizer)`."""


def take_over(loop: Takes) -> Callable[[], None]:
    """Have `optimizer.step` and its kin go through the loop; returns what undoes it."""
    undo = ExitStack()
    _take_optimizer(loop, undo)
    if points := loop.state.two_points:  # the user's code switches, to validate
        _take_switches(loop.optimizer, points, undo)
    if loop.scheduler is not None:
        _take_scheduler(loop, undo)
    if loop.scaler is not None:
        _take_scaler(loop, undo)
    return undo.close


def _take(owner: Any, name: str, ours: Callable[..., Any], undo: ExitStack) -> Any:
    """Put another method into an object; returns the one that it had."""
    raw, was = getattr(owner, name), owner.__dict__.get(name)
    # the attributes too: a scheduler made before has marked the method
    wrapped = functools.wraps(getattr(raw, "__func__", raw))(ours)
    setattr(owner, name, MethodType(wrapped, owner))
    if was is None:
        undo.callback(delattr, owner, name)
    else:
        undo.callback(setattr, owner, name, was)
    return raw


def _become(changed: Any, kind: type, undo: ExitStack) -> None:
    """Change the class of an object to one that differs in methods only."""
    undo.callback(setattr, changed, "__class__", type(changed))
    changed.__class__ = kind


def _take_optimizer(loop: Takes, undo: ExitStack) -> None:
    optimizer = loop.optimizer

    def step(_: Any, closure: Any = None) -> None:
        if closure is not None:
            raise SpecError(
                "optimizer.step(closure): the workers agree on the gradient before the optimizer "
                "moves, so it cannot ask for another. Compute the loss in the loop, call "
                "backward(), then optimizer.step()."
            )
        loop.optimizer_step(raw_step)

    def zero_grad(_: Any, set_to_none: bool = True) -> None:
        loop.zeroed(to_none=set_to_none)
        raw_zero(set_to_none)

    raw_step = _take(optimizer, "step", step, undo)
    raw_zero = _take(optimizer, "zero_grad", zero_grad, undo)
    _become(optimizer, saying_so(type(optimizer)), undo)


def _take_switches(optimizer: Optimizer, points: TwoPoints, undo: ExitStack) -> None:
    def train(_: Any, *args: Any, **kwargs: Any) -> Any:
        done = raw_train(*args, **kwargs)
        points.at_result = False
        return done

    def evaluate(_: Any, *args: Any, **kwargs: Any) -> Any:
        done = raw_eval(*args, **kwargs)
        points.at_result = True
        return done

    raw_train = _take(optimizer, "train", train, undo)
    raw_eval = _take(optimizer, "eval", evaluate, undo)


def _take_scheduler(loop: Takes, undo: ExitStack) -> None:
    def advance(_: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.scheduler_step(raw_advance, *args, **kwargs)

    # in a class of its own: a scheduler's state dict has every attribute of the instance
    raw_advance, kind = loop.scheduler.step, type(loop.scheduler)
    step = functools.wraps(kind.step)(advance)
    members = {"step": step, "__module__": kind.__module__}
    _become(loop.scheduler, type(kind.__name__, (kind,), members), undo)


def _take_scaler(loop: Takes, undo: ExitStack) -> None:
    optimizer, scaler = loop.optimizer, loop.scaler

    def scaled_step(_: Any, moved: Any, *args: Any, **kwargs: Any) -> None:
        if moved is not optimizer:  # the loop's hook names it
            raw_scaled(moved, *args, **kwargs)
            return
        loop.optimizer_step(lambda: raw_scaled(moved, *args, **kwargs))

    def update(_: Any, *args: Any, **kwargs: Any) -> Any:
        return loop.after_move(raw_update, *args, **kwargs)

    def unscale(_: Any, optimizer: Any) -> None:
        loop.unscale(raw_unscale)

    raw_scaled = _take(scaler, "step", scaled_step, undo)
    raw_update = _take(scaler, "update", update, undo)
    raw_unscale = _take(scaler, "unscale_", unscale, undo)


def saying_so(kind: type[Optimizer]) -> type[Optimizer]:
    """A class of optimizers like this one, whose `repr` tells that instep calls their `step`.

    Pickled and copied, they are of the class that they were.
    """

    def said(self: Optimizer) -> str:
        return f"{kind.__repr__(self)}\n{_SAID}"

    def reduced(self: Optimizer, protocol: Any) -> Any:
        reduce: Any = kind.__reduce_ex__
        call, (_, *more), *rest = reduce(self, protocol)
        if call.__name__ == "__newobj__":  # with which pickle wants the class that this is
            call = object.__new__
        return call, (kind, *more), *rest

    members = {"__repr__": said, "__reduce_ex__": reduced, "__module__": kind.__module__}
    return type(kind.__name__, (kind,), {**members, "__qualname__": kind.__qualname__})
