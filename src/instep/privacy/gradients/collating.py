"""Batches whose rows have nothing of each other, whatever a user's `collate` would mix.

A `collate` that mixes samples, subtracts their mean or pads to the longest lets one sample change
the gradients of others, and then clipping bounds nothing. So each sample is collated alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from instep.errors import RecipeError
from instep.parallel.nested import on_tensors, tensors_in


class CollateApart:
    """Makes a batch of samples that are collated one by one.

    Args:
        collate: list of samples to batch; given one at a time.
    """

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, samples: list[Any]) -> Any:
        """Collate them.

        Raises:
            RecipeError: their tensors have different shapes.
        """
        each = [self._collate([sample]) for sample in samples]
        rows = [tensors_in(one) for one in each]
        if len({tuple((t.shape, t.dtype) for t in one) for one in rows}) > 1:
            raise RecipeError(
                "[privacy]: collate gives single samples tensors of different shapes, and padding "
                "them to the longest would have one sample change the gradients of others. Have "
                "collate pad all to one length."
            )
        if any(not t.dim() for t in rows[0]):
            return each[0]  # it is refused where it is divided into samples
        joined = iter([torch.cat(some) for some in zip(*rows, strict=True)])
        return on_tensors(each[0], lambda _: next(joined))
