"""Places that are kept for a job which comes first and has no room on the hosts yet.

Cores are dealt to all jobs by the policy; where a job needs much memory, those cores may lie on
hosts on which smaller jobs leave too little of it. So the hosts are chosen where the job has room
soonest. Others shrink there, or are parked if their priority is lower, and who comes later gets no
more than it leaves. Pure functions. Way in: `kept_for`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from instep.pool.hosts.free_places import FreePlaces, Taken
from instep.pool.jobs import COMMAND, RUNNING, PoolHost, PoolJob
from instep.pool.paces.curve import curve_of, left_of

MOST_KEPT = 2
"""Jobs for which places are kept at once: the first ones."""


class KeptPlaces(NamedTuple):
    """Places that are kept for a job."""

    places: Mapping[str, int]
    """Workers on each host."""
    gives: Mapping[str, Mapping[str, int]]
    """Jobs that are to give workers up for it at once, with the places that they keep."""
    waits_for: tuple[str, ...]
    """Jobs whose processes have to end before."""
    rest: Mapping[str, tuple[int, int]]
    """Cores and memory of these hosts that it leaves to others."""


class _Step(NamedTuple):
    """A job that gives places up."""

    job: str
    places: Mapping[str, int]
    """Those that it gives up."""
    now: bool
    """Whether it can be asked to; else it ends by itself."""


def kept_for(
    hosts: Mapping[str, PoolHost],
    jobs: Mapping[str, PoolJob],
    taken: Taken,
    job: PoolJob,
    now: float,
) -> KeptPlaces | None:
    """The places to keep for a job that waits; None if it had none with all others gone.

    Args:
        hosts: of the pool.
        jobs: of the pool, with the places that they are to have.
        taken: places that each job takes, also those of processes that are about to end.
        job: for which there is no room.
        now: Unix seconds.
    """
    intended = {
        other: {n: w for n, w in jobs[other].places.items() if n in places}
        if other in jobs and jobs[other].status == RUNNING
        else {}
        for other, places in taken.items()
    }
    leaving = [other for other, places in taken.items() if intended[other] != places]
    steps = [*_shrinking(jobs, intended, job), *_parked(jobs, intended, job)]
    steps += _ending(jobs, intended, steps, now)
    fewest = _fewest(hosts, jobs, intended, job, steps)
    if fewest is None:
        return None
    places = _room_after(hosts, jobs, intended, steps[:fewest]).find_all(job)
    there = [step for step in steps[:fewest] if places.keys() & step.places.keys()]
    used = _needed(hosts, jobs, intended, job, there)
    after = _room_after(hosts, jobs, intended, used)
    places = after.find_all(job)
    after.take(job, places)
    ends = [step.job for step in used if not step.now]
    gives = {} if ends else _left_after(intended, used)
    waits = [j for j in leaving if any(taken[j].get(n, 0) > intended[j].get(n, 0) for n in places)]
    rest = {name: after.free_on(name) for name in places}
    return KeptPlaces(places, gives, tuple(dict.fromkeys([*ends, *waits])), rest)


def _shrinking(jobs: Mapping[str, PoolJob], has: Taken, wanting: PoolJob) -> Iterator[_Step]:
    """Workers beyond their least, of jobs that are not more urgent, one after the other."""
    for job in _last_first(jobs, has):
        if job.fixed or job.kind == COMMAND or job.priority > wanting.priority:
            continue
        more = (sum(has[job.id].values()) - job.at_least) // job.unit
        for name, workers in sorted(has[job.id].items(), key=lambda each: each[1]):
            for _ in range(min(more, workers // job.unit)):
                more -= 1
                yield _Step(job.id, {name: job.unit}, True)


def _parked(jobs: Mapping[str, PoolJob], has: Taken, wanting: PoolJob) -> Iterator[_Step]:
    """Jobs of lower priority, which stop at a commit."""
    for job in _last_first(jobs, has):
        if job.kind != COMMAND and job.priority < wanting.priority:
            yield _Step(job.id, has[job.id], True)


def _ending(
    jobs: Mapping[str, PoolJob], has: Taken, before: Sequence[_Step], now: float
) -> list[_Step]:
    """Jobs that end by themselves, in that order."""
    gone = {step.job for step in before if step.places == has[step.job]}
    ends = {
        job.id: left / curve_of(job.paces).speed(max(1, job.target))
        for job in _last_first(jobs, has)
        if job.id not in gone and (left := left_of(job, now)) is not None
    }
    others = [job.id for job in _last_first(jobs, has) if job.id not in gone]
    others.sort(key=lambda name: ends.get(name, float("inf")))
    return [_Step(name, has[name], False) for name in others]


def _last_first(jobs: Mapping[str, PoolJob], has: Taken) -> list[PoolJob]:
    """Jobs that have places: the least urgent first, and of equal ones the last that began."""
    running = [jobs[name] for name, places in has.items() if places]
    return sorted(running, key=lambda job: (job.priority, -(job.began or 0.0)))


def _fewest(
    hosts: Mapping[str, PoolHost],
    jobs: Mapping[str, PoolJob],
    has: Taken,
    job: PoolJob,
    steps: Sequence[_Step],
) -> int | None:
    """Count the steps, in their order, that make room for a job; None if all do not."""

    def fits(count: int) -> bool:
        return bool(_room_after(hosts, jobs, has, steps[:count]).find_all(job))

    if not fits(len(steps)):
        return None
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(middle) else (middle + 1, high)
    return low


def _needed(
    hosts: Mapping[str, PoolHost],
    jobs: Mapping[str, PoolJob],
    has: Taken,
    job: PoolJob,
    steps: list[_Step],
) -> list[_Step]:
    """The steps without those that are not needed."""
    for step in [*steps]:
        without = [each for each in steps if each is not step]
        if _room_after(hosts, jobs, has, without).find_all(job):
            steps = without
    return steps


def _room_after(
    hosts: Mapping[str, PoolHost],
    jobs: Mapping[str, PoolJob],
    has: Taken,
    steps: Iterable[_Step],
) -> FreePlaces:
    return FreePlaces(hosts, jobs, {**has, **_left_after(has, steps)})


def _left_after(has: Taken, steps: Iterable[_Step]) -> Taken:
    """The places of each job that gives some up, once all steps are made."""
    left: Taken = {}
    for step in steps:
        if step.places is has[step.job]:
            left[step.job] = {}
            continue
        if step.job not in left:
            left[step.job] = dict(has[step.job])
        here = left[step.job]
        for name, workers in step.places.items():
            here[name] = max(0, here.get(name, 0) - workers)
    return {job: {n: w for n, w in places.items() if w} for job, places in left.items()}
