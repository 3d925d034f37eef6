"""A pass over several micro-batches draws what each of them would have drawn in a pass of its own.

Random draws belong to a micro-batch: its generator is set from a key of the job. Where several
run as one pass, each operation that draws is cut along its first dimension, which is that of the
samples, and each part draws from the generator of its micro-batch. So dropout, in whatever
layer, and noise that is drawn for each sample come out the same however work was dealt.

What cannot be cut (one draw for a whole batch, a permutation of its samples, draws from numpy) is
refused. A tensor whose first dimension is not that of the samples, but as long, is cut all the
same: it takes a trial against passes apart to see that.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from instep.errors import RecipeError


class ByMicroBatch(TorchDispatchMode):
    """In this context draws are those of micro-batches apart. Good for one forward pass, and for
    its backward pass, in which checkpoints repeat parts of it.

    The process's own generator is always that of the first micro-batch, and says how far the
    others are: so a checkpoint that puts it back puts all of them back.

    Args:
        keys: what the generator of each micro-batch is set from.
        sizes: samples of each, in the order in which they stand in the batch.

    Raises:
        RecipeError: something is drawn that belongs to no single micro-batch.
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
        """Every micro-batch at its start, and the process's generator at that of the first."""
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
        if named.get("generator") is not None:  # the user's own, which the trial looks at
            return func(*args, **kwargs)
        rows, device = _rows(named), _device(named)
        generator = _generator(device)
        before = generator.get_state()
        if not rows or rows % self._samples:
            made = func(*args, **kwargs)
            if not torch.equal(generator.get_state(), before):
                shape = f" of shape {list(made.shape)}" if isinstance(made, Tensor) else ""
                raise _no_part_of(f"with torch's {func._schema.name.split('::')[-1]}{shape}")
            return made
        states = self._states.get((device, _bytes(before)))
        if states is None:  # the forward pass has set the generator: so would each part have
            states = [before] * len(self._keys)
        made, after = [], []
        ends = [rows // self._samples * end for end in accumulate(self._sizes)]
        for first, stop, state in zip([0, *ends], ends, states, strict=False):
            generator.set_state(state)
            cut = {name: _cut(name, value, rows, first, stop) for name, value in named.items()}
            given = [cut.pop(a.name) for a, _ in zip(func._schema.arguments, args, strict=False)]
            made.append(func(*given, **cut))
            after.append(generator.get_state())
        generator.set_state(after[0])
        self._states[device, _bytes(after[0])] = after
        return _joined(func, made, named, ends)


def _cut(name: str, value: Any, rows: int, first: int, stop: int) -> Any:
    """The part of an argument that belongs to rows [first, stop); all of it where it has none."""
    if isinstance(value, Tensor) and value.dim() and value.shape[0] == rows:
        return value[first:stop]
    if name == "size" and value and value[0] == rows:
        return [stop - first, *value[1:]]
    return value


def _joined(func: Any, made: list[Any], named: dict[str, Any], ends: list[int]) -> Any:
    """What an operation on all rows would have returned."""
    written = [
        named[argument.name]
        for argument in func._schema.arguments
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    returns = func._schema.returns
    if written and returns and returns[0].alias_info is not None:
        return written[0] if len(returns) == 1 else tuple(written)
    if isinstance(made[0], Tensor):
        return torch.cat(made)
    sizes = [stop - first for first, stop in zip([0, *ends], ends, strict=False)]
    outputs = list(zip(*made, strict=True))
    if any(
        not isinstance(part, Tensor) or not part.dim() or part.shape[0] != size
        for parts in outputs
        for part, size in zip(parts, sizes, strict=True)
    ):
        raise _no_part_of(f"in torch's {func._schema.name.split('::')[-1]}")
    return tuple(torch.cat(parts) for parts in outputs)


def _rows(named: dict[str, Any]) -> int:
    """The first dimension of what an operation works on or makes; 0 where there is none."""
    for name, value in named.items():
        if isinstance(value, Tensor) and value.dim():
            return value.shape[0]
        if name == "size" and value:
            return int(value[0])
    return 0


def _device(named: dict[str, Any]) -> torch.device:
    """Where it draws."""
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
    """The state of the generators that are not torch's."""
    state: Any = np.random.get_state(legacy=True)
    return random.getstate(), state[1].tobytes(), state[2:]


def _no_part_of(what: str) -> RecipeError:
    return RecipeError(
        f"the forward pass draws random numbers {what}, which cannot be drawn micro-batch by "
        "micro-batch: several run as one pass with train.batch_norm = 'global'. Draw with torch, "
        "for each sample, in a tensor whose first dimension is the batch; or leave "
        "train.batch_norm out."
    )
