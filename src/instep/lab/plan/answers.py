"""Sums up what crews answered: figures of the job, of each crew, and of the machine.

Nothing is started here. Ways in: `CrewRequest`, `summed`, `merged`, `far_apart`, `with_new`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from instep.engine.trial_result import Trial
from instep.job.spec import JobSpec
from instep.lab.netlab import bits_per_s
from instep.plan.measured import BucketShare, CrewFigures, JobFigures, PassTime, ProbedMachine
from instep.plan.ways import TrainingWay

SAVING_BYTES = 16 << 20
"""Memory of a run that a crew lacks: code that saves, and threads; copied state comes on top."""

_LOUDER = 0.2
"""Cores that others kept busy beside a visit, beyond those of the quietest one, from which on it
does not count."""

_FAR = 0.15
"""How far two visits of a crew may be from each other before more are asked for, as a share."""


class CrewRequest(NamedTuple):
    """A crew that is to take steps of a way."""

    way: TrainingWay
    job: JobSpec
    hosts: int = 1
    """How many hosts there would be: for the threads of a worker, and where links are emulated."""
    rate: str | None = None
    """Rate of the emulated link of each of these hosts; None: they are not emulated."""


class Probed(NamedTuple):
    """Everything that probes found."""

    job: JobFigures
    crews: list[CrewFigures]
    machine: ProbedMachine
    verdict: Trial
    failed: str = ""
    """Why there is nothing: the recipe cannot be built, or no process can take a step."""
    refused: Sequence[str] = ()
    """Why the recipe does not go with each of the other jobs; empty where it does."""
    visits: Sequence[CrewFigures] = ()
    """Each visit of each crew, in their order."""


def summed(
    requests: Sequence[CrewRequest], found: Mapping[int, Mapping[str, Any]], machine: ProbedMachine
) -> Probed:
    """Sum up.

    Args:
        requests: in their order, the first of one worker; the same crew may stand there twice.
            Where that one fails, a mesh tells of the job.
        found: answers, by the number of the request.
        machine: cores, and seconds that it took.
    """
    job = requests[0].job
    first = found.get(0, {"failed": "nothing was probed"})
    nothing = JobFigures(job.train.global_batch, job.train.micro_batches, 0, False, [], 0)
    told = next((found[n] for n in range(len(requests)) if "ranks" in found.get(n, ())), None)
    if told is None:
        return Probed(nothing, [], machine, Trial.not_shown(first["failed"]), first["failed"])
    one = min(told["ranks"], key=lambda each: each["rank"])
    verdict = msgspec.json.decode(one["trial"], type=Trial)
    figures = _of_job(job, one)
    visits = [of_crew(each, found[n]) for n, each in enumerate(requests) if n in found]
    alone = [each for each in visits if each.workers == 1 and not each.failed]
    memory = _TrialMemory(
        max((each.worker_bytes for each in alone), default=0),
        one.get("tried_bytes", 0),
        max((each.begun_bytes for each in alone), default=0),
        SAVING_BYTES + figures.trained_bytes + figures.state_bytes,
    )
    busy = [each["others_busy"] for each in found.values()]
    kernels = one["kernels"]
    machine = ProbedMachine(
        machine.cores,
        machine.seconds,
        statistics.median(busy),
        statistics.median(kernels) / min(kernels) - 1,
    )
    visits = [_of_a_run(each, memory) for each in visits]
    return Probed(figures, merged(visits), machine, verdict, "", one.get("refused", ()), visits)


def _of_job(job: JobSpec, one: Mapping[str, Any]) -> JobFigures:
    """Figures of the job, as its first process has found them; one of a mesh has no passes of the
    whole model."""
    return JobFigures(
        one.get("batch", job.train.global_batch),
        job.train.micro_batches,
        one["steps_of_run"],
        one["passes_of_a_step"] == 1,
        [PassTime(*each) for each in one.get("passes", ())],
        one.get("trained_bytes", 0),
        one.get("state_bytes", 0),
        one.get("parameters", 0),
        one.get("update_s", 0.0),
    )


_AVERAGED = (
    *("passes_s", "slowest_s", "last_s", "wire_s", "update_s", "whole_s"),
    *("small_s", "spread", "others_busy"),
)

_LARGEST = (
    *("sent_bytes", "sent_by_server", "worker_bytes", "server_bytes"),
    *("begun_bytes", "worker_held", "server_held"),
)
"""A count that was taken while bytes were under way misses some."""


def merged(visits: Sequence[CrewFigures]) -> list[CrewFigures]:
    """Make one crew of all visits with the same way."""
    by_way = dict[tuple[str, str, int, int, str], list[CrewFigures]]()
    for each in visits:
        by_way.setdefault(each.key, []).append(each)
    return [_merged(each) for each in by_way.values()]


def far_apart(visits: Sequence[CrewFigures]) -> set[tuple[str, str, int, int, str]]:
    """Keys of the crews of which two visits say so different things that more are needed."""
    times = dict[tuple[str, str, int, int, str], list[float]]()
    for each in visits:
        if not each.failed and each.whole_s > 0:
            times.setdefault(each.key, []).append(each.whole_s)
    return {key for key, took in times.items() if max(took) > (1 + _FAR) * min(took)}


def _merged(visits: Sequence[CrewFigures]) -> CrewFigures:
    """One crew of several that took steps of the same way at different times.

    A visit that others disturbed more than another one says what a step takes beside them, and
    does not count; nor does, of three or more, the one that is furthest from their median.
    """
    whole = [each for each in visits if not each.failed]
    if len(whole) < 2:
        return (whole or list(visits))[0]
    least = min(each.others_busy for each in whole)
    quiet = [each for each in whole if each.others_busy <= least + _LOUDER]
    if len(quiet) > 2:
        middle = statistics.median(each.whole_s for each in quiet)
        quiet.remove(max(quiet, key=lambda each: abs(each.whole_s - middle)))
    times = [seconds for each in quiet for seconds in each.visits]
    shares = [len(each.visits) / len(times) for each in quiet]
    figures: dict[str, Any] = {
        name: sum(share * getattr(each, name) for share, each in zip(shares, quiet, strict=True))
        for name in _AVERAGED
    }
    figures |= {name: max(getattr(each, name) for each in whole) for name in _LARGEST}
    figures |= {"visits": times, "steps": sum(each.steps for each in quiet)}
    return msgspec.structs.replace(quiet[0], **figures)


def with_new(crews: Sequence[CrewFigures], new: Sequence[CrewFigures]) -> list[CrewFigures]:
    """The crews, with what they have found in further visits."""
    return [_merged([each, *(one for one in new if one.key == each.key)]) for each in crews]


class _TrialMemory(NamedTuple):
    """Resident memory that a run's processes need and most crews do not show."""

    before: int
    """Peak of a process that has tried passes before the first step, as each of a run does."""
    trained: int
    """Peak of the one that tries the trained model too, as the first worker does."""
    begun: int
    """Resident memory of these at their beginning: a codec that is imported before comes on top."""
    saving: int
    """Bytes that come on top of what a process holds between steps while it saves."""


