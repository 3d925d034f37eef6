"""What an optimizer keeps in its `state` beside the parameters: a count of steps under a name, say.

MADGRAD has `state["k"]`. Where parameters lie in parts, such a value is that of all parts. Servers
keep what is theirs piece by piece, so there it is written down with each piece, under a name that
begins with `BESIDE`.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Any

BESIDE = "beside."
"""Begins the name of such a value where it is written down with a piece of a parameter."""


def beside(state: Mapping[Any, Any]) -> dict[str, Any]:
    """Of an optimizer's state, what belongs to no parameter.

    Args:
        state: of the optimizer, or out of its state dict, in which parameters are numbers.
    """
    return {name: value for name, value in state.items() if isinstance(name, str)}


def with_each(kept: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept for a piece, and what is beside all of them."""
    return {**kept, **{f"{BESIDE}{name}": value for name, value in state.items()}}


def put_back(state: MutableMapping[Any, Any]) -> None:
    """Take what `with_each` has written with parameters out again, to where it was."""
    found = dict[str, Any]()
    for of, kept in state.items():
        if not isinstance(of, str):
            for name in [each for each in kept if each.startswith(BESIDE)]:
                found[name.removeprefix(BESIDE)] = kept.pop(name)
    state.update(found)
