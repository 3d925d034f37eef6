"""One stage of a pipeline: the model's own forward pass, of which only some blocks are computed.

A stage runs the whole forward pass of the user, unchanged. Parameters that it lacks are absent
(`absent.py`), and so is what a block of an earlier stage returns: such a block is not run. What is
absent when the stage's first block is called has to come from the stage before, and is put in
place. When the first block of the next stage is called, the pass has come to its end here.
Masks, positions and rotary tables are so computed on each stage, from the batch.

A random number depends on the job's key and on the block that draws it, not on the process: the
generators are set anew where a block begins and where it ends.

Ranks and messages are not known here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from instep.errors import RecipeError
from instep.parallel.nested import leaves, on_tensors, tensors_in
from instep.parallel.pipeline.absent import Absent, NeedsValues, absent, absents_in
from instep.parallel.pipeline.blocks import Chain
from instep.parallel.pipeline.calls import intercepted

Key = tuple[int, int]
"""Of a micro-batch, from the job; and the number of the part."""


class Arrival(NamedTuple):
    """One tensor that a stage needs from the stage before."""

    place: int
    """Among the leaves of the arguments of the stage's first block."""
    like: Absent
    """Its shape, type and device."""


Receive = Callable[[list[Arrival]], Sequence[Tensor]]
"""Gets the tensors that a stage needs; may hand out tensors that are part of a graph."""


class Passed(NamedTuple):
    """A forward pass through one stage."""

    leaves: list[Any]
    """The leaves of the arguments of the next stage's first block; empty for the last stage."""
    result: Any
    """What the call returned; None for others than the last stage."""
    empty: bool = False
    """Nothing in the batch counts, so that the call did not call the model."""


class _Done(BaseException):
    """The next stage's first block was called. Not an Exception: user's code must not catch it."""


