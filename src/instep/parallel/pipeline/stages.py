"""One stage of a pipeline: the model's own forward pass, of which only some blocks are computed.

A stage runs the whole forward pass of the user, unchanged. Parameters that it lacks are absent
(`absent.py`), and so is what a block of an earlier stage returns: such a block is not run. What is
absent when the stage's first block is called has to come from the stage before, and becomes what
has come: the same tensor object, wherever the user's code has it. When the first block of the next
stage is called, the pass has come to its end here. Masks, positions and rotary tables are so
computed on each stage, from the batch.

A random number depends on the job's key and on the block that draws it, not on the process: the
generators are set anew where a block begins and where it ends (`draws.py`).

Ranks and messages are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import RecipeError
from instep.parallel.nested import leaves, on_tensors, tensors_in
from instep.parallel.pipeline.absent import (
    Absent,
    NeedsValues,
    absent,
    any_absent,
    became,
    become,
    kind_of,
)
from instep.parallel.pipeline.arrivals import Arrival, Passed, Receive, StageDone, StagePass
from instep.parallel.pipeline.blocks import Chain
from instep.parallel.pipeline.calls import intercepted
from instep.parallel.pipeline.draws import Key, ModelDraws, seed


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
        self._slots: list[tuple[dict[str, Any], str, str, Tensor]] = [
            (module._parameters, key, first_names[id(parameter)], absent(parameter.detach()))
            for module in model.modules()
            for key, parameter in module._parameters.items()
            if parameter is not None
        ]
        self._absent_ids = {id(nothing) for _, _, _, nothing in self._slots}
        self._absent: frozenset[int] = frozenset()
        self._real: dict[int, nn.Parameter | None] = {}
        self._lacking: dict[tuple[int, int], frozenset[int]] = {}
        self._shapes: dict[Any, Any] = {}
        self._seen: set[str] = set()
        self._alike: dict[str, Any] = {}
        self._by_rule: set[str] = set()
        self._classes = {
            module: type(module) for block in chain.blocks.values() for module in block.modules()
        }
        self._draws = ModelDraws()
        self._pass: StagePass | None = None
        self.examined = False
        """Whether the trial is over: every process then knows the same of each block."""

    @contextmanager
    def ready(self, key: int = 0) -> Iterator[None]:
        """A context in which `forward` can be called, and backward passes run.

        Args:
            key: of the micro-batch.
        """
        self._draws.watch(key)
        try:
            with intercepted(self.chain.blocks, self._called):
                yield
        finally:
            self._hide(frozenset())
        self._draws.more()  # those that the backward passes drew from

    def names(self, first: int, stop: int) -> set[str]:
        """The parameters that the stage of blocks [first, stop) uses."""
        parts = set(range(first, stop))
        return {name for name, used in self.chain.parts.items() if used & parts}

    def drop(self, held: set[str]) -> None:
        """Free the parameters that are not `held`; their places in the model become None."""
        for parameters, key, name, _ in self._slots:
            if name not in held:
                parameters[key] = None

    def show(self, first: int, stop: int) -> None:
        """Let the model have the parameters of the stage of blocks [first, stop); inside `ready`.

        The others are absent, also in the backward pass: activation checkpoints run blocks in it.
        """
        lacking = self._lacking.get((first, stop))
        if lacking is None:
            held = self.names(first, stop)
            lacking = self._lacking[first, stop] = frozenset(
                place for place, (_, _, name, _) in enumerate(self._slots) if name not in held
            )
        self._hide(lacking)

    def _hide(self, lacking: frozenset[int]) -> None:
        before, self._absent = self._absent, lacking
        if before is lacking:
            return
        for place in before - lacking:
            parameters, key, _, _ = self._slots[place]
            parameters[key] = self._real.pop(place)
        for place in lacking - before:
            parameters, key, _, nothing = self._slots[place]
            self._real[place] = parameters[key]
            parameters[key] = nothing

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
        self.show(first, stop)
        while True:
            now = StagePass(first, stop, key, receive)
            passed = self._once(now, call)
            if not self._draws.more():
                return passed
            if now.changed():
                raise RecipeError(
                    "mesh.stages: the model draws random numbers that it did not draw when it was "
                    f"examined, and blocks after {self._names[first]!r} change in place what that "
                    "block was called with. Draw from the first step on, or change nothing in "
                    "place."
                )

    def _once(self, now: StagePass, call: Callable[[], Any]) -> Passed:
        self._pass = now
        self._draws.set(now.key, "")
        try:
            result = call()
        except StageDone:
            return Passed(now.sent, None)
        except NeedsValues as error:
            place = self._names[max(now.next - 1, 0)]
            raise self._in_the_way(now, f"at {place!r}, {error}") from error
        finally:
            self._pass = None
            if self._absent_ids & now.arrived.keys():
                self._renew()
        if result is None and not now.next:
            return Passed([], None, empty=True)
        if now.next < len(self._names):
            raise RecipeError(
                f"mesh.stages: the block {self._names[now.next]!r} was not called in a forward "
                "pass: a pipeline needs the same blocks in the same order for every batch."
            )
        assert now.stop == len(self._names), "the next stage's block is called before the end"
        if any_absent(result):
            raise self._in_the_way(now, f"the loss, after {self._names[-1]!r}, needs them")
        return Passed([], result)

    def _renew(self) -> None:
        """New absent tensors for parameters that arrived, as arguments of a block."""
        for place, (parameters, key, name, nothing) in enumerate(self._slots):
            if not isinstance(nothing, Absent):
                self._slots[place] = (parameters, key, name, absent(nothing))
                if place in self._absent:
                    parameters[key] = self._slots[place][3]
        self._absent_ids = {id(nothing) for _, _, _, nothing in self._slots}

    def _called(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        now, place = self._pass, self._index[name]
        if now is None:  # an activation checkpoint computes it again
            return run(*on_tensors(args, became), **on_tensors(kwargs, became))
        if place != now.next:
            raise RecipeError(
                f"mesh.stages: the block {name!r} was called where {self._names[now.next]!r} was "
                "expected: a pipeline needs the same blocks in the same order for every batch."
                if now.next < len(self._names)
                else f"mesh.stages: the block {name!r} was called a second time in one pass."
            )
        if place == now.stop:
            now.sent = list(leaves((args, kwargs)))
            raise StageDone
        now.next += 1
        if place < now.first:
            out = self._skipped(name, run, args, kwargs)
        else:
            if place == now.first and place:
                self._arrive(now, args, kwargs)
            elif any_absent((*args, *kwargs.values())):
                raise self._in_the_way(now, f"{name!r} is called with them")
            self._draws.set(now.key, name)
            out = run(*args, **kwargs)
            if any_absent(out):
                raise self._in_the_way(now, f"{name!r} computes with them")
            if name not in self._seen or name in self._by_rule:
                self._compare_shapes(name, (args, kwargs), out)
        self._draws.set(now.key, f"after {name}")
        return out

    def _arrive(self, now: StagePass, args: Any, kwargs: Any) -> None:
        """Let what is absent become what comes from the stage before, wherever it is known."""
        arrivals: dict[int, Arrival] = {}
        for place, leaf in enumerate(leaves((args, kwargs))):
            if isinstance(leaf, Absent):
                arrivals.setdefault(id(leaf), Arrival(place, leaf))
        tensors = now.receive(list(arrivals.values()))
        for (number, arrival), tensor in zip(arrivals.items(), tensors, strict=True):
            now.arrived[number] = arrival.like, tensor._version
            become(arrival.like, tensor)

    def _skipped(self, name: str, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a block of an earlier stage returns, without values."""
        given = list(leaves((*args, *kwargs.values())))
        seen = (name, torch.is_autocast_enabled("cpu"), *map(_signature, given))
        device = next(leaf.device for leaf in given if isinstance(leaf, Tensor))
        found = self._shapes.get(seen)
        if found is None:
            args, kwargs = on_tensors(args, absent), on_tensors(kwargs, absent)
            try:
                with torch.no_grad(), self._as_examined(name):
                    found = on_tensors(run(*args, **kwargs), absent)
            except NeedsValues as error:
                found = self._like_first(name, given, error)
            # new ones, as these may be the arguments, which may become what arrives
            found = on_tensors(found, lambda one: Absent(kind_of(one), device))
            self._shapes[seen] = found
        if type(found) is Absent:
            return Absent(found.kind, device)
        return on_tensors(found, lambda one: Absent(kind_of(one), device))

    @contextmanager
    def _as_examined(self, name: str) -> Iterator[None]:
        """Without parameters, a block computes as the whole model's does: not compiled (it would be
        for absent tensors), and not cut by a tensor plan, as its layers may be that share a
        parameter with a block of this stage."""
        block = self.chain.blocks[name]
        compiled = block.__dict__.pop("_compiled_call_impl", None)
        within = {id(module._parameters) for module in block.modules()}
        slots = [slot for slot in self._slots if id(slot[0]) in within]
        before = [(parameters, key, parameters[key]) for parameters, key, _, _ in slots]
        classes = [(module, module.__class__) for module in block.modules()]
        for parameters, key, _, nothing in slots:
            parameters[key] = nothing
        for module, cls in classes:
            object.__setattr__(module, "__class__", self._classes.get(module, cls))
        try:
            yield
        finally:
            for module, cls in classes:
                object.__setattr__(module, "__class__", cls)
            for parameters, key, parameter in before:
                parameters[key] = parameter
            if compiled is not None:
                block.__dict__["_compiled_call_impl"] = compiled

    def _like_first(self, name: str, given: list[Any], error: NeedsValues) -> Any:
        """The same of a block whose own code wants values: its results have the shape of its input,
        as they had in the trial."""
        if name not in self._alike or (self.examined and name not in self._by_rule):
            raise NeedsValues(f"the shape of what {name!r} returns depends on values") from error
        self._by_rule.add(name)
        first = next(leaf for leaf in given if isinstance(leaf, Tensor))
        return on_tensors(self._alike[name], lambda _: absent(first))

    def _compare_shapes(self, name: str, given: Any, out: Any) -> None:
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

    def _in_the_way(self, now: StagePass, what: str) -> RecipeError:
        """The refusal of a stage that needs more than what its first block is called with."""
        return RecipeError(
            f"mesh.stages cannot cut this model in front of {self._names[now.first]!r}: only what "
            "that block is called with crosses the cut, and other activations from before it are "
            f"needed: {what}. Cut it elsewhere (mesh.cuts), or leave mesh.stages out."
        )


def _signature(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return kind_of(leaf)
    return leaf if isinstance(leaf, (bool, int, float, str)) or leaf is None else type(leaf)


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
