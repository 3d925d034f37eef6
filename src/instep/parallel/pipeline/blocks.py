"""Finds the sequence of blocks that a model is, and which parameters each part of it uses.

Blocks are the elements of the model's lists of layers (nn.Sequential, nn.ModuleList), and modules
that the user names. One forward pass is recorded: the blocks that are called exactly once, in the
order of their calls, are the chain at which the model can be cut. A part of the model is one block
and the code after it, up to the next block; the first also has the code before it.

Whether a cut is possible is not decided here: `stages.py` runs it.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from instep.errors import RecipeError, near_miss
from instep.parallel.nested import leaves
from instep.parallel.pipeline.calls import intercepted

Call = Callable[[Any, int], Any]
"""From a batch and its number of samples to its mean loss and weight; calls the model."""


class Chain(NamedTuple):
    """The blocks of a model in the order of their calls, each called once."""

    blocks: dict[str, nn.Module]
    """By name."""
    parts: dict[str, frozenset[int]]
    """Of each parameter, by its first name, the blocks in whose parts it is used."""


def find(model: nn.Module, call: Call, batch: Any, samples: int, cuts: Sequence[str] = ()) -> Chain:
    """The chain of a model, from one forward pass that is thrown away.

    Args:
        model: in training mode, as it will be trained.
        call: one forward pass.
        batch: an example.
        samples: in it.
        cuts: names of modules that have to be blocks.

    Raises:
        RecipeError: the model is no sequence of blocks, or a layer looks at more than its batch.
    """
    refuse_batch_norm(model)
    elements = dict(_elements(model))
    modules = dict(model.named_modules())
    for name in cuts:
        if name not in modules or not name:
            raise RecipeError(f"mesh.cuts names {name!r}. {near_miss(name, elements)}")
        elements = {other: each for other, each in elements.items() if not _nested(other, name)}
        elements[name] = modules[name]
    begun: list[str] = []
    recorder = _Recorder(model, lambda: len(begun))

    def record(name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begun.append(name)
        return run(*args, **kwargs)

    with intercepted(elements, record), _without_cast_cache(), recorder:
        call(batch, samples)
    recorder.refuse_writes()
    calls = Counter(begun)
    for name in cuts:
        if calls[name] != 1:
            raise _no_chain(name, calls[name])
    order = [name for name in begun if calls[name] == 1]
    if not order:
        worst = max(calls, key=calls.__getitem__, default=next(iter(elements), ""))
        raise _no_chain(worst, calls[worst])
    begins = [time for time, name in enumerate(begun, 1) if calls[name] == 1]
    blocks = {name: elements[name] for name in order}
    return Chain(blocks, _parts(model, blocks, begins, recorder.uses))


def refuse_batch_norm(model: nn.Module) -> None:
    """RecipeError if a layer normalises by the statistics of its batch."""
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            kind = type(module).__name__.removeprefix("Global")
            raise RecipeError(
                f"mesh.stages cannot cut this model: {name!r} is a {kind}, which "
                "looks at its whole batch, and a pipeline cuts batches. Use nn.GroupNorm or "
                "nn.LayerNorm, or freeze the layer (eval mode)."
            )


def _elements(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The elements of the outermost lists of layers, of lists in lists those of the inner ones."""
    listed = _is_list(module)
    for name, child in module.named_children():
        if listed and not _is_list(child):
            yield prefix + name, child
        else:
            yield from _elements(child, f"{prefix}{name}.")


def _is_list(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList) or type(module).forward is nn.Sequential.forward


def _nested(one: str, other: str) -> bool:
    return f"{one}.".startswith(f"{other}.") or f"{other}.".startswith(f"{one}.")


def _parts(
    model: nn.Module, blocks: dict[str, nn.Module], begins: list[int], uses: dict[int, set[int]]
) -> dict[str, frozenset[int]]:
    found: dict[int, set[int]] = defaultdict(set)
    for place, block in enumerate(blocks.values()):
        for parameter in block.parameters():
            found[id(parameter)].add(place)
    return {
        name: frozenset(
            found[id(parameter)]
            | {max(bisect.bisect_right(begins, time) - 1, 0) for time in uses[_storage(parameter)]}
            or {0}
        )
        for name, parameter in model.named_parameters()
    }


class _Recorder(TorchDispatchMode):
    """Notes when each parameter is used, and which buffers are written."""

    def __init__(self, model: nn.Module, time: Callable[[], int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.uses: dict[int, set[int]] = {_storage(p): set() for p in model.parameters()}
        self._model, self._time = model, time
        self._buffers = {_storage(b): name for name, b in model.named_buffers() if b.numel()}
        self._written = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Note what the operation uses, and run it."""
        kwargs = kwargs or {}
        for leaf in leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and (times := self.uses.get(_storage(leaf))) is not None:
                times.add(self._time())
        named = zip(func._schema.arguments, args, strict=False)
        for argument, value in (*named, *((a, kwargs.get(a.name)) for a in func._schema.arguments)):
            if argument.alias_info is not None and argument.alias_info.is_write:
                for leaf in leaves(value):
                    if isinstance(leaf, Tensor):
                        self._written = self._written or self._buffers.get(_storage(leaf), "")
        return func(*args, **kwargs)

    def refuse_writes(self) -> None:
        """RecipeError if a buffer was written."""
        if self._written:
            owner, _, buffer = self._written.rpartition(".")
            kind = type(self._model.get_submodule(owner)).__name__
            raise RecipeError(
                f"mesh.stages cannot cut this model: {owner!r} ({kind}) writes its buffer "
                f"{buffer!r} in the forward pass, which a pipeline runs once for each part of a "
                "batch."
            )


def _storage(tensor: Tensor) -> int:
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse
        return 0


@contextmanager
def _without_cast_cache() -> Iterator[None]:
    """Autocast casts a weight once for all its uses, which would hide all but the first."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def _no_chain(name: str, calls: int) -> RecipeError:
    what = f"{name!r} is called {calls} times in one pass" if name else "it has no list of layers"
    return RecipeError(
        f"mesh.stages cannot cut this model: {what}, and a pipeline needs a sequence of blocks "
        "that are called once each: an nn.Sequential, an nn.ModuleList, or modules that mesh.cuts "
        "names."
    )
