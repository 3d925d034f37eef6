"""Tensors in tuples, lists and dicts: found, or replaced by others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor

_LEAF = Tensor, int, float, str, type(None)
"""What most leaves are; to ask whether something is a Mapping takes longer."""


def leaves(value: Any) -> Iterator[Any]:
    """What is neither tuple, list nor dict, in order."""
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (tuple, list)):
        yield value
        return
    for each in value:
        if isinstance(each, _LEAF):
            yield each
        else:
            yield from leaves(each)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors, in order; other leaves are left out."""
    return [leaf for leaf in leaves(value) if isinstance(leaf, Tensor)]


def on_tensors(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nesting with every tensor changed, in order; the rest as it is."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, Mapping):
        changed = {key: on_tensors(each, change) for key, each in value.items()}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return changed
        other = copy.copy(value)  # one that has more than its items, as Hugging Face's has
        for key, each in changed.items():
            other[key] = each
        return other
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(on_tensors(each, change) for each in value))
    if isinstance(value, (tuple, list)):
        return type(value)(on_tensors(each, change) for each in value)
    return value
