"""How a model is laid out on the ranks of a replica, where that is not given by their numbers.

A tensor plan is found by trials and cuts of a pipeline by timing, so two processes may find
different ones. It is found once, and all ranks of all replicas get the same
(`worker/replica/layout.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from instep.job.mesh import MeshSpec
from instep.parallel.pipeline import find_cuts
from instep.parallel.pipeline.blocks import Call
from instep.parallel.pipeline.draws import seed
from instep.parallel.pipeline.trial import total_of
from instep.parallel.tensor import Plan, find_plan


@dataclass(frozen=True)
class Example:
    """A micro-batch, and how the model is run on it."""

    batch: Any
    samples: int
    call: Call
    """From a batch and its number of samples to its mean loss and weight; calls the model."""
    others: Sequence[tuple[Any, int]]
    """More micro-batches with their samples, for models that take other ways for other samples."""
    compute_loss: Callable[[nn.Module, Any], Tensor]
    """The mean loss of this batch, with any model, in float32."""


@dataclass(frozen=True)
class MeshLayout:
    """What every rank has to know of a model beside the mesh."""

    plan: Plan | None = None
    """Which layers the `tensor` axis cuts, and how."""
    cuts: tuple[str, ...] = ()
    """Names of the modules that begin a pipeline stage, without the first stage."""
    blocks: tuple[str, ...] = ()
    """All modules at which the model could be cut, in order: there its draws are keyed anew."""
    draws: bool = False
    """Whether a pass draws random numbers; known where there are stages."""


def find_layout(
    model: nn.Module, mesh: MeshSpec, example: Example, *, timed: bool = True
) -> MeshLayout:
    """The layout of a model; a process finds it alone.

    Args:
        model: whole, in training mode; it is left as it is.
        mesh: of the job.
        example: of what it is trained on.
        timed: whether cuts are measured; else they are the same each time.

    Raises:
        RecipeError: the model cannot be laid out so.
        SpecError: `mesh.plan` or `mesh.cuts` does not fit it.
    """
    plan, cuts, blocks = None, list[str](), list[str]()
    if mesh.stages > 1:
        cuts, blocks = find_cuts(
            model,
            example.call,
            example.batch,
            example.samples,
            ranks=mesh.stages,
            schedule=mesh.schedule,
            parts=mesh.pipeline_batches,
            cuts=mesh.cuts,
            others=example.others,
            timed=timed,
        )
    if mesh.tensor > 1:
        table = None if mesh.plan == "auto" else mesh.plan
        plan = find_plan(
            model,
            example.compute_loss,
            example.batch,
            mesh.tensor,
            table=table,
            sequence=mesh.sequence,
            whole=cuts,
        )
    return MeshLayout(plan, tuple(cuts), tuple(blocks), bool(blocks) and _draws(example))


def _draws(example: Example) -> bool:
    """Whether the loss depends on random numbers, on whatever device they are drawn."""
    losses = []
    for number in range(2):
        seed((number, 0), "")
        losses.append(total_of(example.call(example.batch, example.samples)))
    one, other = losses
    return one is not None and other is not None and not torch.equal(one, other)
