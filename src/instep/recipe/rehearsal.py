"""Finds mistakes of a recipe that show only when it runs, before the first step.

The metrics are computed once, on the first batch of the validation dataset, and not only after an
epoch of training. Workers and steps are not known here.
"""

from __future__ import annotations

from typing import NamedTuple

from instep.data.loader import Loader, Read, Slice
from instep.data.reading.generators import preserved
from instep.errors import RecipeError
from instep.parallel.copies import copied
from instep.recipe.forward import Forward, Measured
from instep.recipe.metrics import WholeMetrics
from instep.usercode.counts import unchanged


def called_backward() -> RecipeError:
    """The error of a pass whose gradients arrived before its loss was returned."""
    return RecipeError(
        "backward() was called while the loss was computed (in compute_loss, the loss or the "
        "model): those gradients have no weight, and are not summed over the workers. Add the "
        "terms to the loss that you return; where you need a gradient yourself (a penalty, an "
        "attack), take it with torch.autograd.grad."
    )


class Rehearsed(NamedTuple):
    """A validation batch that was tried."""

    found: Measured | None = None
    """None if no sample can be read, or the model cannot be copied."""
    changed: str = ""
    """A name in Python that training has too, of a value that it has changed."""


def try_validation(forward: Forward, loader: Loader, samples: int) -> Rehearsed:
    """Compute loss and metrics of one validation batch, in eval mode, on a copy of the model.

    Args:
        forward: of this worker.
        loader: of the validation dataset.
        samples: of a validation batch.

    Raises:
        InstepError: the loss or a metric is not a number, or no sample can be read.
    """
    read = first_batch(loader, samples)
    if not read.size:
        return Rehearsed()
    try:
        model = copied(forward.model)
    except Exception:  # the module cannot be copied: the first validation will show it
        return Rehearsed()
    training = model.eval(), *forward.losses, forward.recipe.weight
    with preserved(), forward.on(model, forward.precision), unchanged(*training) as counts:
        found = forward.measure(read.batch, read.size)
        if found is not None:
            WholeMetrics(forward.recipe.metrics).rehearse(found.outputs, found.targets)
        return Rehearsed(found, counts.changed())


def first_batch(loader: Loader, samples: int) -> Read:
    """The first batch of a dataset."""
    read, *_ = loader.read([Slice(0, 0, samples)])
    return read
