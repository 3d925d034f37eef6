"""Batches, divided into the samples that they are of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from instep.errors import RecipeError
from instep.parallel.nested import leaves, on_tensors, tensors_in


def samples_of(batch: Any, samples: int, first: int, stop: int) -> Any:
    """Samples [first, stop) of a batch."""
    tensors, rebuilt = flat(batch)
    for each in tensors:
        if not each.dim() or len(each) != samples:
            raise RecipeError(
                f"[privacy]: a batch of {samples} samples has a tensor of shape "
                f"{list(each.shape)}: its first dimension is to be that of the samples, or no "
                "gradient is of one sample alone. Change collate."
            )
    return rebuilt([each[first:stop] for each in tensors])


def flat(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors of a nested batch, and what makes such a batch of others.

    Raises:
        RecipeError: it has something else than tensors.
    """
    if strange := [each for each in leaves(batch) if not isinstance(each, Tensor)]:
        raise RecipeError(
            f"[privacy]: a batch has a {type(strange[0]).__name__} ({strange[0]!r:.40}) beside its "
            "tensors, which cannot be divided into samples. Have collate leave it out."
        )
    tensors = tensors_in(batch)

    def rebuilt(others: list[Tensor]) -> Any:
        each = iter(others)
        return on_tensors(batch, lambda tensor: next(each))

    return tensors, rebuilt
