"""Which crews take steps for a plan, and the job of each.

Ways in: `crews_for`, `twice`, `plain_job`.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from instep.job.spec import JobSpec
from instep.lab.plan.answers import CrewRequest
from instep.lab.plan.candidates import Candidate, job_of
from instep.plan.machine import Machines
from instep.plan.ways import TrainingWay

_ENDLESS = 1_000_000
"""Steps of a crew's job, which takes a few of them."""


def crews_for(
    ways: Sequence[Candidate], job: JobSpec, machines: Machines, *, linked: bool = True
) -> list[CrewRequest]:
    """Crews for the ways, each once: those with the same result first, the fewest workers first;
    meshes last, as they take longest to start.

    Rounds and leases have none: they are made of passes and exchanges that others have measured.

    Args:
        ways: candidates.
        job: as it is.
        machines: where it would run.
        linked: whether crews have the links of emulated hosts.
    """
    alone = TrainingWay(1)
    crews = [CrewRequest(alone, job_of(alone, plain_job(job)))]
    rate = None
    if linked and machines.emulated and machines.link is not None:
        rate = f"{machines.link.bits_per_s:.0f}bit"
    several = machines.hosts > 1 and not machines.emulated
    hosts = machines.hosts if machines.emulated else 1
    for same, on_mesh in ((True, False), (False, False), (True, True)):
        for each in ways:
            way = each.way
            if way.same is not same or bool(way.mesh) is not on_mesh:
                continue
            if way.local_steps or way.leased:
                continue
            way = way._replace(changes=(), same=True)
            if several and not way.mesh:
                way = _here(way, machines)
            if way.is_plain or any(way.key == other.way.key for other in crews):
                continue
            if way.workers <= 2 * machines.cores:
                made = job_of(way, plain_job(job))
                crews.append(CrewRequest(way, made, min(hosts, way.workers), rate))
    if any(each.way.local_steps or each.way.leased for each in ways):
        pair = TrainingWay(2)
        if job.most_workers > 1 and all(pair.key != each.way.key for each in crews):
            crews.append(CrewRequest(pair, job_of(pair, plain_job(job)), min(hosts, 2), rate))
    return crews


def _here(way: TrainingWay, machines: Machines) -> TrainingWay:
    """A crew of this machine for a way on several: as many workers as meet on one, or a pair."""
    beside = machines.beside(way.workers)
    workers = way.workers if way.workers == 1 else max(2, min(beside, way.workers))
    return way._replace(workers=workers, servers=min(way.servers, 1))


def plain_job(job: JobSpec) -> JobSpec:
    """The job on this machine, without hosts, checkpoints, loggers and an end."""
    replace = msgspec.structs.replace
    launch = type(job.launch)()
    checkpoint = replace(job.checkpoint, every="never", copy_to="")
    report = replace(job.report, loggers=())
    train = replace(job.train, steps=_ENDLESS, epochs=None, stop_after_steps=0)
    given = {"launch": launch, "network": "loopback", "checkpoint": checkpoint, "train": train}
    return replace(job, report=report, **given)


def twice(requests: Sequence[CrewRequest]) -> list[CrewRequest]:
    """The crews, and then once more those without a mesh, the last ones with the same result first:
    how far two visits differ says more of a busy machine than the steps of one."""
    again = [each for each in reversed(requests) if not each.way.mesh]
    return [*requests, *sorted(again, key=lambda each: each.way.codec != "none")]
