"""Runs all stages of a pipeline one after the other in one process, before they are used.

This finds what has to cross each cut. And it compares loss and gradients with those of the whole
model, which finds what shapes cannot show: blocks that count their calls, collect results in a
list, or leave something for each other. Models and losses that cannot be cut into parts are found
by comparing a batch with its parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from instep.errors import InstepError, RecipeError, one_line
from instep.parallel.pipeline.absent import Absent
from instep.parallel.pipeline.arrivals import Arrival, Passed, Receive
from instep.parallel.pipeline.blocks import Call
from instep.parallel.pipeline.crossing import Boundary, StageEntry, go_back
from instep.parallel.pipeline.draws import ModelDraws
from instep.parallel.pipeline.parts import cut
from instep.parallel.pipeline.stages import Runner

_KEY = 20, 0

_PARTS = 1e-4
"""How far the loss of a batch may be from those of its parts: float32 rounds them differently.
In 16 bits it may be twice their rounding."""


class StageTrial:
    """One batch through the whole model, and then through stages.

    Args:
        runner: of the model, which still has all its parameters.
        call: the pass of the whole model on the batch.
    """

    def __init__(self, model: nn.Module, runner: Runner, call: Any) -> None:
        self._runner, self._call = runner, call
        self._parameters = dict(model.named_parameters())
        self._names = list(runner.chain.blocks)
        with runner.ready(), self._own_gradients():
            result = runner.forward(0, len(self._names), call, _KEY, lambda _: []).result
            self._loss = total_of(result)
            _backward(self._loss)
            self._grads = {name: p.grad for name, p in self._parameters.items()}

    def run(self, cuts: Sequence[int]) -> list[Boundary]:
        """What crosses each of the cuts.

        Raises:
            RecipeError: a cut is impossible, or gives another result than the whole model.
        """
        runner = self._runner
        stages = list(pairwise([0, *cuts, len(self._names)]))
        begins: dict[int, tuple[Boundary, StageEntry]] = {}
        passes: list[Passed] = []
        with runner.ready(), self._own_gradients():
            for first, stop in stages:

                def receive(arrivals: list[Arrival], first: int = first) -> list[Tensor]:
                    found = [passes[-1].leaves[arrival.place] for arrival in arrivals]
                    if not all(_same_kind(*pair) for pair in zip(found, arrivals, strict=True)):
                        raise _different(
                            self._names[first], "what it is called with has another shape or type"
                        )
                    boundary = Boundary(
                        tuple(arrival.place for arrival in arrivals),
                        tuple(tensor.requires_grad for tensor in found),
                    )
                    entry = StageEntry()
                    begins[first] = boundary, entry
                    return entry.begin(found, boundary.differentiable)

                passes.append(self._forward(first, stop, receive))
            self._compare_loss(total_of(passes[-1].result), self._names[cuts[-1]])
            grads: list[Tensor] = []
            for (first, stop), passed in zip(reversed(stages), reversed(passes), strict=True):
                runner.show(first, stop)
                if stop == len(self._names):
                    _backward(total_of(passed.result))
                else:
                    sent = begins[stop][0].sent(passed.leaves, self._names[stop])
                    go_back(begins[stop][0].returning(sent), grads)
                grads = begins[first][1].gradients() if first else []
            self._compare_gradients(cuts)
        return [begins[cut][0] for cut in cuts]

    def _forward(self, first: int, stop: int, receive: Receive) -> Passed:
        try:
            return self._runner.forward(first, stop, self._call, _KEY, receive)
        except InstepError:
            raise
        except Exception as error:  # the user's model may raise anything
            raise RecipeError(
                f"mesh.stages cannot cut this model: one process computes a batch, and the stage "
                f"from {self._names[first]!r} to {self._names[stop - 1]!r} cannot "
                f"({type(error).__name__}: {one_line(error)}). Cut it elsewhere (mesh.cuts), or "
                "leave mesh.stages out."
            ) from error

    def _compare_loss(self, loss: Tensor | None, block: str) -> None:
        mine, theirs = (None if each is None else each.detach() for each in (loss, self._loss))
        if (mine is None) != (theirs is None) or (
            mine is not None and theirs is not None and not _near(mine, theirs)
        ):
            raise _different(block, "the loss is another")

    def _compare_gradients(self, cuts: Sequence[int]) -> None:
        for name, parameter in self._parameters.items():
            mine, theirs = parameter.grad, self._grads[name]
            if (mine is None) != (theirs is None) or (
                mine is not None and theirs is not None and not _near(mine, theirs)
            ):
                raise _different(self._names[cuts[0]], f"the gradient of {name!r} is another")

    @contextmanager
    def _own_gradients(self) -> Iterator[None]:
        before = {name: p.grad for name, p in self._parameters.items()}
        for parameter in self._parameters.values():
            parameter.grad = None
        try:
            yield
        finally:
            for name, parameter in self._parameters.items():
                parameter.grad = before[name]


def compare_parts(model: nn.Module, call: Call, batch: Any, samples: int, parts: int) -> None:
    """Refuse a model or a loss that looks at several samples at once: parts would not show it them.

    Compares the loss of a batch with the losses of its parts, in evaluation mode, in which nothing
    is dropped. A model that draws even then cannot be compared.

    Raises:
        RecipeError: they differ.
    """
    pieces = cut(batch, samples, parts)
    if len(pieces) < 2:
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        draws = ModelDraws()
        draws.watch(_KEY[0])
        whole = [call(batch, samples)]
        if draws.more():
            return
        both = [
            [total.detach() for each in found if (total := total_of(each)) is not None]
            for found in (whole, [_of_part(call, *piece, parts) for piece in pieces])
        ]
    finally:
        for module in training:
            module.training = True
    totals = [sum(map(float, each)) for each in both]
    near = max([_PARTS, *(2 * torch.finfo(total.dtype).eps for total in both[0])])
    if math.isfinite(totals[0]) and not math.isclose(*totals, rel_tol=near, abs_tol=near):
        raise RecipeError(
            f"mesh.pipeline_batches = {parts} would change the result: the loss of a batch is "
            f"{totals[0]:.6g}, those of its parts add up to {totals[1]:.6g} (each times its "
            "weight). The model or the loss looks at several samples at once, or its weight is "
            "not what the loss is a mean of. Set mesh.pipeline_batches = 1, or give the weight."
        )


def _of_part(call: Call, batch: Any, samples: int, parts: int) -> Any:
    try:
        return call(batch, samples)
    except Exception as error:  # the user's model may raise anything
        raise RecipeError(
            f"mesh.pipeline_batches = {parts}: the model computes a batch, but not the first "
            f"{samples} of its samples alone ({type(error).__name__}: {one_line(error)}). Set "
            "mesh.pipeline_batches = 1."
        ) from error


def total_of(found: Any) -> Tensor | None:
    """The loss of a pass times its weight; None if nothing in its batch counts."""
    if found is None:
        return None
    loss, weight = found[0], found[1]
    total: Tensor = loss * (weight or 1.0)
    return total


def _backward(loss: Tensor | None) -> None:
    if loss is not None and loss.requires_grad:
        torch.autograd.backward(loss)


def _same_kind(tensor: Any, arrival: Arrival) -> bool:
    like: Absent = arrival.like
    return isinstance(tensor, Tensor) and (tensor.shape, tensor.dtype) == (like.shape, like.dtype)


def _near(mine: Tensor, theirs: Tensor) -> bool:
    """Equal to a hundred times the rounding of their type; NaN equals NaN."""
    mine, theirs = mine.to_dense(), theirs.to_dense()
    if torch.equal(mine, theirs):
        return True
    wide = mine.double(), theirs.double()
    error = float((wide[0] - wide[1]).norm())
    return error <= 100 * torch.finfo(mine.dtype).eps * float(wide[1].norm()) or bool(
        (wide[0].isnan() == wide[1].isnan()).all() and wide[1].isnan().any()
    )


def _different(block: str, what: str) -> RecipeError:
    return RecipeError(
        f"mesh.stages cannot cut this model in front of {block!r}: {what} than that of the whole "
        "model. Blocks pass on something else than tensors (a list, a counter, an attribute). Cut "
        "it elsewhere (mesh.cuts), or leave mesh.stages out."
    )
