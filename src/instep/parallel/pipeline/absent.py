"""Tensors that only other stages have: shape, type and device, and no values.

A stage runs the model's own forward pass, although it lacks most parameters. An `Absent` is in the
place of each that it lacks, and what is computed from one is absent too. So what a stage needs
from the stage before it is exactly what is absent when its first block is called; and where
absent values would be needed for anything else, there is an error and never a wrong number.

An operation on absent tensors computes shapes (on torch's meta device), and draws from the
generators as the real one does. Models and stages are not known here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from instep.errors import RecipeError
from instep.parallel.nested import leaves, on_tensors

_OF_SHAPE = {
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
}
"""Operations that use no values of the tensor that they are given: their results are not absent."""


class NeedsValues(RecipeError):
    """Code wants the values of a tensor that only another stage has."""


class Absent(Tensor):
    """A tensor without values.

    Args:
        meta: has its shape, strides and type, on the meta device.
        device: where the real one is.
    """

    meta: Tensor
    value: Tensor | None
    """The tensor itself, once it has come from the stage that has it."""
    base: Absent
    """What it is a view of; itself if of nothing."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, meta: Tensor, device: torch.device) -> Absent:
        made: Absent = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.meta, made.value, made.base = meta, None, made
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute the shapes of the results."""
        kwargs = kwargs or {}
        if func._schema.name in _OF_SHAPE:
            return func(*on_tensors(args, _blank), **on_tensors(kwargs, _blank))
        if torch.Tag.nondeterministic_seeded in func.tags:
            func(*on_tensors(args, _probable), **on_tensors(kwargs, _probable))  # draws the same
        return _shapes_of(func, args, kwargs)


def absent(like: Tensor) -> Absent:
    """A tensor without values for each with values."""
    return like if isinstance(like, Absent) else Absent(_meta(like), like.device)


def absents_in(value: Any) -> list[Absent]:
    """The absent tensors of a nested value, each once, in order."""
    found = {id(leaf): leaf for leaf in leaves(value) if isinstance(leaf, Absent)}
    return list(found.values())


def _shapes_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    device = next(tensor.device for tensor in given if isinstance(tensor, Absent))
    written = [
        leaf
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
        for leaf in leaves(named.get(argument.name))
    ]
    for leaf in written:
        if isinstance(leaf, Tensor) and not isinstance(leaf, Absent):
            raise NeedsValues(f"torch's {_name(func)} writes them into another tensor")
        if isinstance(leaf, Absent) and leaf.base.value is not None:
            raise NeedsValues(f"torch's {_name(func)} changes them")
    if func._schema.name == "aten::_to_copy" and named.get("device") is not None:
        device = torch.device(named["device"])
    key = None if written else (func, _signature(args), _signature(kwargs))
    made = _KNOWN.get(key)
    if made is None:
        made = _on_meta(func, args, kwargs)
        if len(_KNOWN) >= _MOST_KNOWN:
            _KNOWN.clear()
        if key is not None:
            _KNOWN[key] = made
    if len(written) == 1 and isinstance(made, Tensor):
        if made.shape != written[0].shape:
            raise NeedsValues(f"torch's {_name(func)} changes their shape in place")
        return written[0]
    views = any(returned.alias_info is not None for returned in func._schema.returns)
    base = next(tensor.base for tensor in given if isinstance(tensor, Absent)) if views else None
    return on_tensors(made, lambda meta: _made(meta, device, base))


def _on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("meta")}
    try:
        made = func(*on_tensors(args, _meta), **on_tensors(kwargs, _meta))
    except Exception as error:
        raise NeedsValues(f"torch's {_name(func)} wants them ({error})") from error
    if any(isinstance(leaf, (bool, float)) for leaf in leaves(made)):
        raise NeedsValues(f"torch's {_name(func)} wants them")
    return made


_KNOWN: dict[Any, Any] = {}
"""Results of operations by what they were given, as torch takes a while to compute shapes."""

_MOST_KNOWN = 4096


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, dict):
        return tuple((name, _signature(each)) for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    return type(value), value


def _made(meta: Tensor, device: torch.device, base: Absent | None) -> Absent:
    made = Absent(meta, device)
    made.base = made if base is None else base
    return made


def _meta(tensor: Tensor) -> Tensor:
    if isinstance(tensor, Absent):
        return tensor.meta
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=torch.device("meta")
    )


def _blank(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Absent):
        return tensor
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
    )


def _probable(tensor: Tensor) -> Tensor:
    """Values that are valid as data and as probabilities."""
    return _blank(tensor).fill_(0.5) if isinstance(tensor, Absent) else tensor.clone()


def _name(func: Any) -> str:
    return str(func._schema.name.split("::")[-1])
