"""The optimizer, scheduler and scaler of an own loop: their methods go through the loop.

They stay the objects that they are, so what else refers to them keeps working. What a call
means in which iteration is the loop's affair (`loop.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import TYPE_CHECKING, Any

from instep.errors import SpecError

if TYPE_CHECKING:
    from instep.worker.own.loop import OwnLoop


def take_over(loop: OwnLoop) -> Callable[[], None]:
    """Have `optimizer.step` and its kin go through the loop; returns what undoes it."""
    optimizer, scheduler, scaler = loop.optimizer, loop.scheduler, loop.scaler
    before: list[tuple[Any, str, Any]] = []

    def take(owner: Any, name: str, ours: Callable[..., Any]) -> Any:
        raw = getattr(owner, name)
        before.append((owner, name, owner.__dict__.get(name)))
        # the attributes too: a scheduler made before has marked the method
        wrapped = functools.wraps(getattr(raw, "__func__", raw))(ours)
        setattr(owner, name, MethodType(wrapped, owner))
        return raw

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

    raw_step, raw_zero = take(optimizer, "step", step), take(optimizer, "zero_grad", zero_grad)
    if points := loop.state.two_points:  # the user's code switches, to validate

        def train(_: Any, *args: Any, **kwargs: Any) -> Any:
            done = raw_train(*args, **kwargs)
            points.at_result = False
            return done

        def evaluate(_: Any, *args: Any, **kwargs: Any) -> Any:
            done = raw_eval(*args, **kwargs)
            points.at_result = True
            return done

        raw_train, raw_eval = take(optimizer, "train", train), take(optimizer, "eval", evaluate)
    if scheduler is not None:

        def advance(_: Any, *args: Any, **kwargs: Any) -> Any:
            return loop.scheduler_step(raw_advance, *args, **kwargs)

        # in a class of its own: a scheduler's state dict has every attribute of the instance
        raw_advance, kind = scheduler.step, type(scheduler)
        members = {"step": functools.wraps(kind.step)(advance), "__module__": kind.__module__}
        scheduler.__class__ = type(kind.__name__, (kind,), members)
    if scaler is not None:

        def scaled_step(_: Any, moved: Any, *args: Any, **kwargs: Any) -> None:
            if moved is not optimizer:  # the loop's hook names it
                raw_scaled(moved, *args, **kwargs)
                return
            loop.optimizer_step(lambda: raw_scaled(moved, *args, **kwargs))

        def update(_: Any, *args: Any, **kwargs: Any) -> Any:
            return loop.after_move(raw_update, *args, **kwargs)

        def unscale(_: Any, optimizer: Any) -> None:
            loop.unscale(raw_unscale)

        raw_scaled, raw_update, raw_unscale = (
            take(scaler, "step", scaled_step),
            take(scaler, "update", update),
            take(scaler, "unscale_", unscale),
        )

    def give_back() -> None:
        if scheduler is not None:
            scheduler.__class__ = kind
        while before:
            owner, name, was = before.pop()
            if was is None:
                delattr(owner, name)
            else:
                setattr(owner, name, was)

    return give_back
