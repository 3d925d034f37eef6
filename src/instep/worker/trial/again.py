"""Tests before the first step whether passes depend on earlier ones, if there is nothing to cut.

A step of one micro-batch gives the result of one machine whatever the model does. What it counts in
Python, and what a loss remembers, is in no checkpoint all the same. So the first batch is run
twice, from the same parameters, buffers and generators, on copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from instep.data.loader import Read
from instep.engine.state.kept_buffers import KeptBuffers
from instep.engine.trial_result import NOTHING_TO_TRY, Trial
from instep.errors import one_line
from instep.parallel.copies import computed_anew
from instep.parallel.global_batch.batch_norm import use_running_statistics
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward, Losses
from instep.recipe.isolated import closed_over, isolated
from instep.usercode.counts import Counts, unchanged
from instep.worker.trial.first_batch import (
    REMEDY,
    another_result,
    by_parameters,
    in_state_dict,
    in_words,
    set_by_first,
)
from instep.worker.trial.model import gradients_dropped
from instep.worker.trial.moves import Moves
from instep.worker.trial.named_globals import unchanged_globals
from instep.worker.trial.sameness import not_an_argument

_Numbers = tuple[float, float]
"""The loss of a pass, and the norm of its gradient."""

_NEAR, _NEAR_IN_SHORT = 1e-4, 1e-2


def run_again(
    forward: Forward, read: Read, other: Callable[[], Read | None], *, seed: int
) -> Trial:
    """Whether a batch gives the same loss twice.

    Args:
        forward: of the worker; its model, and what its loss closes over, are left as they are.
        read: the first batch of the job.
        other: reads the second, if it is needed; None if there is none.
        seed: of the random draws of the passes.
    """
    if not read.size:
        return NOTHING_TO_TRY
    try:
        copies = _CopiesAgain(forward, seed)
        kept = (copies.model, *copies.losses, forward.recipe.weight)
        with unchanged(*kept) as before, unchanged_globals(*kept):
            once = copies.run(read)
            counts = copies.counts()
            losses, named, moved = [(once, copies.run(read))], "", ""
            counted = counts.changed()
            if not counted and (second := other()) is not None and second.size:
                found, after = before.first_set(), copies.run(second)
                before.put_back()
                anew = _CopiesAgain(forward, seed)
                if found and not (named := anew.set_by_first(found, read, second)):
                    before.put_back()
                    anew = _CopiesAgain(forward, seed)
                if not named:
                    losses += [(anew.run(second), after), (once, anew.run(read))]
                    before.put_back()
                    moved = copies.set_by_parameters(found, read) if found else ""
    except Exception as error:  # of the user's code, which the first step will call too
        why = f"cannot be tried ({type(error).__name__}: {one_line(error)})"
        of = "whether the model or its loss keeps something from call to call that no checkpoint"
        return NOTHING_TO_TRY._replace(verdict=f"not shown: {of} has {why}")
    finally:  # a loss may use the model without being given it
        reached = gradients_dropped(forward.model)
    short = any(parameter.element_size() < 4 for parameter in copies.model.parameters())
    near = _NEAR_IN_SHORT if short else _NEAR
    again = next((place for place, each in enumerate(losses) if not _same(*each, near)), None)
    if again is None:
        if moved and not (counted or named):
            return NOTHING_TO_TRY._replace(verdict=f"not shown: {by_parameters(moved)}")
        if not (how := in_words(counted, named)):
            return not_an_argument(forward.weighing.name) if reached else NOTHING_TO_TRY
        gone = f"no checkpoint has it: a resumed run would begin without it. {REMEDY}"
        return NOTHING_TO_TRY._replace(verdict=f"not shown: {how}, and {gone}")
    return NOTHING_TO_TRY._replace(
        verdict=f"no: {another_result(later=again > 0)}, and no checkpoint has that: a resumed run "
        "would begin without it. Keep it in a buffer of the model"
    )


def _same(one: _Numbers, other: _Numbers, near: float) -> bool:
    if not math.isfinite(one[0]) and not math.isfinite(other[0]):
        return True  # unknown
    pairs = zip(one, other, strict=True)
    return all(math.isclose(*each, rel_tol=near, abs_tol=near * 1e-3) for each in pairs)


class _CopiesAgain:
    """Copies of model and losses, of what functions close over but data and frozen models."""

    def __init__(self, forward: Forward, seed: int, moved: int = 0) -> None:
        memo = computed_anew(forward.model)
        memo[id(forward.embedded)] = forward.embedded
        for held in closed_over(forward.tried):
            if isinstance(held, Dataset) or (held is not forward.model and _frozen(held)):
                memo[id(held)] = held
        model, *losses = isolated([forward.model, *forward.tried], memo)
        use_running_statistics(model)
        self.model: nn.Module = model.train()
        self.losses = Losses(*losses)
        self._forward, self._seed = forward, seed
        moves = Moves(self.model, seed + moved)
        with torch.no_grad():  # what follows the parameters, as a teacher, may begin as their equal
            for name, parameter in self.model.named_parameters():
                if parameter.requires_grad:
                    moves.move(name, parameter)
        self._parameters = [(each, each.detach().clone()) for each in self.model.parameters()]
        self._buffers = KeptBuffers(self.model)

    def counts(self) -> Counts:
        """Note what they keep in Python now."""
        return Counts((self.model, *self.losses, self._forward.recipe.weight))

    def run(self, read: Read, like: _CopiesAgain | None = None) -> _Numbers:
        """Run a pass from the same parameters, buffers and generators; or from those of others."""
        self._buffers.put_back()
        start = self._parameters if like is None else like._parameters
        with torch.no_grad():  # a pass may write to them
            for (parameter, _), (_, kept) in zip(self._parameters, start, strict=True):
                parameter.copy_(kept)
        set_generators(self._seed)
        forward = self._forward
        with forward.on(self.model, forward.precision, self.losses):
            result = forward.loss(on_tensors(read.batch, Tensor.clone), read.size)
        squares = 0.0
        if result is not None and result.loss.requires_grad:
            result.loss.backward()
            given = [p.grad for p in self.model.parameters() if p.grad is not None]
            squares = sum(float(each.to_dense().norm()) ** 2 for each in given)
            self.model.zero_grad()
        return (0.0 if result is None else float(result.loss.detach())), math.sqrt(squares)

    def set_by_first(self, found: Mapping[str, Any], same: Read, other: Read) -> str:
        """Find what the first pass of others, with the same batch, has set by it."""
        return set_by_first(found, self.counts(), lambda: self.run(other), lambda: self.run(same))

    def set_by_parameters(self, found: Mapping[str, Any], read: Read) -> str:
        """Find what the first pass of others, whose parameters are others, has set by them."""
        others = _CopiesAgain(self._forward, self._seed, moved=1)
        own = in_state_dict(self.model)
        outside = {name: value for name, value in found.items() if name not in own}
        return set_by_first(
            outside, others.counts(), lambda: others.run(read), lambda: others.run(read, self)
        )


def _frozen(held: Any) -> bool:
    return isinstance(held, nn.Module) and not any(p.requires_grad for p in held.parameters())
