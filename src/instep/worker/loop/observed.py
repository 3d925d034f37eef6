"""The table of observers, and what each is given of the worker that it observes.

To add one: write a class that implements `engine/observers.py:Observer`, add its line to
`OBSERVERS`, and a field of that name to `[check]`, which turns it on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from instep.engine.engine import Engine
from instep.engine.member import Member
from instep.engine.observers import Observer
from instep.engine.passes import Pass
from instep.engine.state.committed import CommittedState
from instep.engine.update import Update
from instep.registry import Registry
from instep.state.intact import discard_after
from instep.worker.loop.after_commit import AfterCommit

OBSERVERS = Registry(
    "observer",
    {"corruption": "instep.integrity.corruption:CorruptionCheck"},
)


@dataclass(frozen=True)
class Observed:
    """The parts of a worker that an observer may use."""

    member: Member
    model: nn.Module
    update: Update
    state: CommittedState
    run_pass: Callable[[Pass, float], None]
    """Runs a micro-batch of the present step again, its loss times a factor. Only observers get its
    gradients, and it has no other effect. The step must not be committed afterwards."""
    set_aside: Callable[[int], None]
    """Discards the checkpoints of later steps than this one. When it returns, this worker saves
    nothing any more."""
    drop_after: Callable[[int], object]
    """Discards the checkpoints of later steps, on the worker that saves."""


def observers_of(
    member: Member,
    engine: Engine,
    update: Update,
    after: AfterCommit,
    run_pass: Callable[[Pass, float], None],
) -> dict[str, Observer]:
    """Make the observers of a worker.

    Args:
        member, engine, update, after: the worker's.
        run_pass: as in `Observed`.
    """

    def set_aside(step: int) -> None:
        if not after.drop_after(step):
            discard_after(member.run / "checkpoints", step)

    return make_observers(
        Observed(member, engine.model, update, engine.state, run_pass, set_aside, after.drop_after)
    )


def make_observers(observed: Observed) -> dict[str, Observer]:
    """The observers that the job turns on, by name."""
    check = observed.member.job.check
    return {name: OBSERVERS[name](observed) for name in OBSERVERS if getattr(check, name)}
