"""A state dict as named tensors and plain JSON, and back.

The only module that knows what a state dict may hold. It knows no files. Way in:
`pack_state`, `unpack_state`.
"""

from __future__ import annotations

import math
import re
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from instep.errors import CheckpointError
from instep.state.snapshot import RESERVED, check_tensor, is_supported, type_name

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,  # MultiStepLR keeps its milestones in one
}
_KEYS = {bool, int, float, str, type(None)}
_DEEPEST = 100  # levels; a state that holds itself would never end
_EXACT = 2**53  # integers above are not exact in every reader of JSON

Path = tuple[Any, ...]


class Skeleton(dict[str, Any]):
    """The JSON part of a packed state, never changed after `pack_state`.

    So a checkpoint need neither check nor copy it.
    """


def pack_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take a state dict apart into tensors and JSON, losing nothing but memory layout.

    Args:
        state: dicts (also `OrderedDict`, `Counter`), lists and tuples, nested,
            of tensors, numbers (also numpy's), strings, bools and None.

    Returns:
        The tensors, named by their place (`state.0.exp_avg`), not copied; and
        the skeleton, plain JSON, which refers to them (a `Skeleton`, unless
        the state is only a number, list or the like). Do not change it.

    Raises:
        CheckpointError: it holds something else; the text says where.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _pack(state, (), tensors)
    return tensors, Skeleton(skeleton) if type(skeleton) is dict else skeleton


def unpack_state(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """The inverse of `pack_state`: equal values, equal types.

    Returns:
        The state; it refers to the given tensors, not to copies.

    Raises:
        CheckpointError: the skeleton is invalid, or does not fit the tensors.
    """
    used: set[str] = set()
    plain = dict(skeleton) if type(skeleton) is Skeleton else skeleton
    state = _unpack(plain, (), tensors, used)
    if left := sorted(tensors.keys() - used):
        raise CheckpointError(
            f"a packed state has no place for {len(left)} of its tensors, {left[0]!r} among them."
        )
    return state


def _pack(value: Any, path: Path, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
    if kind in (Tensor, nn.Parameter):  # first: an optimizer has hundreds, and training waits
        return {"tensor": _keep(value, path, tensors)}
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if abs(value) <= _EXACT else {"int": hex(value)}
    if kind is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        little = value.dtype.newbyteorder("<")
        return {"numpy": [little.str, value.astype(little).tobytes().hex()]}
    if len(path) > _DEEPEST:
        raise CheckpointError(f"a state is nested deeper than {_DEEPEST} levels at {_at(path)}.")
    if kind is list and set(map(type, value)) == {int} and max(map(abs, value)) <= _EXACT:
        return [*value]  # an optimizer's numbers of parameters, by the hundred
    if kind in (list, tuple):
        parts = [_pack(part, (*path, place), tensors) for place, part in enumerate(value)]
        return parts if kind is list else {"tuple": parts}
    if kind in _MAPPINGS.values():
        return {kind.__name__: _pack_items(value, path, tensors)}
    raise CheckpointError(
        f"{_at(path)} is a {type_name(value)}: a checkpoint holds tensors, numbers, strings, "
        "bools, None, and lists, tuples and dicts of them."
    )


def _pack_items(mapping: dict[Any, Any], path: Path, tensors: dict[str, Tensor]) -> Any:
    kinds = set(map(type, mapping))
    if kinds <= {str}:
        return {key: _pack(part, (*path, key), tensors) for key, part in mapping.items()}
    if wrong := kinds - _KEYS:
        odd = next(key for key in mapping if type(key) in wrong)
        raise CheckpointError(
            f"{_at(path)} has a {type_name(odd)} as a key: only strings, numbers, bools and None "
            "can be kept as keys."
        )
    return [
        [_pack(key, path, tensors), _pack(part, (*path, key), tensors)]
        for key, part in mapping.items()
    ]


def _keep(tensor: Tensor, path: Path, tensors: dict[str, Tensor]) -> str:
    """Add `tensor` under a name made of its place, different from names already taken."""
    if not is_supported(tensor):
        check_tensor(tensor, _at(path))
    name = ".".join(map(str, path)) or "tensor"
    while name in tensors or name == RESERVED:
        name += "'"  # {"a.b": x, "a": {"b": y}} has one name for two places
    tensors[name] = tensor.detach() if tensor.requires_grad else tensor
    return name


def _unpack(node: Any, path: Path, tensors: Mapping[str, Tensor], used: set[str]) -> Any:
    if node is None or type(node) in (bool, str, int, float):
        return node
    if len(path) > _DEEPEST:
        raise CheckpointError(f"a packed state is nested deeper than {_DEEPEST} levels.")
    if type(node) is list:
        return list(_unpack_parts(node, path, tensors, used))
    if type(node) is not dict or len(node) != 1:
        raise _not_packed(node, path)
    ((kind, content),) = node.items()
    if kind == "tuple" and type(content) is list:
        return tuple(_unpack_parts(content, path, tensors, used))
    if kind in _MAPPINGS:
        # through a dict, as Counter would count the pairs
        return _MAPPINGS[kind](dict(_unpack_items(content, path, tensors, used)))
    if kind == "tensor" and type(content) is str:
        if content not in tensors:
            raise CheckpointError(f"{_at(path)} refers to a tensor {content!r} that is not there.")
        used.add(content)
        return tensors[content]
    return _unpack_number(kind, content, path)


def _unpack_parts(
    parts: list[Any], path: Path, tensors: Mapping[str, Tensor], used: set[str]
) -> Iterator[Any]:
    for place, part in enumerate(parts):
        yield _unpack(part, (*path, place), tensors, used)


def _unpack_items(
    content: Any, path: Path, tensors: Mapping[str, Tensor], used: set[str]
) -> Iterator[tuple[Any, Any]]:
    if type(content) not in (dict, list):
        raise _not_packed(content, path)
    items: Iterable[Any] = content.items() if type(content) is dict else content
    for item in items:
        if type(item) not in (list, tuple) or len(item) != 2:
            raise _not_packed(item, path)
        key = _unpack(item[0], path, {}, used)
        if type(key) not in _KEYS:
            raise _not_packed(item[0], path)
        yield key, _unpack(item[1], (*path, key), tensors, used)


_NUMBER = re.compile(r"[<>=|][biuf]\d+")
"""A type of numpy's that a single number may have."""


def _unpack_number(kind: str, content: Any, path: Path) -> Any:
    try:
        if kind == "int":
            return int(content, 16)
        if kind == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if kind == "numpy" and isinstance(content, list) and _NUMBER.fullmatch(content[0]):
            dtype = np.dtype(content[0])
            (number,) = np.frombuffer(bytes.fromhex(content[1]), dtype)
            return number.astype(dtype.newbyteorder("="))
    except (ValueError, TypeError, LookupError) as error:
        raise _not_packed({kind: content}, path) from error
    raise _not_packed({kind: content}, path)


def _not_packed(node: Any, path: Path) -> CheckpointError:
    return CheckpointError(f"{_at(path)} is not a packed state: {str(node)[:80]}.")


def _at(path: Path) -> str:
    """`("param_groups", 0, "lr")` -> `state['param_groups'][0]['lr']`."""
    return "state" + "".join(f"[{key!r}]" for key in path)
