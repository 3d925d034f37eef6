"""A batch as plain data: a skeleton for msgpack, and the tensors apart from it.

Tuples, lists, dicts with string or integer keys, numbers, strings, bytes, None and CPU
tensors, however deep, come back exactly. So does a subclass of `UserDict` that holds nothing
but its items (`transformers.BatchEncoding`): its class is sent by name, and looked up among
the imported modules. Anything else is refused: neither code nor pickle is sent between
processes. Way in: `pack`, `layout`, `write` on one side, `read`, `unpack` on the other.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections import UserDict
from typing import Any

import torch

from instep.errors import DataError

_ALIGNMENT = 64
_PLAIN = (bool, int, float, str, bytes, type(None))


def pack(batch: Any) -> tuple[Any, list[torch.Tensor]]:
    """Split a batch into skeleton and tensors.

    Returns:
        (skeleton, tensors): nested lists with a tag in front, and contiguous
        tensors in the order in which the skeleton numbers them.

    Raises:
        DataError: it holds something that cannot be sent.
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
    """Refuse one that its class, called with the items, does not reproduce."""
    kind = type(given)
    if _imported(kind.__module__, kind.__qualname__) is kind and _reproduces(kind, given):
        return
    raise DataError(
        f"a batch is a {kind.__module__}.{kind.__qualname__} that holds more than its items, "
        "which cannot come from a loader process. Let collate return a dict of them, or set "
        "data.loaders = 0."
    )


def _reproduces(kind: type[UserDict[Any, Any]], given: UserDict[Any, Any]) -> bool:
    try:
        again = kind(dict(given.data))
    except Exception:  # a user's class may require anything
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
    """The inverse of `pack`.

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
    """[dtype, shape, offset] of each tensor in one piece of memory, and the bytes of all."""
    places, end = [], 0
    for tensor in tensors:
        places.append([str(tensor.dtype).removeprefix("torch."), list(tensor.shape), end])
        end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    return places, end


def write(tensors: list[torch.Tensor], places: list[Any], memory: mmap.mmap) -> None:
    """Copy the tensors into the memory."""
    for tensor, place in zip(tensors, places, strict=True):
        if tensor.numel():
            _view(memory, place).copy_(tensor)


def read(places: list[Any], memory: mmap.mmap) -> list[torch.Tensor]:
    """New tensors, copied from the memory."""
    return [_view(memory, place).clone() for place in places]


def _view(memory: mmap.mmap, place: Any) -> torch.Tensor:
    name, shape, offset = place
    dtype, count = getattr(torch, name), math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).reshape(shape)
