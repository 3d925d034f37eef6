"""Callbacks of a recipe: what the user's code is told after a committed step, and what it may log.

Which worker makes the calls, and which were made before it, is not known here. Way in: `Callback`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from instep.errors import RecipeError, near_miss

MOMENTS = ("on_step_end", "on_evaluate", "on_log", "on_save")
"""The methods that a callback may have, in the order in which they are called after a step."""

_TAKEN = ("loss", "samples_per_second", "gradient_norm", "learning_rate")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./ -]{0,99}")


@dataclass(frozen=True, kw_only=True, slots=True)
class CallbackContext:
    """A committed step, as a callback sees it."""

    run: Path
    """The run's folder."""
    step: int
    """Counts from 1."""
    epoch: int
    """Counts from 0."""
    samples: int
    """Of the training dataset, used by the run so far; each epoch counts anew."""
    loss: float
    """Mean over the step's global batch."""
    losses: Mapping[str, float]
    """Of each turn by its name, where a step has several; `loss` is that of the last."""
    metrics: Mapping[str, float] | None
    """Of the validation that followed this step; None if none did."""
    lr: float
    """The learning rate of the next step, of the optimizer's first group."""
    lrs: tuple[float, ...]
    """That of each group."""
    gradient_norm: float | None
    """Of the step's gradient, before clipping; None where nothing needs it."""
    model: nn.Module
    """With the parameters of this step, to read. Of a mesh: this process's part."""
    repeated: bool
    """Whether this call was begun before: a kill interrupted it, or the run went back to an
    earlier step."""
    log: Callable[[str, float], None] = field(repr=False)
    """`log(name, value)`: shown in the live table, the report and the loggers, at this step."""


class Callback:
    """Code that is called after committed steps, on one worker; override what you need.

    Calls come in the order of the steps, each once. One that a kill interrupts is made again
    by another worker, with `context.repeated`. The other workers wait meanwhile.
    """

    def on_step_end(self, context: CallbackContext) -> None:
        """A step is committed."""

    def on_evaluate(self, context: CallbackContext, metrics: Mapping[str, float]) -> None:
        """A validation followed the step."""

    def on_log(self, context: CallbackContext, values: Mapping[str, float]) -> None:
        """Callbacks have logged these values at the step."""

    def on_save(self, context: CallbackContext, checkpoint: Path) -> None:
        """A checkpoint is complete on disk; it may be of an earlier step, as it was written in the
        background."""


def methods(callback: Any) -> list[str]:
    """Those of `MOMENTS` that a callback has of its own, in their order."""
    found = []
    for moment in MOMENTS:
        method = getattr(callback, moment, None)
        if method is not None and getattr(method, "__func__", method) is not getattr(
            Callback, moment
        ):
            found.append(moment)
    return found


def check_callbacks(callbacks: Any) -> None:
    """Refuse what can never be called.

    Raises:
        RecipeError: it is no list, a class in place of an object, or has no method of `MOMENTS`.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise RecipeError(
            f"Recipe.callbacks is {callbacks!r:.60}, but a list is wanted: [MyCallback()]."
        )
    for callback in callbacks:
        name = callback.__name__ if isinstance(callback, type) else type(callback).__name__
        if isinstance(callback, type):
            raise RecipeError(
                f"Recipe.callbacks has the class {name}, but an object is wanted: {name}()."
            )
        own = methods(callback)
        strange = [
            each
            for each in dir(callback)
            if each.startswith("on_") and each not in MOMENTS and callable(getattr(callback, each))
        ]
        if strange:
            raise RecipeError(
                f"{name}.{strange[0]} of Recipe.callbacks is never called. "
                f"{near_miss(strange[0], MOMENTS)}"
            )
        if not own:
            raise RecipeError(
                f"Recipe.callbacks has a {name}, which has none of {', '.join(MOMENTS)}: it would "
                "never be called."
            )
        for moment in own:
            if not callable(getattr(callback, moment)):
                raise RecipeError(f"{name}.{moment} of Recipe.callbacks is no method.")


def checked_value(name: Any, value: Any) -> float:
    """A value that user code logs, as a number.

    Raises:
        RecipeError: the name cannot be one, or the value is not one number.
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RecipeError(
            f"log({name!r:.80}, ...): a name needs letters, digits, and _ . / - or spaces."
        )
    if name in _TAKEN or name.startswith(("train/", "validation/")):
        raise RecipeError(
            f"log({name!r}, ...): the run logs this name itself. Choose another, such as "
            f"{'my/' + name.rpartition('/')[2]!r}."
        )
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise RecipeError(
            f"log({name!r}, ...) was given {value!r:.60}, but one number is wanted."
        ) from None
