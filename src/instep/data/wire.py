"""A batch as plain data: a skeleton that msgpack can hold, and the tensors apart.

Tuples, lists, dicts with string or integer keys, numbers, strings, bytes, None
and CPU tensors, nested as deep as they come, are given back exactly. Anything
else is refused: no code, no pickle, travels between processes.
"""

from __future__ import annotations

import mmap
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
        raise DataError(
            f"a batch holds a {kind.__module__}.{kind.__qualname__}, which cannot come from a "
            "loader process: tensors, numbers, strings and None in tuples, lists and dicts can. "
            "Set data.loaders = 0, or let collate turn it into tensors."
        )

    return walk(batch), tensors


def _check_tensor(tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_quantized:
        raise DataError(
            f"a batch holds a {str(tensor.layout).removeprefix('torch.')} tensor on "
            f"{tensor.device}, which cannot come from a loader process: plain tensors on the CPU "
            "can. Set data.loaders = 0."
        )


def unpack(skeleton: Any, tensors: list[torch.Tensor]) -> Any:
    """The batch that `pack` took apart."""
    tag, body = skeleton
    if tag == "tensor":
        return tensors[body]
    if tag == "plain":
        return body
    if tag == "dict":
        return {name: unpack(part, tensors) for name, part in body}
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
