"""Values that passes leave behind in Python, and optimizers, their hooks or schedulers read.

A hook may set the learning rate by the size of the last activations. A pass leaves those of its own
micro-batch; on one machine a pass is the whole global batch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from instep.usercode.places import names_in, operands, places
from instep.worker.trial.kept.stand_in import StandIn


def read_by_steps(made: StandIn, left: Collection[str]) -> str:
    """Name what code that decides of steps reads of what passes leave; empty if it reads nothing.

    Args:
        made: with the recipe's optimizers.
        left: names of attributes, variables and what holds them.
    """
    if not left:
        return ""
    for called in (*made.called, *filter(_stores, made.called_after)):
        own = [each for each in made.stateful if type(each) is called]
        there = [*places([called, *own])]
        held = [each.get() for each in there]
        of_model = any(isinstance(each, nn.Module) for each in held)
        reached = {each.key or each.name for each in there}
        for code in _codes([called, *held]):
            named = names_in(code).union(code.co_freevars) & {*left}
            if found := sorted(name for name in named if of_model or name in reached):
                return found[0]
    return ""


def in_words(name: str) -> str:
    """Say that steps depend on what the last pass left."""
    return (
        f"each pass leaves {name!r} behind, which the optimizer, a hook on its steps or a "
        "scheduler reads: it is of one micro-batch there, and on one machine of the whole global "
        "batch. Sum it over the passes of a step in a buffer of the model"
    )


def _stores(hook: Any) -> bool:
    """Check that a hook after steps sets something; most only follow the model for a person."""
    codes = [*_codes([hook])]
    kinds = "STORE_ATTR", "STORE_SUBSCR", "STORE_DEREF", "STORE_GLOBAL"
    return not codes or any(_has(code, kinds) or "__setitem__" in names_in(code) for code in codes)


def _has(code: CodeType, kinds: Iterable[str]) -> bool:
    return any(operands(code, kind) for kind in kinds)


def _codes(values: Iterable[Any]) -> Iterator[CodeType]:
    for value in values:
        function = getattr(value, "__func__", value)
        if type(function) is FunctionType:
            yield function.__code__
