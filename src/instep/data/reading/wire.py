"""A batch as plain data: a skeleton that msgpack can hold, and the tensors apart.

Tuples, lists, dicts with string or integer keys, numbers, strings, bytes, None
and CPU tensors, nested as deep as they come, are given back exactly. So is a
`UserDict` of a class of its own that holds nothing else (`transformers.BatchEncoding`):
its class travels by name, and is looked up among what is imported already. Anything
else is refused: no code, no pickle, travels between processes.
"""

from __future__ import annotations

import mmap
import sys
from collections import UserDict
from typing import Any

import torch

from instep.errors import DataError

_ALIGNMENT = 64
_PLAIN = (bool, int, float, str, bytes, type(None))


def pack(batch: Any) -> tuple[Any, list[torch.Tensor]]:
    """Take a batch apart.

    Returns:
        (skeleton, tensors): nested lists with a tag in front, and contiguous
        tensors in the order in which the skeleton counts them.

    Raises:
        DataError: it holds something that cannot travel.
    """
    tensors: list[torch.Tensor] = []

    def walk(node: Any) -> list[Any]:
        kind = type(node)
        if kind is torch.Tensor:
            _check_tensor(node)
            tensors.append(node.detach().contiguous())
            return ["tensor", len(tensors) - 1]
        if kind in _PLAIN and not (kind is int and node.bit_length() > 63):
            return ["plain", node]
        if kind is tuple or kind is list:
            return [kind.__name__, [walk(part) for part in node]]
        if kind is dict and all(type(name) in (str, int) for name in node):
            return ["dict", [[name, walk(part)] for name, part in node.items()]]
        if isinstance(node, UserDict):
            _check_holds_only_its_items(node)
            items = [[name, walk(part)] for name, part in node.data.items()]
            return ["UserDict", [kind.__module__, kind.__qualname__, items]]
        raise DataError(
            f"a batch holds a {kind.__module__}.{kind.__qualname__}, which cannot come from a "
            "loader process: tensors, numbers, strings and None in tuples, lists and dicts can. "
            "Set data.loaders = 0, or let collate turn it into tensors."
        )

    return walk(batch), tensors


def _check_holds_only_its_items(given: UserDict[Any, Any]) -> None:
    """Refuse one that its class, called with the items, does not make again."""
    kind = type(given)
    if _imported(kind.__module__, kind.__qualname__) is kind and _makes_again(kind, given):
        return
    raise DataError(
        f"a batch is a {kind.__module__}.{kind.__qualname__} that has more to it than its items, "
        "which cannot come from a loader process. Let collate return a dict of them, or set "
        "data.loaders = 0."
    )


def _makes_again(kind: type[UserDict[Any, Any]], given: UserDict[Any, Any]) -> bool:
    try:
        again = kind(dict(given.data))
    except Exception:  # whatever a user's class wants besides
        return False
    one, other = dict(vars(given)), dict(vars(again))
    items, made = one.pop("data", None), other.pop("data", None)
    return (
        type(items) is type(made) is dict
        and all(type(name) in (str, int) for name in items)
        and list(items) == list(made)
        and all(items[name] is made[name] for name in items)
        and one.keys() == other.keys()
        and all(type(part) in _PLAIN and part == other[name] for name, part in one.items())
    )


def _imported(module: str, name: str) -> type[UserDict[Any, Any]] | None:
    """A `UserDict` class at the top level of a module; nothing is imported to find it."""
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return found if isinstance(found, type) and issubclass(found, UserDict) else None


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise DataError(
            f"a batch holds a {str(tensor.layout).removeprefix('torch.')} tensor on "
            f"{tensor.device}, which cannot come from a loader process: plain tensors on the CPU "
            "can. Set data.loaders = 0."
        )


def unpack(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """The batch that `pack` took apart.

    Raises:
        DataError: it holds a class that is not imported here.
    """
    tag, body = skeleton
    if tag == "tensor":
        return tensors[body]
    if tag == "plain":
        return body
    if tag == "dict":
        return {name: unpack(part, tensors) for name, part in body}
    if tag == "UserDict":
        module, name, items = body
        kind = _imported(module, name)
        if kind is None:
            raise DataError(
                f"a batch from a loader process holds a {module}.{name}, a dict of a class that is "
                "not imported here. Import it in the recipe's file, or set data.loaders = 0."
            )
        return kind({name: unpack(part, tensors) for name, part in items})
    parts = [unpack(part, tensors) for part in body]
    return tuple(parts) if tag == "tuple" else parts


def layout(tensors: list[torch.Tensor]) -> tuple[list[Any], int]:
    """Where each tensor goes in one stretch of memory: [dtype, shape, offset] each, and bytes."""
    places, end = [], 0
    for tensor in tensors:
        places.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


def write(tensors: list[torch.Tensor], places: list[Any], memory: mmap.mmap) -> None:
    """Copy the tensors to their places."""
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.numel():
            _view(memory, place).copy_(tensor)


def read(places: list[Any], memory: mmap.mmap) -> list[torch.Tensor]:
    """New tensors with what stands at the places."""
    return [_view(memory, place).clone() for place in places]


def _view(memory: mmap.mmap, place: Any) -> torch.Tensor:
    name, shape, offset = place
    dtype = getattr(torch, name)
    count = 1
    for size in shape:
        count *= size
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)
