"""Mistakes of a recipe that show only when it is run: found before the first step, and named.

A metric is looked at here once, on the first batch of the validation, and not after an
epoch of training. It knows nothing of workers and steps.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from instep.data.loader import Loader, Slice
from instep.data.reading.generators import preserved
from instep.errors import RecipeError

if TYPE_CHECKING:
    from instep.recipe.forward import Forward


def loss_of(loss: Callable[[Any, Any], Any], outputs: Any, target: Any) -> Any:
    """What a recipe's loss gives for what its model gave.

    Raises:
        RecipeError: the loss cannot take what the model returned, which is no tensor.
    """
    try:
        return loss(outputs, target)
    except (TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        if isinstance(outputs, Tensor):
            raise
        given = type(outputs).__name__
        parts = f" ({', '.join(map(repr, outputs))})" if isinstance(outputs, Mapping) else ""
        said = str(error).strip().splitlines()
        raise RecipeError(
            f"the model returns a {given}{parts}, which Recipe.loss cannot take "
            f"({type(error).__name__}: {said[0] if said else 'no text'}). Give "
            "compute_loss=lambda model, batch: ... instead of loss, and take from the outputs "
            "what the loss is of."
        ) from error


def called_backward() -> RecipeError:
    """The error of a pass in which gradients arrived before its loss was there."""
    return RecipeError(
        "backward() was called while the loss was computed (in compute_loss, the loss or the "
        "model): its gradients belong to no loss that could be weighed, and workers would not "
        "agree on them. Add the terms to the loss that you return; where you need a gradient "
        "yourself (a penalty, an attack), take it with torch.autograd.grad."
    )


def try_validation(forward: Forward, loader: Loader, samples: int) -> None:
    """Measure one batch of the validation, in eval mode, on a copy of the model; nothing stays.

    Args:
        forward: of this worker.
        loader: of the validation.
        samples: of the batch, as many as each will have.

    Raises:
        InstepError: the loss or a metric is not what it must be, or no sample can be read.
    """
    reads = loader.read([Slice(0, 0, samples)])
    read = next(reads)
    for _ in reads:
        pass
    if not read.size:
        return
    try:
        model = copy.deepcopy(forward.model)
    except Exception:  # the module cannot be copied: then the first validation decides
        return
    with preserved(), forward.on(model.eval(), forward.precision):
        forward.measure(read.batch, read.size)
