"""Tensors that only other stages have: shape, type and device, and no values.

A stage runs the model's own forward pass, although it lacks most parameters. An `Absent` is in the
place of each that it lacks, and what is computed from one is absent too. So what a stage needs
from the stage before it is exactly what is absent when its first block is called; and where
absent values would be needed for anything else, there is an error and never a wrong number.

An operation on absent tensors computes shapes (on torch's meta device), and draws from the
generators as the real one does. Models and stages are not known here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from instep.errors import RecipeError
from instep.parallel.nested import leaves, on_tensors, tensors_in

_OF_SHAPE = {
    f"aten::{name}"
    for name in (
        *("zeros_like", "ones_like", "full_like", "empty_like"),
        *("rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided"),
    )
}
"""Operations that use no values of the tensor that they are given: their results are not absent."""


_MOST_KNOWN = 4096
"""Entries of a table; what has been found out before takes microseconds, and torch takes longer."""


class NeedsValues(RecipeError):
    """Code wants the values of a tensor that only another stage has."""


class TensorKind:
    """Shape, strides and type: one object for all tensors that have the same.

    Args:
        meta: a tensor that has them, on the meta device; never changed.
    """

    __slots__ = ("meta",)

    def __init__(self, meta: Tensor) -> None:
        self.meta = meta


def kind_of(tensor: Tensor) -> TensorKind:
    """The kind of any tensor."""
    if isinstance(tensor, Absent):
        return tensor.kind
    key = tensor.shape, tensor.stride(), tensor.dtype
    return _KINDS.get(key) or _keep(_KINDS, key, TensorKind(_fresh(tensor)))


_KINDS: dict[Any, TensorKind] = {}


class Absent(Tensor):
    """A tensor without values.

    Args:
        kind: its shape, strides and type.
        device: where the real one is.
    """

    kind: TensorKind
    base: Tensor
    """What it is a view of; itself if of nothing."""
    value: Tensor | None
    """What the object became that this one was; a graph may have saved this one."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, kind: TensorKind, device: torch.device) -> Absent:
        meta = kind.meta
        made: Absent = Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=device
        )
        made.kind, made.base, made.value = kind, made, None
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Absent({list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute the shapes of the results."""
        facts = _facts(func)
        if facts.of_shape:
            return func(*on_tensors(args, _blank), **on_tensors(kwargs or {}, _blank))
        if facts.draws:
            func(*on_tensors(args, _probable), **on_tensors(kwargs or {}, _probable))  # the same
        if facts.writes:
            return _written(func, facts, args, kwargs or {})
        key = func, *map(_signature, args), _signature(kwargs) if kwargs else None
        made = _KNOWN.get(key) or _keep(_KNOWN, key, _on_meta(func, args, kwargs or {}, _meta))
        given = _first(args, kwargs)
        device = given.device
        if facts.moves and kwargs and kwargs.get("device") is not None:
            device = torch.device(kwargs["device"])
        if type(made) is not TensorKind:
            return _filled(made, device, given.base if facts.views else None)
        result = Absent(made, device)
        if facts.views:
            result.base = given.base
        return result


def absent(like: Tensor) -> Absent:
    """A tensor without values for each with values."""
    return like if isinstance(like, Absent) else Absent(kind_of(like), like.device)


def become(nothing: Absent, tensor: Tensor) -> None:
    """Let an absent tensor be this one, in every variable that has it; `tensor` is used up.

    As `torch.utils.swap_tensors`, which refuses what a graph has saved.
    """
    nothing.__class__, tensor.__class__ = tensor.__class__, nothing.__class__  # type: ignore[assignment]
    nothing.__dict__, tensor.__dict__ = tensor.__dict__, nothing.__dict__
    torch._C._swap_tensor_impl(nothing, tensor)
    tensor.value = nothing  # type: ignore[attr-defined]


def became(tensor: Tensor) -> Tensor:
    """The tensor itself, or what it became."""
    return tensor.value if isinstance(tensor, Absent) and tensor.value is not None else tensor


def any_absent(value: Any) -> bool:
    """Whether a tensor of a nested value is absent."""
    if isinstance(value, Tensor):
        return isinstance(value, Absent)
    return any(isinstance(leaf, Absent) for leaf in leaves(value))


class _Facts(NamedTuple):
    """What an operation does beside computing."""

    of_shape: bool
    draws: bool
    moves: bool
    """Whether it may move a tensor to another device."""
    views: bool
    """Whether what it returns are views."""
    writes: frozenset[str]
    """Names of the arguments that it changes."""


@functools.cache
def _facts(func: Any) -> _Facts:
    schema = func._schema
    return _Facts(
        of_shape=schema.name in _OF_SHAPE,
        draws=torch.Tag.nondeterministic_seeded in func.tags,
        moves=schema.name == "aten::_to_copy",
        views=any(returned.alias_info is not None for returned in schema.returns),
        writes=frozenset(
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        ),
    )


def _written(func: Any, facts: _Facts, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The results of an operation that changes tensors."""
    named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
    written = tensors_in([named.get(name) for name in facts.writes])
    for tensor in written:
        if not isinstance(tensor, Absent):
            raise NeedsValues(f"torch's {_name(func)} writes them into another tensor")
        if not isinstance(tensor.base, Absent):
            raise NeedsValues(f"torch's {_name(func)} changes them")
    made = _on_meta(func, args, kwargs, _fresh)
    if len(written) == 1 and isinstance(made, TensorKind):
        if made.meta.shape != written[0].shape:
            raise NeedsValues(f"torch's {_name(func)} changes their shape in place")
        return written[0]
    given = _first(args, kwargs)
    return _filled(made, given.device, given.base if facts.views else None)


def _on_meta(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], meta: Callable[[Tensor], Tensor]
) -> Any:
    """The kinds of what an operation returns."""
    if "device" in kwargs:
        kwargs = kwargs | {"device": torch.device("meta")}
    try:
        made = func(*on_tensors(args, meta), **on_tensors(kwargs, meta))
    except Exception as error:
        raise NeedsValues(f"torch's {_name(func)} wants them ({error})") from error
    if any(isinstance(leaf, (bool, float)) for leaf in leaves(made)):
        raise NeedsValues(f"torch's {_name(func)} wants them")
    return on_tensors(made, kind_of)  # type: ignore[arg-type]


def _filled(made: Any, device: torch.device, base: Tensor | None) -> Any:
    """Absent tensors in the place of kinds."""
    if isinstance(made, (tuple, list)):
        return type(made)(_filled(each, device, base) for each in made)
    if not isinstance(made, TensorKind):
        return made
    result = Absent(made, device)
    result.base = result if base is None else base
    return result


def _first(args: tuple[Any, ...], kwargs: Any) -> Absent:
    for each in args:
        if type(each) is Absent:
            return each
    return next(leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, Absent))


_KNOWN: dict[Any, Any] = {}
"""Results of operations by what they were given."""


def _keep(table: dict[Any, Any], key: Any, value: Any) -> Any:
    if len(table) >= _MOST_KNOWN:
        table.clear()
    table[key] = value
    return value


def _signature(value: Any) -> Any:
    if isinstance(value, Tensor):
        return kind_of(value)
    if isinstance(value, dict):
        return tuple((name, _signature(each)) for name, each in value.items())
    if isinstance(value, (tuple, list)):
        return tuple(map(_signature, value))
    return type(value), value


def _meta(tensor: Tensor) -> Tensor:
    return kind_of(tensor).meta


def _fresh(tensor: Tensor) -> Tensor:
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
