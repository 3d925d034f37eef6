"""Splits a model over the ranks of its replica, along all axes of the mesh.

First into stages, then a stage's layers by the tensor plan, then what is left into rows. Steps and
other replicas are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import Any, Protocol

from torch import nn

from instep.parallel.layout import Example, Layout
from instep.parallel.replica_group import ReplicaGroup
from instep.parallel.slots import Slots
from instep.spec import MeshSpec


class SplitModel(Protocol):
    """A model that is split: how it is run, and what this rank holds."""

    slots: Slots

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model; all ranks do so together. What it returns must hold
        every tensor that `backward` is called on."""

    def set_counts(self, counts: bool) -> None:
        """Whether the gradients of this rank's next passes count."""

    def finish_pass(self) -> None:
        """A backward pass is over; when this returns, all its gradients have been told."""

    def free(self) -> None:
        """Forget what was gathered, as after a pass without `backward`."""


def split(
    model: nn.Module,
    group: ReplicaGroup,
    mesh: MeshSpec,
    layout: Layout,
    example: Example | None = None,
    steady: Container[str] | None = None,
) -> Any:
    """Split a model in place; each rank keeps its part.

    Args:
        model: whole, the same on every rank.
        group: the ranks.
        mesh: the axes.
        layout: of the model; the same on every rank of every replica.
        example: where there are stages.
        steady: names of the blocks that every pass runs; None: all.

    Returns:
        A `SplitModel`; with stages a `pipeline.staged.Staged`, whose passes go forward and back.

    Raises:
        RecipeError: the model cannot be split.
        PeerError: another rank was lost.
    """
    pipeline = None
    if mesh.stages > 1:
        from instep.parallel.pipeline.pipeline import Pipeline

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
        from instep.parallel.tensor import apply_plan

        assert layout.plan is not None, "the tensor axis needs a plan"
        apply_plan(model, layout.plan, group.axis("tensor"))
    if pipeline is not None:
        from instep.parallel.pipeline.staged import Staged

        rows = None
        if mesh.shard > 1:
            from instep.parallel.rows import Rows

            rows = Rows(model, group.device_mesh)
        return Staged(pipeline, rows)
    if mesh.shard > 1:
        from instep.parallel.sharded import shard

        return shard(model, group.axis("shard"), zero=mesh.zero, steady=steady)
    from instep.parallel.tensor.cut_model import CutModel

    return CutModel(model)
