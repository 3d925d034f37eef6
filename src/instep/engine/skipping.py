"""Samples that were skipped in a step: the weight of the others, and the events about them.

A pass weighs its samples over those of the whole global batch. After the exchange all workers know
how many were skipped in all. Then gradient, loss and buffers are divided by the share that was
read, and so are means over the samples that were read. `data/` decides which ones are skipped.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from instep.data.loader import Skipped
from instep.engine.member import Member
from instep.errors import DataError


def share_read(skipped: int, samples: int, left_out: int = 0) -> float:
    """The share of a global batch that was read, and is in the batches; never nothing.

    Args:
        skipped: samples that could not be read, over all workers.
        samples: of the global batch; 0 where there is none, and all of it was read.
        left_out: samples that were read, and that the user's `collate` left out.

    Raises:
        DataError: none was read.
    """
    if skipped and skipped >= samples:
        raise DataError(
            f"none of the {samples} samples of the step can be read, so there is nothing to learn "
            "from in it. sample_skipped in events.jsonl has the cause of each."
        )
    return max(1, samples - skipped - left_out) / samples if samples else 1.0


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient there is, in place."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(factor)


class SkipReporter:
    """Writes an event for each sample that this worker skips.

    It does so before the exchange: if the worker is killed after that, the others may still commit
    the step. The ledger says which events are of a committed step.
    """

    def __init__(self, member: Member) -> None:
        self._member = member
        self._reported: set[tuple[Any, ...]] = set()

    def report(self, skipped: Iterable[Skipped], *, dataset: str, step: int, epoch: int) -> None:
        """Report each sample once, though the passes of a step may run twice."""
        generation = self._member.form.generation if self._member.form else 0
        at = {"generation": generation, "dataset": dataset, "epoch": epoch, "step": step}
        before, self._reported = self._reported, set()
        for index, cause in skipped:
            which = *at.values(), index
            self._reported.add(which)
            if which not in before:
                self._member.emit(
                    "sample_skipped", worker=self._member.number, index=index, cause=cause, **at
                )
