"""A model that is cut into stages: how its passes are run, and what this rank holds.

Its parameters may be shared out further: as rows on the ranks of another axis.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from instep.parallel.pipeline.blocks import Call
from instep.parallel.pipeline.pipeline import Pipeline, Total
from instep.parallel.shard.rows import ShardedRows
from instep.parallel.slots import Slots


class Staged:
    """One rank's stages.

    Args:
        pipeline: of the model; what it holds may have been cut further.
        rows: what shares out the rank's parameters, if anything does.
    """

    def __init__(self, pipeline: Pipeline, rows: ShardedRows | None = None) -> None:
        self._pipeline, self._rows, model = pipeline, rows, pipeline.module
        self._held = [p for _, p in model.named_parameters()]
        self.slots = Slots(self._held)
        self._holders = {p: list(pipeline.holders[n]) for n, p in model.named_parameters()}
        owned = pipeline.owned
        self._others = {p for name, p in model.named_parameters() if name not in owned}

    def train(self, batch: Any, samples: int, key: int, call: Call) -> Total:
        """Forward and backward passes of one micro-batch; then all gradients have been told.

        All ranks call it together.

        Args:
            batch: the same on every rank.
            samples: in it; 0 where this rank only takes part.
            key: of the job, for this micro-batch.
            call: from a part and its samples to its mean loss and weight.

        Returns:
            The loss, on the last stage. The gradients are of the parts' losses times their
            weights.
        """
        with self._whole():
            total = self._pipeline.run(batch, samples, key, call)
            self._pipeline.sum_shared()
            if self._rows is not None:
                found = self._rows.sum_gradients(counts=samples > 0)
        if self._rows is None:
            found = {p: p.grad for p in self._held if p.grad is not None}
        for parameter in self._held:
            parameter.grad = None
            self.slots.tell(parameter, found.get(parameter))
        return total

    def _whole(self) -> AbstractContextManager[None]:
        return self._rows.gathered() if self._rows is not None else nullcontext()

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function that uses the model, without gradients; all ranks do so together.

        Returns:
            What it returns, on the last stage; None on the others.
        """
        with self._whole():
            key = torch.initial_seed()  # draws follow from it, as without stages
            found = self._pipeline.results(None, 1, key, lambda *_: function(*arguments), parts=1)
        return found[0] if found else None

    def holders(self, parameter: nn.Parameter) -> list[int]:
        """The ranks of the pipeline that have this parameter."""
        return self._holders[parameter]

    def shares(self, parameter: nn.Parameter) -> bool:
        """Whether an earlier stage has this parameter too."""
        return parameter in self._others
