"""Buffers after passes: a run keeps their mean over micro-batches, one machine those of a batch."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from instep.engine.state.buffers import unequal
from instep.recipe.forward import Forward
from instep.words import listed
from instep.worker.trial.compared.layers import batch_norm_buffers
from instep.worker.trial.compared.spots import Spot
from instep.worker.trial.model import PassResult, TrialModel


class BuffersAfter(NamedTuple):
    """The buffers of a model after some passes."""

    moved: bool
    """Whether passes changed one."""
    layer: str
    """The first layer of batch normalisation whose statistics differ: it is named if the gradients
    do not show the cause."""
    differs: list[str]
    """Differences to one batch, in words."""
    uncounted: str
    """One that passes move, where the samples of batches cannot be counted."""


class BufferMeans:
    """Compares the mean over micro-batches with what one batch gives.

    Args:
        model: whose buffers.
        forward: knows how many samples a batch has kept.
        near: the share of its change by which a buffer may differ.
        short: names of buffers of 16 bits in the run; in the trial they may have more.
    """

    def __init__(
        self, model: TrialModel, forward: Forward, near: float, short: Collection[str]
    ) -> None:
        self._model, self._forward, self._near = model, forward, near
        self._short = short
        self._statistics = batch_norm_buffers(model.model)

    def compare(self, apart: Sequence[PassResult], spot: Spot, whole: PassResult) -> BuffersAfter:
        """Find the buffers that are not the mean over micro-batches after the whole batch.

        Args:
            apart: the passes of those parts of a spot in which something counts.
            spot: of which they are.
            whole: the pass of all of it.

        Raises:
            RecipeError: a buffer has another size after each pass.
        """
        sizes, counted = self._kept(spot)
        moved, layer, uncounted, others, differs = False, "", "", list[str](), list[str]()
        for name, kept in self._model.committed.items():
            given = [each.buffers.get(name) for each in (*apart, whole)]
            after = [each.double() for each in given if each is not None]
            if not after:
                continue
            if len({each.shape for each in after}) > 1:
                of, _, own = name.rpartition(".")
                module = self._model.model.get_submodule(of)
                raise unequal(module, own, [list(each.shape) for each in after])
            before = _start_of(kept, after[-1])
            if all(torch.equal(each, before) for each in after) and kept is not None:
                continue
            moved = True
            if name in self._short:
                differs.append(
                    f"the buffer {name!r} has 16 bits: the mean over micro-batches, which a run "
                    "keeps, is rounded otherwise than that of one batch"
                )
                continue
            if len(apart) < len(sizes) or len(after) < len(given):
                continue  # in one of them no sample counts, so it was not run; or it did not write
            if not counted and any(not torch.equal(each, after[0]) for each in after):
                uncounted = uncounted or name
            if self._is_mean(kept, before, after, sizes):
                continue
            if name in self._statistics:
                layer = layer or self._statistics[name]
            else:
                others.append(name)
        differs += [_no_averages(others)] if others else []
        return BuffersAfter(moved, layer, differs, uncounted)

    def _is_mean(
        self, kept: Tensor | None, before: Tensor, after: list[Tensor], sizes: Sequence[int]
    ) -> bool:
        share = [size / sum(sizes) for size in sizes]
        mean = torch.zeros_like(after[-1])
        for weight, each in zip(share, after[:-1], strict=True):
            mean = mean + weight * each
        if kept is not None and not kept.is_floating_point():
            mean = mean.round()
        start = torch.where(before.isfinite() | ~after[-1].isfinite(), before, 0.0)
        gap = _distance(mean, after[-1])
        by = _distance(after[-1], start) + _distance(mean, start)
        return math.isfinite(gap) and gap <= self._near * by

    def _kept(self, spot: Spot) -> tuple[Sequence[int], bool]:
        """The samples that the parts of a spot have, and whether the batches show how many."""
        kept, sizes = self._forward.kept, spot.sizes
        each = [kept(part, size) for part, size in zip(spot.parts, sizes, strict=True)]
        if sum(each) != kept(spot.whole, sum(sizes)):
            return sizes, False
        return (each if all(each) else sizes), True


def _no_averages(names: Sequence[str]) -> str:
    one = len(names) == 1
    which = f"the buffer{'' if one else 's'} {listed([repr(name) for name in names], 6)}"
    how = "is no running average: it differs" if one else "are no running averages: they differ"
    return (
        f"{which} {how} between two micro-batches and both as one batch, and a run keeps the mean "
        "over micro-batches"
    )


def _start_of(kept: Tensor | None, after: Tensor) -> Tensor:
    """The value that a buffer had before a pass; 0 where the pass gave it its shape."""
    same = kept is not None and kept.shape == after.shape
    return kept.double() if kept is not None and same else torch.zeros_like(after)


def _distance(one: Tensor, other: Tensor) -> float:
    """Between two buffers; the same infinity in both is no difference."""
    return float(torch.where(one == other, 0.0, one - other).norm())