def _of_a_run(crew: CrewFigures, memory: _TrialMemory) -> CrewFigures:
    """A crew with the memory of a run: its own peak, that of a trial, or what saving takes, where
    that is more. They do not meet: what a trial needs is free again when a run saves."""
    if crew.failed:
        return crew
    more = max(0, crew.begun_bytes - memory.begun) if memory.begun else 0
    before, trained = memory.before + more, memory.trained + more
    worker = max(crew.worker_bytes, before, trained, crew.worker_held + memory.saving)
    server = 0
    if crew.server_bytes:
        server = max(crew.server_bytes, before, crew.server_held + memory.saving)
    return msgspec.structs.replace(crew, worker_bytes=worker, server_bytes=server)


def of_crew(request: CrewRequest, answer: Mapping[str, Any]) -> CrewFigures:
    """Means over the central half of a crew's steps."""
    way = request.way
    what: dict[str, Any] = {
        "workers": way.workers,
        "strategy": way.strategy,
        "codec": way.codec,
        "servers": way.servers,
        "hosts": min(request.hosts, way.workers) if request.rate else 1,
        "bits_per_s": bits_per_s(request.rate) if request.rate and way.workers > 1 else 0.0,
        "others_busy": answer["others_busy"],
        "mesh": way.axes,
    }
    if "ranks" not in answer:
        return CrewFigures(**what, failed=answer["failed"])
    ranks = sorted(answer["ranks"], key=lambda each: each["rank"])
    workers, servers = ranks[: way.workers], ranks[way.workers :]
    steps = _central(workers)
    computed = [[each["times"][n][0] for each in workers] for n in steps]
    backward = fmean(each["times"][n][1] for n in steps for each in workers)
    exchanged = [min(each["times"][n][2] for each in workers) for n in steps]
    whole = fmean(workers[0]["times"][n][4] for n in steps)
    update = [fmean(each["times"][n][3] for n in steps) for each in workers]
    passes = max(1, workers[0]["passes_of_a_step"])
    slowest = fmean(max(each) for each in computed)
    wire = min(fmean(exchanged), max(0.0, whole - slowest - fmean(update)))
    return CrewFigures(
        **what,
        passes_s=min(slowest, fmean(sum(each) / len(each) for each in computed)),
        slowest_s=slowest,
        last_s=min(slowest, backward / passes),
        wire_s=wire,
        update_s=fmean(update),
        whole_s=whole,
        visits=[whole],
        spread=_spread([each[4] for each in workers[0]["times"]]),
        sent_bytes=statistics.median(each["sent_bytes"] for each in workers),
        sent_by_server=statistics.median([each["sent_bytes"] for each in servers] or [0.0]),
        buckets=[BucketShare(*each) for each in ranks[0].get("buckets", ())],
        small_s=statistics.median(each["small_s"] for each in workers),
        worker_bytes=max(each["peak_bytes"] for each in workers),
        begun_bytes=max(each.get("begun_bytes", 0) for each in workers),
        server_bytes=max((each["peak_bytes"] for each in servers), default=0),
        worker_held=max(each["resident_bytes"] for each in workers),
        server_held=max((each["resident_bytes"] for each in servers), default=0),
        steps=len(workers[0]["times"]),
    )


def _central(workers: Sequence[dict[str, Any]]) -> list[int]:
    """Numbers of the steps that are not among the shortest or longest quarter, from the beginning
    of one to that of the next on the first worker."""
    whole = [parts[4] for parts in workers[0]["times"]]
    order = sorted(range(len(whole)), key=whole.__getitem__)
    cut = len(order) // 4
    return order[cut : len(order) - cut]


def _spread(values: Sequence[float]) -> float:
    if len(values) < 4:
        return 0.1
    low, middle, high = statistics.quantiles(values, n=4)
    return (high - low) / 2 / middle if middle else 0.0
