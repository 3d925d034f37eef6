"""What the modules of a model get and give in one pass, and what they give for a part of it.

A module is run again with its inputs cut to a part of the sequence. If it gives the same part of
its outputs, it works on each position alone; so does the code of a module between the calls of
others, if it does with those others' outputs taken from the record. How a model is cut is not
known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from instep.parallel.nested import on_tensors, tensors_in

TOLERANCE = 1e-5
"""Largest difference, relative to the largest value."""

Part = Callable[[int], tuple[int, int]]
"""From a size to a part of it, [first, stop)."""

Cuts = dict[int, int]
"""For tensors by number, those of a call's inputs or outputs: the dimension that is cut, from the
last."""


@dataclass
class Call:
    """One call of a module in a pass of the whole model."""

    name: str
    module: nn.Module
    inputs: Any
    """Its arguments, by place and by name."""
    learned: list[bool]
    """For each tensor of the inputs: whether it depends on parameters."""
    made: Any = None
    """What it gives."""
    within: list[Call] = field(default_factory=list)
    """Calls of other modules that it makes itself."""

    def walk(self) -> Iterator[Call]:
        yield self
        for each in self.within:
            yield from each.walk()


def record(model: nn.Module, run: Callable[[], Tensor]) -> Call:
    """All calls of one pass without dropout, as the first call and those within it."""
    top = Call("", model, ((), {}), [])
    stack = [top]

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        learned = [each.grad_fn is not None for each in tensors_in((args, kwargs))]
        call = Call(name, module, _copied((args, kwargs)), learned)
        stack[-1].within.append(call)
        stack.append(call)

    def after(made: Any) -> None:
        stack.pop().made = _copied(made)

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles.append(
            module.register_forward_pre_hook(
                lambda m, args, kwargs, n=name: before(n, m, args, kwargs), with_kwargs=True
            )
        )
        handles.append(module.register_forward_hook(lambda m, args, made: after(made)))
    try:
        with _without_dropout(model):
            run()
    finally:
        for handle in handles:
            handle.remove()
    return top


def alone(call: Call, cuts: Cuts, part: Part) -> bool:
    """Whether a module gives for a part of its inputs the same part of its outputs."""
    try:
        with _without_dropout(call.module):
            args, kwargs = _cut(call.inputs, cuts, part)
            made = call.module(*args, **kwargs)
    except Exception:  # whatever the user's code raises when shapes do not fit
        return False
    return _is_part(made, call, cuts, part)


def glue(call: Call, cuts: Cuts, part: Part) -> list[tuple[Call, Cuts]] | None:
    """The calls within a module, and which of their inputs are cut, if its own code gives for a
    part of its inputs the same part of its outputs; else None."""
    arrived: list[tuple[Call, Cuts]] = []
    left: dict[nn.Module, list[Call]] = {}
    for each in call.within:
        left.setdefault(each.module, []).append(each)

    def stand_in(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        inner = left[module].pop(0)
        found = _cuts_between((args, kwargs), inner.inputs, part)
        wanted = tensors_in(_cut(inner.inputs, found, part))
        if not all(map(_near, tensors_in((args, kwargs)), wanted)):
            raise ValueError(f"the inputs of {inner.name} are not a part of the whole model's")
        arrived.append((inner, found))
        return _cut(inner.made, outputs_of(inner, found), part)

    try:
        with _without_dropout(call.module):
            for module in left:
                module.__dict__["forward"] = lambda *args, m=module, **kwargs: stand_in(
                    m, *args, **kwargs
                )
            args, kwargs = _cut(call.inputs, cuts, part)
            made = call.module(*args, **kwargs)
    except Exception:
        return None
    finally:
        for module in left:
            module.__dict__.pop("forward", None)
    return arrived if _is_part(made, call, cuts, part) else None


def outputs_of(call: Call, cuts: Cuts) -> Cuts:
    """Which outputs of a call are cut where these inputs are: those that have such a dimension."""
    if not cuts:
        return {}
    number, dim = next(iter(cuts.items()))
    like = tensors_in(call.inputs)[number]
    return {
        at: dim
        for at, each in enumerate(tensors_in(call.made))
        if each.dim() == like.dim() and each.shape[dim] == like.shape[dim]
    }


def mixed_dims(call: Call, number: int, made: int) -> list[int]:
    """Dimensions, from the last, along which one place of an input changes an output at others.

    None if the module cannot be called again, as with a cache of keys and values that the pass has
    filled.

    Args:
        number: of the input.
        made: of the output, of the same shape.
    """
    inputs = _copied(call.inputs)
    given = tensors_in(inputs)[number]
    first = given[(0,) * (given.dim() - 1)]
    first += torch.linspace(1.0, 2.0, len(first)).to(first)
    try:
        with _without_dropout(call.module):
            args, kwargs = inputs
            changed = tensors_in(call.module(*args, **kwargs))[made]
    except Exception:  # whatever the user's code raises
        return []
    differ = (changed != tensors_in(call.made)[made]).any(-1, keepdim=True)
    places = range(-2, -given.dim() - 1, -1)
    return [dim for dim in places if bool(differ.narrow(dim, 1, differ.shape[dim] - 1).any())]


def _is_part(made: Any, call: Call, cuts: Cuts, part: Part) -> bool:
    given, outputs = tensors_in(made), outputs_of(call, cuts)
    wanted = tensors_in(_cut(call.made, outputs, part))
    return len(given) == len(wanted) and all(map(_near, given, wanted)) and bool(outputs)


def _near(given: Tensor, wanted: Tensor) -> bool:
    if given.shape != wanted.shape:
        return False
    if not wanted.is_floating_point():
        return bool(given.equal(wanted))
    largest = float(wanted.nan_to_num(0, 0, 0).abs().max()) if wanted.numel() else 0.0
    return torch.allclose(given, wanted, rtol=0, atol=TOLERANCE * largest, equal_nan=True)


def _cut(value: Any, cuts: Mapping[int, int], part: Part) -> Any:
    numbers = iter(range(1 << 30))

    def change(tensor: Tensor) -> Tensor:
        dim = cuts.get(next(numbers))
        if dim is None:
            return tensor.clone()
        first, stop = part(tensor.shape[dim])
        return tensor.narrow(dim, first, stop - first).clone()

    return on_tensors(value, change)


def _cuts_between(given: Any, whole: Any, part: Part) -> Cuts:
    """Which tensors are a part of those of the whole model, and in which dimension.

    Raises:
        ValueError: one is neither whole nor such a part.
    """
    found: Cuts = {}
    for number, (a, b) in enumerate(zip(tensors_in(given), tensors_in(whole), strict=True)):
        if a.shape == b.shape:
            continue
        sizes = zip(range(-b.dim(), 0), a.shape, b.shape, strict=True)
        ((dim, size, length),) = (each for each in sizes if each[1] != each[2])
        first, stop = part(length)
        if size != stop - first:
            raise ValueError(f"{size} is not a part of {length}")
        found[number] = dim
    return found


def _copied(value: Any) -> Any:
    return on_tensors(value, lambda each: each.detach().clone())


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    """In eval mode, but for norms over the batch: they mix samples in training only."""
    modes = {module: module.training for module in model.modules()}
    try:
        for module, mode in modes.items():
            module.training = mode and isinstance(module, _NormBase)
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
