"""The members that a run shall have: it is scaled, or one has to go and another takes its place.

A part of the decisions in `decide.py`, and as pure.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from instep.control.decisions import generations
from instep.control.decisions.actions import Action, Log, Start
from instep.control.decisions.events import (
    Scaled,
)
from instep.control.decisions.state import State
from instep.job.spec import JobSpec


def refuse_scale(state: State, job: JobSpec, workers: int) -> str:
    """Why a run cannot have so many workers; empty if it can."""
    portions, most = job.per_commit.micro_batches, job.most_workers
    if wrong := job.mesh.refusal(workers):
        return wrong
    if not 1 <= workers <= most:
        return (
            f"workers = {workers}: a run needs 1 or more, and this one has work for {most} at "
            f"most, since {job.portions} = {portions}."
        )
    if not state.recovers or state.together:
        return "the workers of this run cannot change: it computes on GPUs."
    if not state.course:
        return "its workers are still getting ready. Try again in a moment."
    if state.phase not in ("gathering", "training") or state.stop:
        return "the run is about to end."
    return ""


def scaled(state: State, scaled: Scaled, now: float) -> tuple[State, list[Action]]:
    """The run is to have another number of workers."""
    workers, first = scaled.workers, frozenset().union(*map(state.fellows, scaled.first))

    def order(number: int) -> tuple[bool, bool, int]:
        """Keep those of hosts that stay, and of these the ones that have a process."""
        return number in first, not state.fellows(number) <= state.joined, number

    before = sorted(state.wanted - state.servers, key=order)
    if state.phase not in ("gathering", "training") or workers == len(before):
        return state, []
    why = f"scaled from {len(before)} to {workers} workers"
    fields: dict[str, Any] = {"before": len(before), "workers": workers}
    if scaled.hosts:
        fields["hosts"] = list(scaled.hosts)
    log = Log("scaled", fields)
    return _want(state, _unused(state, workers - len(before)), before[workers:], why, log, now)


def noticed(state: State, worker: int, now: float) -> tuple[State, list[Action]]:
    """A worker has to go: another takes its place first."""
    if worker not in state.wanted or state.phase not in ("gathering", "training"):
        return state, []
    if not state.recovers or state.together:
        return state, []  # it stays as long as it can
    if worker in state.servers:
        return state, []  # it too: what it holds stays in the memory of its host, for its number
    fellows, more = sorted(state.fellows(worker)), _unused(state, state.ranks)
    successor = more[fellows.index(worker)]
    why = f"worker {worker} was asked to leave; worker {successor} takes its place"
    fields: dict[str, Any] = {"worker": worker, "successor": successor}
    if others := [n for n in fellows if n != worker]:
        fields["fellows"] = others
    return _want(state, more, fellows, why, Log("worker_leaving", fields), now)


def _want(
    state: State,
    more: list[int],
    less: list[int],
    why: str,
    log: Log,
    now: float,
) -> tuple[State, list[Action]]:
    unchanged = state.phase == "training" and set(state.group) == state.wanted
    state = replace(state, why=why, since=now if unchanged else state.since)
    for worker in more:
        state = state.note(worker, wanted=True)
    for worker in less:
        state = state.note(worker, wanted=False)
    state, actions = generations.advance(state, now)
    return state, [log, *[Start(worker) for worker in more], *actions]


def _unused(state: State, count: int) -> list[int]:
    """The numbers of the lowest replicas of which no member is there, or was in this generation."""
    ranks, taken = state.ranks, {n // state.ranks for n in [*state.members, *state.group]}
    free = [each for each in range(len(taken) + max(count, 0)) if each not in taken]
    numbers = [each * ranks + place for each in free for place in range(ranks)]
    return numbers[: max(count, 0)]
