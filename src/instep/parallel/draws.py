"""Makes a pass over several micro-batches draw the random numbers of separate passes.

Each micro-batch has its own random state, from a key of the job. If several run as one pass, each
operation that draws is cut along the dimension of the samples, the first or the second, and each
part draws from the generator of its micro-batch. So dropout in any layer, and noise for each
sample, are the same however work is distributed.

An operation that cannot be cut (one draw for a whole batch, a permutation of its samples, draws
from numpy) is refused. Another dimension of the same length is mistaken for that of the samples;
only the trial, which compares with separate passes, detects that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from instep.errors import RecipeError


class ByMicroBatch(TorchDispatchMode):
    """In this context draws are those of separate passes. For one forward pass and its backward
    pass, in which activation checkpoints repeat parts of it.

    The process's own generator always has the state of the first micro-batch, and identifies the
    states of the others: a checkpoint that restores it restores all of them.

    Args:
        keys: seeds the generator of each micro-batch.
        sizes: samples of each, in the order of the batch.

    Raises:
        RecipeError: a draw cannot be cut into micro-batches.
    """

    def __init__(self, keys: Sequence[int], sizes: Sequence[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        there = [(key, size) for key, size in zip(keys, sizes, strict=True) if size]
        self._keys, self._sizes = [key for key, _ in there], [size for _, size in there]
        self._samples = sum(self._sizes)
        self._states: dict[tuple[torch.device, bytes], list[Tensor]] = {}
        self._elsewhere: Any = None

    def __enter__(self) -> ByMicroBatch:
        if self._keys:
            self._begin(torch.device("cpu"))
        if torch.cuda.is_initialized():
            for index in range(torch.cuda.device_count()):
                self._begin(torch.device("cuda", index))
        self._elsewhere = _of_others()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and len(self._keys) > 1 and _of_others() != self._elsewhere:
            raise _no_part_of("from numpy's or Python's generators")

    def _begin(self, device: torch.device) -> None:
        """Set all micro-batches to their first state, and the process's generator to the first."""
        states = [torch.Generator(device).manual_seed(key).get_state() for key in self._keys]
        _generator(device).set_state(states[0])
        self._states[device, _bytes(states[0])] = states

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Cut what draws; pass on everything else."""
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or len(self._keys) < 2:
            return func(*args, **kwargs)
        named = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if named.get("generator") is not None:  # the user's own; the trial detects it
            return func(*args, **kwargs)
        device = _device(named)
        generator = _generator(device)
        before = generator.get_state()
        cut = _place(named, self._samples)
        if cut is None:
            made = func(*args, **kwargs)
            if not torch.equal(generator.get_state(), before):
                shape = f" of shape {list(made.shape)}" if isinstance(made, Tensor) else ""
                raise _no_part_of(f"with torch's {_name(func)}{shape}")
            return made
        states = self._states.get((device, _bytes(before)))
        if states is None:  # the forward pass has seeded the generator, as each part would have
            states = [before] * len(self._keys)
        parts, after, first = [], [], 0
        for size, state in zip(self._sizes, states, strict=True):
            generator.set_state(state)
            parts.append(_run(func, len(args), named, cut, first, first + size * cut.each))
            after.append(generator.get_state())
            first += size * cut.each
        generator.set_state(after[0])
        self._states[device, _bytes(after[0])] = after
        return _joined(func, parts, named, cut)


class _SampleDim(NamedTuple):
    """Where the samples are in the tensors of an operation that draws."""

    dim: int
    rows: int
    each: int
    """Rows of each sample."""


def _place(named: dict[str, Any], samples: int) -> _SampleDim | None:
    """Samples are the first dimension, the second (time-major sequences), or have several rows."""
    shape: Any = ()
    for name, value in named.items():
        if (isinstance(value, Tensor) and value.dim()) or (name == "size" and value):
            shape = value.shape if isinstance(value, Tensor) else value
            break
    for dim in range(min(2, len(shape))):
        if shape[dim] == samples:
            return _SampleDim(dim, samples, 1)
    if shape and shape[0] and not shape[0] % samples:
        return _SampleDim(0, shape[0], shape[0] // samples)
    return None


def _run(
    func: Any, positional: int, named: dict[str, Any], cut: _SampleDim, first: int, stop: int
) -> Any:
    """An operation on rows [first, stop), in the memory format that these rows alone would have."""
    given, back = dict(named), []
    for name, value in named.items():
        if name == "size" and len(value) > cut.dim and value[cut.dim] == cut.rows:
            given[name] = [*value[: cut.dim], stop - first, *value[cut.dim + 1 :]]
        elif (
            isinstance(value, Tensor) and value.dim() > cut.dim and value.shape[cut.dim] == cut.rows
        ):
            part = value.narrow(cut.dim, first, stop - first)
            alone = torch.empty_like(part)  # some operations draw in the order of memory
            given[name] = part if part.stride() == alone.stride() else alone.copy_(part)
            back.append((part, given[name]))
    values = list(given.items())
    made = func(*(value for _, value in values[:positional]), **dict(values[positional:]))
    if _written(func):
        for part, worked_on in back:
            if part is not worked_on:
                part.copy_(worked_on)
    return made


def _joined(func: Any, parts: list[Any], named: dict[str, Any], cut: _SampleDim) -> Any:
    """What an operation on all rows would have returned."""
    written, returns = _written(func), func._schema.returns
    if written and returns and returns[0].alias_info is not None:
        return named[written[0]] if len(returns) == 1 else tuple(named[name] for name in written)
    if isinstance(parts[0], Tensor):
        return torch.cat(parts, cut.dim)
    outputs = list(zip(*parts, strict=True))
    for each in outputs:
        if any(not isinstance(part, Tensor) or part.dim() <= cut.dim for part in each) or (
            sum(part.shape[cut.dim] for part in each) != cut.rows
        ):
            raise _no_part_of(f"in torch's {_name(func)}")
    return tuple(torch.cat(each, cut.dim) for each in outputs)


def _written(func: Any) -> list[str]:
    return [
        argument.name
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _name(func: Any) -> str:
    return str(func._schema.name.split("::")[-1])


def _device(named: dict[str, Any]) -> torch.device:
    for value in named.values():
        if isinstance(value, Tensor):
            return value.device
    return torch.device(named.get("device") or "cpu")


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def _bytes(state: Tensor) -> bytes:
    return state.numpy().tobytes()


def _of_others() -> Any:
    state: Any = np.random.get_state(legacy=True)
    return random.getstate(), state[1].tobytes(), state[2:]


def _no_part_of(what: str) -> RecipeError:
    return RecipeError(
        f"the forward pass draws random numbers {what}, which cannot be drawn micro-batch by "
        "micro-batch: several run as one pass with train.batch_norm = 'global'. Draw with torch, "
        "for each sample, in a tensor whose first or second dimension is the batch; or leave "
        "train.batch_norm out."
    )
