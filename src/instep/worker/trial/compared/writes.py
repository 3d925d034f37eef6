"""Passes that write to a parameter, each to what its batch has, once it has become large.

An embedding with `max_norm` scales down the rows of a batch, where they are longer than that. Small
ones it leaves as they are, so a trial of a model at its start sees no other value; but autograd
counts the write. Then the same is tried with large parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from instep.engine.state.frozen import written
from instep.worker.trial.model import TrialModel

_LARGER = 1e4


def refuse_writes_by_batch(model: TrialModel, parts: Sequence[Any], sizes: Sequence[int]) -> None:
    """Refuse passes that write to a parameter, if what they write depends on the batch.

    Args:
        model: has run all passes of a trial; it is left with its parameters as they are.
        parts: some batches.
        sizes: their samples.

    Raises:
        RecipeError: they do; it names the parameter.
    """
    if not model.is_written:
        return
    values = dict[str, Tensor]()
    for batch, size in zip(parts, sizes, strict=True):
        with _large(model.parameters):
            try:
                model.compute(batch, size)
            except Exception:  # of the user's code, with parameters that are much too large
                return
            now = {n: p.detach().clone() for n, p in model.parameters.items()}
        for name, value in now.items():
            if not torch.allclose(values.setdefault(name, value), value, equal_nan=True):
                raise written(name, trained=True)


@contextmanager
def _large(parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
    values = [(each, each.detach().clone()) for each in parameters.values()]
    with torch.no_grad():
        for parameter, value in values:
            parameter.copy_(value * _LARGER)
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)
