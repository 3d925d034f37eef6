"""Live state as named tensors and plain JSON, and back.

The only module that knows what a state dict may hold. It knows no files and
no clock. A checkpoint is one `Snapshot`; whoever makes one packs each part:

    tensors, skeleton = pack_state(optimizer.state_dict())
    Snapshot(step, {"model": model_tensors(model), "optimizer": tensors},
             {"optimizer": skeleton, ...})

and after loading gives `unpack_state(tensors, skeleton)` to `load_state_dict`.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from instep.errors import CheckpointError

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Every type of tensor that can be kept, by its name in a safetensors file."""

RESERVED = "__metadata__"
"""The one name that safetensors keeps for itself."""

_MAPPINGS: dict[str, type[dict[Any, Any]]] = {
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": Counter,  # MultiStepLR keeps its milestones in one
}
_DEEPEST = 100  # levels; a state that holds itself would never end
_EXACT = 2**53  # integers above are not exact in every reader of JSON
_STRIDED = torch.strided
_REQUIRES_GRAD = operator.attrgetter("requires_grad")

Path = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The state of a run at one commit."""

    step: int
    """The last committed step; counts from 1, 0 before any."""

    tensors: dict[str, dict[str, Tensor]]
    """Group (`"model"`, `"optimizer"`, ...) to name to tensor. Equal storage means tied."""

    facts: dict[str, Any]
    """Everything else, plain JSON: data position, skeletons of packed states, versions."""


class Skeleton(dict[str, Any]):
    """What `pack_state` left of a state: plain JSON by its making, and never changed.

    So a checkpoint in the making need neither check nor copy it.
    """


def pack_state(state: Any) -> tuple[dict[str, Tensor], Any]:
    """Take a state dict apart into tensors and JSON, losing nothing but memory layout.

    Args:
        state: dicts (also `OrderedDict`, `Counter`), lists and tuples, nested,
            of tensors, numbers (also numpy's), strings, bools and None.

    Returns:
        The tensors, named by their place (`state.0.exp_avg`), not copied; and
        the skeleton, plain JSON, which refers to them (a `Skeleton`, unless
        the state is a mere number, list or the like). It is not to be changed.

    Raises:
        CheckpointError: something else is in there; the text says where.
    """
    tensors: dict[str, Tensor] = {}
    skeleton = _pack(state, (), tensors)
    return tensors, Skeleton(skeleton) if type(skeleton) is dict else skeleton


class Packer:
    """`pack_state` for one state that is packed again and again, such as an optimizer's.

    Where a part of the state still has the same tensors at the same places, as
    after every step but the first, what was made of that part is given again.
    """

    def __init__(self) -> None:
        self._parts: dict[str, _Part] = {}

    def __call__(self, state: Mapping[str, Any]) -> tuple[dict[str, Tensor], Any]:
        """As `pack_state(dict(state))`; the dicts returned are not to be changed.

        Raises:
            CheckpointError: as `pack_state`.
        """
        before, self._parts = self._parts, {}
        tensors: dict[str, Tensor] = {}
        skeleton = {}
        for key, value in state.items():
            leaves = _leaves(value)
            part = before.get(key)
            if part is None or leaves is None or not part.is_of(leaves):
                found: dict[str, Tensor] = {}
                part = _Part(leaves, found, _pack(value, (key,), found))
            if leaves is not None:
                self._parts[key] = part
            if type(key) is not str or tensors.keys() & part.tensors.keys():
                return pack_state(dict(state))  # which tells apart two places with one name
            tensors |= part.tensors
            skeleton[key] = part.skeleton
        return tensors, Skeleton({"dict": skeleton})


class _Leaves(NamedTuple):
    """Where each tensor of a dict of dicts of tensors stands, and the tensors, in order."""

    places: list[Any]
    tensors: list[Tensor]


class _Part(NamedTuple):
    leaves: _Leaves | None
    tensors: dict[str, Tensor]
    skeleton: Any

    def is_of(self, leaves: _Leaves) -> bool:
        """Whether these are the very tensors at equal places; keys may be other objects."""
        return (
            self.leaves is not None
            and len(leaves.tensors) == len(self.leaves.tensors)
            and leaves.places == self.leaves.places
            and all(map(operator.is_, leaves.tensors, self.leaves.tensors))
        )


def _leaves(value: Any) -> _Leaves | None:
    """Those of a dict of dicts of tensors; None of anything else."""
    if type(value) is not dict or set(map(type, value.values())) != {dict}:
        return None
    tensors = [*chain.from_iterable(map(dict.values, value.values()))]
    if set(map(type, tensors)) != {Tensor} or any(map(_REQUIRES_GRAD, tensors)):
        return None
    keys = [*value, *chain.from_iterable(value.values())]
    # the types as well, for 1 equals True
    return _Leaves([*map(len, value.values()), *keys, *map(type, keys)], tensors)


def unpack_state(tensors: Mapping[str, Tensor], skeleton: Any) -> Any:
    """Put together what `pack_state` took apart: equal values, equal types.

    Returns:
        The state; its tensors are those given, not copies.

    Raises:
        CheckpointError: the skeleton is none, or does not fit the tensors.
    """
    used: set[str] = set()
    plain = dict(skeleton) if type(skeleton) is Skeleton else skeleton
    state = _unpack(plain, (), tensors, used)
    if left := sorted(tensors.keys() - used):
        raise CheckpointError(
            f"a packed state comes with {len(left)} tensors that it has no place for, "
            f"{left[0]!r} among them."
        )
    return state


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name: the tensors of `model.state_dict()`.

    Buffers registered as not persistent are left out, as the model makes them
    anew. Tied weights stand under each of their names, as one storage.

    Raises:
        CheckpointError: a module's extra state is not a tensor.
    """
    tensors: dict[str, Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, Tensor):
            raise CheckpointError(
                f"{name} of the model is a {_type_name(value)}: extra state can be kept only "
                "as a tensor. Let get_extra_state() return one."
            )
        if not _is_plain(value):  # asked first, as a save in training passes here
            check_tensor(value, f"{name} of the model")
        tensors[name] = value
    return tensors


def parameters_sha256(model: nn.Module) -> str:
    """SHA-256 over parameters and persistent buffers, sorted by name.

    Raw little-endian bytes one after the other, each tensor row by row, a
    tied weight under each of its names; equal on every device.

    Returns:
        64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for _, tensor in sorted(model_tensors(model).items()):
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def tied_names(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Which names stand for a tensor that an earlier name stands for already.

    Returns:
        Later name to first name, for tensors that are one and the same memory,
        seen the same way; mere overlap does not count.
    """
    first: dict[tuple[Any, ...], str] = {}
    tied: dict[str, str] = {}
    for name, t in tensors.items():
        if t.numel():
            memory = (t.device, t.data_ptr(), t.dtype, t.shape, t.stride(), t.is_conj(), t.is_neg())
            if (original := first.setdefault(memory, name)) != name:
                tied[name] = original
    return tied


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype in DTYPES and tensor.layout is _STRIDED and not tensor.is_meta


def check_tensor(tensor: Tensor, where: str) -> None:
    """Raise `CheckpointError` unless a safetensors file can hold `tensor`."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        raise CheckpointError(f"{where} is a {kind} tensor: only dense ones can be kept.")
    if tensor.is_meta:
        raise CheckpointError(f"{where} is on the meta device: it has no values to keep.")
    if tensor.dtype not in DTYPES:
        raise CheckpointError(
            f"{where} is a tensor of {tensor.dtype}, which a safetensors file cannot hold."
        )


def _pack(value: Any, path: Path, tensors: dict[str, Tensor]) -> Any:
    kind = type(value)
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
    if kind in (Tensor, nn.Parameter):
        return {"tensor": _keep(value, path, tensors)}
    if kind is list and set(map(type, value)) == {int} and max(map(abs, value)) <= _EXACT:
        return [*value]  # an optimizer's numbers of parameters, by the hundred
    if kind in (list, tuple):
        parts = [_pack(part, (*path, place), tensors) for place, part in enumerate(value)]
        return parts if kind is list else {"tuple": parts}
    if kind in _MAPPINGS.values():
        return {kind.__name__: _pack_items(value, path, tensors)}
    raise CheckpointError(
        f"{_at(path)} is a {_type_name(value)}: a checkpoint holds tensors, numbers, strings, "
        "bools, None, and lists, tuples and dicts of them."
    )


def _pack_items(mapping: dict[Any, Any], path: Path, tensors: dict[str, Tensor]) -> Any:
    for key in mapping:
        if key is not None and type(key) not in (bool, int, float, str):
            raise CheckpointError(
                f"{_at(path)} has a {_type_name(key)} as a key: only strings, numbers, bools "
                "and None can be kept as keys."
            )
    if all(type(key) is str for key in mapping):
        return {key: _pack(part, (*path, key), tensors) for key, part in mapping.items()}
    return [
        [_pack(key, path, tensors), _pack(part, (*path, key), tensors)]
        for key, part in mapping.items()
    ]


def _keep(tensor: Tensor, path: Path, tensors: dict[str, Tensor]) -> str:
    """Add `tensor` under a name made of its place, told apart from names already taken."""
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
        if key is not None and type(key) not in (bool, int, float, str):
            raise _not_packed(item[0], path)
        yield key, _unpack(item[1], (*path, key), tensors, used)


def _unpack_number(kind: str, content: Any, path: Path) -> Any:
    try:
        if kind == "int":
            return int(content, 16)
        if kind == "float" and content in ("nan", "inf", "-inf"):
            return float(content)
        if kind == "numpy":
            dtype = np.dtype(content[0])
            if dtype.kind in "biuf":
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


def _type_name(value: Any) -> str:
    kind = type(value)
    home = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    return home + kind.__qualname__