class Runner:
    """Runs the forward passes of stages on one model; one for each process.

    Args:
        model: the whole module; parameters may be missing (None) where no stage here has them.
        chain: its blocks.
    """

    def __init__(self, model: nn.Module, chain: Chain) -> None:
        self.chain = chain
        self._names = list(chain.blocks)
        self._index = {name: place for place, name in enumerate(self._names)}
        first_names = {id(p): name for name, p in model.named_parameters()}
        self._slots = [
            (module, key, first_names[id(parameter)], absent(parameter.detach()))
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._shapes: dict[Any, Any] = {}
        self._seen: set[str] = set()
        self._alike: dict[str, Any] = {}
        self._by_rule: set[str] = set()
        self._pass: _Pass | None = None
        self.uses_arrivals = False
        """Whether code between blocks computes with what arrived, as in `x = x + block(x)`."""
        self.examined = False
        """Whether the trial is over: every process then knows the same of each block."""

    @contextmanager
    def ready(self) -> Iterator[None]:
        """A context in which `forward` can be called, and backward passes run."""
        with intercepted(self.chain.blocks, self._called):
            yield

    def names(self, first: int, stop: int) -> set[str]:
        """The parameters that the stage of blocks [first, stop) uses."""
        parts = set(range(first, stop))
        return {name for name, used in self.chain.parts.items() if used & parts}

    def drop(self, held: set[str]) -> None:
        """Free the parameters that are not `held`; their places in the model become None."""
        for module, key, name, _ in self._slots:
            if name not in held:
                module._parameters[key] = None

    def forward(
        self, first: int, stop: int, call: Callable[[], Any], key: Key, receive: Receive
    ) -> Passed:
        """The forward pass of the stage that has the blocks [first, stop); inside `ready`.

        Args:
            first: index of a block; the stage of block 0 also has what comes before it.
            stop: index after the last; the last stage also has what comes after its blocks.
            call: the pass of the whole model.
            key: of the job, for this part of the batch: seeds all draws.
            receive: called once, unless `first` is 0.

        Raises:
            RecipeError: the model is no sequence of blocks; the text names the module.
        """
        last = stop == len(self._names)
        self._pass = now = _Pass(first, stop, key, receive)
        seed(key, "")
        try:
            with self._without(self.names(first, stop)), self._arrivals_in_code():
                result = call()
        except _Done:
            return Passed(now.sent, None)
        except NeedsValues as error:
            place = self._names[max(now.next - 1, 0)]
            raise self._in_the_way(now, f"at {place!r}, {error}") from error
        finally:
            self._pass = None
        if result is None and not now.next:
            return Passed([], None, empty=True)
        if now.next < len(self._names):
            raise RecipeError(
                f"mesh.stages: the block {self._names[now.next]!r} was not called in a forward "
                "pass: a pipeline needs the same blocks in the same order for every batch."
            )
        assert last, "the next stage's block is called before the end"
        if any(isinstance(leaf, Absent) for leaf in leaves(result)):
            raise self._in_the_way(now, f"the loss, after {self._names[-1]!r}, needs them")
        return Passed([], result)

    def _arrivals_in_code(self) -> AbstractContextManager[Any]:
        return _Arrivals() if self.uses_arrivals else nullcontext()  # it slows each call down

    @contextmanager
    def _without(self, held: set[str]) -> Iterator[None]:
        before = []
        for module, key, name, nothing in self._slots:
            if name not in held:
                before.append((module, key, module._parameters[key]))
                module._parameters[key] = nothing  # type: ignore[assignment]
        try:
            yield
        finally:
            for module, key, parameter in before:
                module._parameters[key] = parameter

    def _called(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        now, place = self._pass, self._index[name]
        if now is None:  # an activation checkpoint computes it again
            return run(*on_tensors(args, _arrived), **on_tensors(kwargs, _arrived))
        if place != now.next:
            raise RecipeError(
                f"mesh.stages: the block {name!r} was called where {self._names[now.next]!r} was "
                "expected: a pipeline needs the same blocks in the same order for every batch."
                if now.next < len(self._names)
                else f"mesh.stages: the block {name!r} was called a second time in one pass."
            )
        if place == now.stop:
            now.sent = list(leaves(on_tensors((args, kwargs), _arrived)))
            raise _Done
        now.next += 1
        if place < now.first:
            out = self._skipped(name, run, args, kwargs)
        else:
            if place == now.first and place:
                now.arrive(args, kwargs)
            args, kwargs = on_tensors(args, _arrived), on_tensors(kwargs, _arrived)
            if absents_in((args, kwargs)):
                raise self._in_the_way(now, f"{name!r} is called with them")
            seed(now.key, name)
            out = run(*args, **kwargs)
            if absents_in(out):
                raise self._in_the_way(now, f"{name!r} computes with them")
            self._compare_shapes(name, (args, kwargs), out)
        seed(now.key, f"after {name}")
        return out

    def _skipped(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block of an earlier stage returns, without values."""
        given = list(leaves((args, kwargs)))
        seen = (name, torch.is_autocast_enabled("cpu"), *map(_signature, given))
        if seen not in self._shapes:
            args, kwargs = on_tensors(args, absent), on_tensors(kwargs, absent)
            try:
                with torch.no_grad(), _uncompiled(self.chain.blocks[name]):
                    out = on_tensors(run(*args, **kwargs), absent)
            except NeedsValues as error:
                out = self._like_first(name, given, error)
            self._shapes[seen] = on_tensors(out, lambda one: one.meta)  # type: ignore[attr-defined]
        device = next(leaf.device for leaf in given if isinstance(leaf, Tensor))
        return on_tensors(self._shapes[seen], lambda meta: Absent(meta, device))

    def _like_first(self, name: str, given: list[Any], error: NeedsValues) -> Any:
        """The same of a block whose own code wants values: its results have the shape of its input,
        as they had in the trial."""
        if name not in self._alike or (self.examined and name not in self._by_rule):
            raise NeedsValues(f"the shape of what {name!r} returns depends on values") from error
        self._by_rule.add(name)
        first = next(leaf for leaf in given if isinstance(leaf, Tensor))
        return on_tensors(self._alike[name], lambda _: absent(first))

    def _compare_shapes(self, name: str, given: Any, out: Any) -> None:
        if name in self._seen and name not in self._by_rule:
            return
        first = next((leaf for leaf in leaves(given) if isinstance(leaf, Tensor)), None)
        alike = first is not None and all(
            (tensor.shape, tensor.stride(), tensor.dtype)
            == (first.shape, first.stride(), first.dtype)
            for tensor in tensors_in(out)
        )
        if name in self._by_rule and not alike:
            raise RecipeError(
                f"mesh.stages: the block {name!r} returned another shape than that of its input, "
                "and other stages cannot know it. Cut the model in front of that block only "
                "(mesh.cuts), or leave mesh.stages out."
            )
        if name not in self._seen and alike:
            self._alike[name] = on_tensors(out, absent)
        self._seen.add(name)

    def _in_the_way(self, now: _Pass, what: str) -> RecipeError:
        """The refusal of a stage that needs more than what its first block is called with."""
        return RecipeError(
            f"mesh.stages cannot cut this model in front of {self._names[now.first]!r}: only what "
            "that block is called with crosses the cut, and other activations from before it are "
            f"needed: {what}. Cut it elsewhere (mesh.cuts), or leave mesh.stages out."
        )


class _Pass:
    """A forward pass that is under way."""

    def __init__(self, first: int, stop: int, key: Key, receive: Receive) -> None:
        self.first, self.stop, self.key, self._receive = first, stop, key, receive
        self.next = 0
        """Index of the block that is called next."""
        self.sent: list[Any] = []

    def arrive(self, args: Any, kwargs: Any) -> None:
        """Put what comes from the stage before in the place of what is absent."""
        found: dict[int, Arrival] = {}
        for place, leaf in enumerate(leaves((args, kwargs))):
            if isinstance(leaf, Absent):
                found.setdefault(id(leaf), Arrival(place, leaf))
        arrivals = list(found.values())
        for arrival, tensor in zip(arrivals, self._receive(arrivals), strict=True):
            arrival.like.value = tensor


class _Arrivals(TorchFunctionMode):
    """In this context torch's functions compute with what arrived."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Put arrived tensors in the place of absent ones."""
        if absents_in((args, kwargs)):
            args, kwargs = on_tensors(args, _arrived), on_tensors(kwargs or {}, _arrived)
        return func(*args, **(kwargs or {}))


@contextmanager
def _uncompiled(block: nn.Module) -> Iterator[None]:
    """Without what `block.compile()` made, which would compile for absent tensors."""
    before = block.__dict__.pop("_compiled_call_impl", None)
    try:
        yield
    finally:
        if before is not None:
            block.__dict__["_compiled_call_impl"] = before


def _arrived(tensor: Tensor) -> Tensor:
    return tensor.value if isinstance(tensor, Absent) and tensor.value is not None else tensor


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.stride(), leaf.dtype
    return leaf if isinstance(leaf, (bool, int, float, str)) or leaf is None else type(leaf)


def seed(key: Key, name: str) -> None:
    """Set torch's, numpy's and Python's generators from a key and a name."""
    digest = hashlib.blake2b(f"{key[0]} {key[1]} {name}".encode(), digest_size=8).digest()
    number = int.from_bytes(digest, "little") >> 1
    torch.default_generator.manual_seed(number)
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(number)


@contextmanager
def drawn_by_block(model: nn.Module, blocks: Sequence[str], key: Key) -> Iterator[None]:
    """In this context a pass of a whole model draws what the passes of its stages draw.

    Args:
        model: any copy of it.
        blocks: names of all blocks of its chain.
        key: of the part.
    """

    def called(name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        seed(key, name)
        out = run(*args, **kwargs)
        seed(key, f"after {name}")
        return out

    seed(key, "")
    with intercepted({name: model.get_submodule(name) for name in blocks}, called):
        yield
