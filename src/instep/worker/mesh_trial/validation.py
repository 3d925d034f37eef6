"""A validation on a mesh, beside that of one process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from instep.data.loader import Loader
from instep.data.reading.generators import preserved
from instep.errors import RecipeError
from instep.recipe.forward import Forward, Measured, has_short
from instep.recipe.rehearsal import first_batch
from instep.worker.replica.replica import Replica

if TYPE_CHECKING:
    pass


def check_validation(
    forward: Forward, loader: Loader, samples: int, replica: Replica, alone: Measured | None
) -> None:
    """Compare the loss of one validation batch with that of one process.

    Args:
        forward: runs the model that is split; all processes of the replica call this together.
        loader: of the validation dataset.
        samples: of a validation batch.
        replica: with the model.
        alone: what the first process of the replica has found with the whole model, if it has.

    Raises:
        RecipeError: it is another, or the model cannot be run so in evaluation.
    """
    read = first_batch(loader, samples)
    if not read.size:
        return
    known = torch.full((1,), math.nan, dtype=torch.float64, device=forward.device)
    if alone is not None:
        known[0] = alone.values["loss"]
    replica.comm.broadcast(known)
    model, wanted = forward.model.eval(), float(known.item())
    try:
        with preserved():
            found = forward.measure(read.batch, read.size)
    finally:
        model.train()
    if found is None or math.isnan(wanted):
        return
    loss = found.values["loss"]
    near = 0.02 if forward.precision != "float32" or has_short(model) else 1e-4
    if not math.isclose(loss, wanted, rel_tol=near, abs_tol=near):
        raise RecipeError(
            f"[mesh] would validate another model than one process does: the loss of the first "
            f"{read.size} validation samples adds up to {loss:.6g}, and in one process to "
            f"{wanted:.6g}. The model computes otherwise in evaluation mode than when it trains. "
            "Use another [mesh], or leave the section out."
        )
