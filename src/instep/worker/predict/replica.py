"""A trained model on a replica of several processes: split, loaded, and held against one process.

Along `shard` nothing is summed, so its numbers are those of one process. A tensor plan or cuts of a
pipeline that are wrong for a model would give wrong predictions and no error. So where there are
such axes, one sample is predicted before the model is split, and again afterwards: in float32, in
which two models differ, and under the job's precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from instep.data.batches import Batches
from instep.data.loader import Loader
from instep.data.order import key
from instep.data.reading.generators import DrawDetector
from instep.engine.member import Member
from instep.errors import RecipeError
from instep.parallel.nested import on_tensors
from instep.recipe.build import set_generators
from instep.recipe.forward import Forward, has_short, to_device
from instep.recipe.outputs import columns, predictor
from instep.recipe.recipe import Recipe
from instep.state.load import load_model
from instep.worker.passes.evaluate import first_readable
from instep.worker.replica.layout import agreed_layout, example_of
from instep.worker.replica.replica import Replica

NEAR, NEAR_IN_SHORT = 1e-5, 0.02
"""How far an output may be from that of one process, relative to its norm; and in 16 bits, where a
sum over ranks rounds otherwise. Deep models may be twice as far as 16 bits take one process from
float32, if that is more."""


def split_model(
    member: Member,
    recipe: Recipe,
    model: nn.Module,
    file: str,
    loader: Loader,
    device: torch.device,
) -> Replica:
    """Split a model over the processes of this one's replica, and load it; all call this together.

    Args:
        member: this worker's membership; its `phase` is not touched.
        recipe: what the model was trained with.
        model: built, whole; afterwards in eval mode.
        file: of the trained model.
        loader: of what is predicted.
        device: where it computes.

    Raises:
        RecipeError: the model cannot be split, or predicts other numbers then.
        CheckpointError: the file does not fit the model.
        PeerError: another process of the replica was lost meanwhile.
    """
    mesh = member.job.mesh
    if mesh.same_batch == 1:
        replica = Replica(member, model.eval(), device)
        load_model(file, model)
        return replica
    load_model(file, model)  # whole: trials run it, and a stage has only some of the names
    layout, first = None, member.number % mesh.ranks == 0
    example = _example(member, recipe, model, device)
    if first:
        layout = agreed_layout(member.run, mesh, model, example)
    check = _Check(recipe, model.eval(), loader, device, member.job.train.precision)
    replica = Replica(member, model.train(), device, layout, example)
    model.eval()
    check.compare(replica, mesh.axes)
    return replica


def _example(member: Member, recipe: Recipe, model: nn.Module, device: torch.device) -> Any:
    job = member.job
    train = Loader.of_job(
        job,
        recipe.given["train"],
        "training",
        processes=0,
        collate=recipe.collate,
        augment=recipe.augment,
        marks=member.marks,
        say=lambda text: member.emit("warning", text=text),
    )
    try:
        forward = Forward(recipe, model.train(), device, job.train.precision)
        return example_of(forward, train, job, Batches.of_job(job, train.samples))
    finally:
        train.close()


class _Check:
    """One sample, predicted by the whole model."""

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        loader: Loader,
        device: torch.device,
        precision: str,
    ) -> None:
        self._model, self._predict = model, predictor(recipe)
        self._batch = to_device(first_readable(loader, loader.samples), device)
        self._draws, self._short = False, has_short(model)
        self._ways = {each: Forward(recipe, model, device, each) for each in ("float32", precision)}
        self._wanted = {
            way: self._found(way, lambda function, *given: function(*given)) for way in self._ways
        }

    @torch.no_grad()
    def _found(self, way: str, run: Callable[..., Any]) -> Mapping[str, Any]:
        set_generators(key(0, 0))
        before = DrawDetector()
        with self._ways[way].autocast():
            outputs = run(self._predict, self._model, on_tensors(self._batch, Tensor.clone))
        self._draws |= before.drawn()
        return columns(outputs, 1) if outputs is not None else {}

    def compare(self, replica: Replica, axes: str) -> None:
        """Refuse a model that predicts other numbers now.

        Raises:
            RecipeError: naming the output.
        """
        if self._draws and replica.stages is not None:
            raise RecipeError(
                f"[mesh] {axes}: predict draws random numbers, and the stages of a pipeline draw "
                "others than one process does. Use mesh.shard."
            )
        for way, wanted in self._wanted.items():
            for name, value in self._found(way, replica.run).items():
                other = wanted[name]
                if not isinstance(value, Tensor) or not value.is_floating_point():
                    continue  # a choice between two that are almost equal may differ
                off, near = _apart(value, other), NEAR
                if way != "float32" or self._short:
                    near = max(NEAR_IN_SHORT, 2 * _apart(other, self._wanted["float32"][name]))
                if not off <= near:
                    raise RecipeError(
                        f"[mesh] {axes} would predict other numbers than one process: of the first "
                        f"sample, the output {name!r} is off by {off:.1e} of its norm in {way}; "
                        f"{near:.2g} is allowed. Use mesh.shard."
                    )


def _apart(one: Tensor, other: Tensor) -> float:
    """Their distance, relative to the norm of the second; not a number if a value is none."""
    if one.shape != other.shape:
        return math.inf
    norm = float(other.double().norm())
    return float((one.double() - other.double()).norm()) / max(norm, 1e-30)
