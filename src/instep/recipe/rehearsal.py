"""Finds mistakes of a recipe that show only when it runs, before the first step.

The metrics are computed once, on the first batch of the validation dataset, and not only after an
epoch of training. Workers and steps are not known here.
"""

from __future__ import annotations

import copy

from instep.data.loader import Loader, Slice
from instep.data.reading.generators import preserved
from instep.errors import RecipeError
from instep.recipe.forward import Forward


def called_backward() -> RecipeError:
    """The error of a pass whose gradients arrived before its loss was returned."""
    return RecipeError(
        "backward() was called while the loss was computed (in compute_loss, the loss or the "
        "model): those gradients have no weight, and are not summed over the workers. Add the "
        "terms to the loss that you return; where you need a gradient yourself (a penalty, an "
        "attack), take it with torch.autograd.grad."
    )


def try_validation(forward: Forward, loader: Loader, samples: int) -> None:
    """Compute loss and metrics of one validation batch, in eval mode, on a copy of the model.

    Args:
        forward: of this worker.
        loader: of the validation dataset.
        samples: of a validation batch.

    Raises:
        InstepError: the loss or a metric is not a number, or no sample can be read.
    """
    reads = loader.read([Slice(0, 0, samples)])
    read = next(reads)
    for _ in reads:
        pass
    if not read.size:
        return
    try:
        model = copy.deepcopy(forward.model)
    except Exception:  # the module cannot be copied: the first validation will show it
        return
    with preserved(), forward.on(model.eval(), forward.precision):
        forward.measure(read.batch, read.size)
