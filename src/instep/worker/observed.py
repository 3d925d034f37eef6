"""The observers of a worker's steps that the job wants, and what they are given of the worker.

To add one: a class that keeps the promises of `observers.Observer`, a line in `OBSERVERS`,
and a field of `[check]` by that name which turns it on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from instep.registry import Registry
from instep.worker.member import Member
from instep.worker.step.committed import CommittedState
from instep.worker.step.observers import Observer
from instep.worker.step.passes import Pass
from instep.worker.step.update import Update

OBSERVERS = Registry(
    "observer",
    {"corruption": "instep.integrity.corruption:CorruptionCheck"},
)


@dataclass(frozen=True)
class Observed:
    """What an observer is given of the worker that it watches."""

    member: Member
    model: nn.Module
    update: Update
    state: CommittedState
    run_pass: Callable[[Pass, float], None]
    """Runs a micro-batch of the present step once more, its loss times a factor; only observers
    hear its gradients, and nothing else stays of it. The step must not happen afterwards."""
    set_aside: Callable[[int], None]
    """Sees to it that no checkpoint of a later step than this is taken up; what this worker is
    saving is over when it returns."""
    drop_after: Callable[[int], None]
    """Deletes the checkpoints of later steps, where this worker saves them."""


def make_observers(observed: Observed) -> dict[str, Observer]:
    """Those that the job wants, by name."""
    check = observed.member.job.check
    return {name: OBSERVERS[name](observed) for name in OBSERVERS if getattr(check, name)}
