"""Splits a model over the ranks of its replica, along all axes of the mesh.

First into stages, then a stage's layers by the tensor plan, then what is left into rows. Steps and
other replicas are not known here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from instep.job.mesh import MeshSpec
from instep.parallel.blocks import repeated_blocks
from instep.parallel.compiled import compile_blocks
from instep.parallel.layout import Example, MeshLayout
from instep.parallel.pipeline.pipeline import Pipeline
from instep.parallel.pipeline.staged import Staged
from instep.parallel.recompute import checkpoint_blocks
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.shard.rows import ShardedRows
from instep.parallel.shard.sharded import shard
from instep.parallel.slots import Slots
from instep.parallel.tensor import apply_plan
from instep.parallel.tensor.cut_model import CutModel


class SplitModel(Protocol):
    """A model that is split: how it is run, and what this rank holds."""

    slots: Slots

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model; all ranks do so together. What it returns must hold
        every tensor that `backward` is called on; in eval mode that is none."""

    def set_counts(self, counts: bool) -> None:
        """Whether the gradients of this rank's next passes count."""

    def finish_pass(self) -> None:
        """A backward pass is over; when this returns, all its gradients have been told."""


def split(
    model: nn.Module,
    device: torch.device,
    group: ReplicaGroup,
    mesh: MeshSpec,
    layout: MeshLayout,
    example: Example | None = None,
) -> Any:
    """Split a model in place; each rank keeps its part.

    Args:
        model: whole, the same on every rank.
        device: where it computes.
        group: the ranks.
        mesh: the axes.
        layout: of the model; the same on every rank of every replica.
        example: where there are stages.

    Returns:
        A `SplitModel`; with stages a `pipeline.staged.Staged`, whose passes go forward and back.

    Raises:
        RecipeError: the model cannot be split.
        PeerError: another rank was lost.
    """
    blocks, pipeline = repeated_blocks(model), None
    compile_blocks(model, device, every=mesh.compile == "blocks")
    if mesh.stages > 1:
        assert example is not None, "stages are tried on an example"
        pipeline = Pipeline(
            model,
            example.call,
            example.batch,
            example.samples,
            group=group.axis("stage").get_group(),
            schedule=mesh.schedule,
            parts=mesh.pipeline_batches,
            cuts=layout.cuts,
        )
    if mesh.tensor > 1:
        assert layout.plan is not None, "the tensor axis needs a plan"
        apply_plan(model, layout.plan, group.axis("tensor"))
    if mesh.checkpointing == "blocks":  # whatever else is done to a block lies inside
        checkpoint_blocks(model, blocks)
    if pipeline is not None:
        return Staged(pipeline, ShardedRows(model, group.device_mesh) if mesh.shard > 1 else None)
    if mesh.shard > 1:
        return shard(model, group.axis("shard"), zero=mesh.zero)
    return CutModel(model)
