"""In which order each rank of a pipeline runs the parts of a batch through its stages.

Stage s is on rank s modulo the ranks; a rank with several has them interleaved. Pure functions:
tensors and processes are not known here.
"""

from __future__ import annotations

from typing import NamedTuple

from instep.errors import SpecError, near_miss

SCHEDULES = ("1f1b", "gpipe", "interleaved")


class Action(NamedTuple):
    """One part of a batch in one stage."""

    forward: bool
    """Else backward."""
    stage: int
    part: int


def orders(
    schedule: str, ranks: int, parts: int, *, chunks: int = 1, backward: bool = True
) -> list[list[Action]]:
    """What each rank does, in order; together they never wait for each other in a circle.

    Args:
        schedule: `gpipe`: all forward passes, then all backward passes. `1f1b`: backward passes
            as soon as possible, so that rank r has at most `ranks - r` parts under way
            (Narayanan et al. 2019, PipeDream-Flush). `interleaved`: the same for several stages
            on each rank (Narayanan et al. 2021, arXiv:2104.04473).
        ranks: of the pipeline.
        parts: of the batch; any number, also fewer than stages.
        chunks: stages of each rank.
        backward: False: only forward passes.

    Raises:
        SpecError: no such schedule.
    """
    if schedule not in SCHEDULES:
        raise SpecError(f"mesh.schedule = {schedule!r}. {near_miss(schedule, SCHEDULES)}")
    total = parts * chunks
    if not backward:
        return [_sequence(rank, ranks, parts, chunks, True) for rank in range(ranks)]
    for extra in range(0 if schedule != "gpipe" else total, total + 1):
        found = [_order(rank, ranks, parts, chunks, extra) for rank in range(ranks)]
        if makespan(found) is not None:
            return found
    raise AssertionError("all forward passes first is always possible")


def _order(rank: int, ranks: int, parts: int, chunks: int, extra: int) -> list[Action]:
    """So many forward passes first, then one of each in turn, then what is left."""
    forward = _sequence(rank, ranks, parts, chunks, True)
    backward = _sequence(rank, ranks, parts, chunks, False)
    ahead = ranks - rank - 1 if chunks == 1 else 2 * (ranks - rank - 1) + (chunks - 1) * ranks
    ahead = min(ahead + extra, len(forward))
    order = forward[:ahead]
    for place, action in enumerate(backward):
        order += [*forward[ahead + place : ahead + place + 1], action]
    return order


def _sequence(rank: int, ranks: int, parts: int, chunks: int, forward: bool) -> list[Action]:
    """With several stages: as many parts as ranks through one of them, then through the next."""
    group = max(parts, 1) if chunks == 1 else ranks
    order = range(chunks) if forward else range(chunks - 1, -1, -1)
    return [
        Action(forward, chunk * ranks + rank, part)
        for first in range(0, parts, group)
        for chunk in order
        for part in range(first, min(first + group, parts))
    ]


def makespan(
    orders: list[list[Action]], forward_s: list[float] | None = None, backward_s: float = 2.0
) -> float | None:
    """How long these orders take where messages take no time; None if they wait in a circle.

    Args:
        orders: of each rank.
        forward_s: of each stage, seconds for a part; 1 each if None.
        backward_s: how many times as long a backward pass takes.
    """
    stages = 1 + max((action.stage for order in orders for action in order), default=-1)
    times = forward_s or [1.0] * stages
    ended: dict[Action, float] = {}
    free, done = [0.0] * len(orders), [0] * len(orders)
    while any(done[rank] < len(order) for rank, order in enumerate(orders)):
        moved = False
        for rank, order in enumerate(orders):
            while done[rank] < len(order) and (
                (ready := _ready(order[done[rank]], stages, ended)) is not None
            ):
                action = order[done[rank]]
                took = times[action.stage] * (1.0 if action.forward else backward_s)
                free[rank] = ended[action] = max(free[rank], ready) + took
                done[rank] += 1
                moved = True
        if not moved:
            return None
    return max(free, default=0.0)


def _ready(action: Action, stages: int, ended: dict[Action, float]) -> float | None:
    """When what it waits for was there; None if that has not been done yet."""
    forward, stage, part = action
    if forward:
        return 0.0 if stage == 0 else ended.get(Action(True, stage - 1, part))
    if stage == stages - 1:
        return ended.get(Action(True, stage, part))
    return ended.get(Action(False, stage + 1, part))
