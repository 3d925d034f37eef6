"""Samples that were left out of a step: what the others then count, and what is told of it.

A pass counts the samples it has read over those of the whole global batch. How
many were left out in all is known when the workers have agreed; then gradient,
loss and buffers are divided by the share that was read, one number on every
worker, and are means over the samples that were read. How a sample comes to be
left out is the business of `data/`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from instep.data.loader import Skipped
from instep.errors import DataError
from instep.worker.member import Member


def share_read(skipped: int, samples: int) -> float:
    """The share of a global batch that was read.

    Args:
        skipped: samples that could not be read, over all workers.
        samples: of the global batch; 0 where there is none, and all of it was read.

    Raises:
        DataError: none was read.
    """
    if not skipped:
        return 1.0
    if skipped >= samples:
        raise DataError(
            f"none of the {samples} samples of the step can be read, so there is nothing to learn "
            "from in it. sample_skipped in events.jsonl has the cause of each."
        )
    return (samples - skipped) / samples


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient there is, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class Teller:
    """Tells the log of each sample that one worker leaves out.

    Before the step is agreed on, not after: a worker that is killed in between
    may have been what others committed with. Which of the events are of a
    committed step, the ledger says.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._told: set[tuple[Any, ...]] = set()

    def tell(self, skipped: Iterable[Skipped], *, dataset: str, step: int, epoch: int) -> None:
        """Tell it once, though the passes of a step may run twice."""
        generation = self._member.form.generation if self._member.form else 0
        at = {"generation": generation, "dataset": dataset, "epoch": epoch, "step": step}
        before, self._told = self._told, set()
        for index, cause in skipped:
            which = *at.values(), index
            self._told.add(which)
            if which not in before:
                self._member.emit(
                    "sample_skipped", worker=self._member.number, index=index, cause=cause, **at
                )
