"""The ways that a plan looks at: each as a job of its own, or refused with the reason.

Nothing is started, and torch is not imported. Way in: `candidates`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from instep.client.job_checks import refusals
from instep.errors import InstepError
from instep.job.mesh import MeshSpec
from instep.job.spec import JobSpec
from instep.job.sync import SyncSpec
from instep.plan.machine import Machines
from instep.plan.ways import TrainingWay, counts

CODECS_TRIED = ("bfloat16", "int8", "int4")
"""Codecs that are priced beside none, at the most workers."""

AXES = "shard", "tensor", "stages"
"""Axes of a mesh."""

ROUNDS_TRIED, LEASED_TRIED = ("averaging", "diloco"), ("bounded_stale",)


class Candidate(NamedTuple):
    """A way, and the job that has it."""

    way: TrainingWay
    job: JobSpec


class RefusedWay(NamedTuple):
    """A way that the job cannot have."""

    name: str
    why: str


def candidates(
    job: JobSpec, machines: Machines, most: int, *, meshes: bool = False
) -> tuple[list[Candidate], list[RefusedWay]]:
    """List what could be done, the ways with the same result first.

    Args:
        job: as it is.
        machines: where it would run.
        most: workers.
        meshes: whether axes of a mesh are looked at that the job does not have.
    """
    found, refused = list[Candidate](), list[RefusedWay]()
    for way in _ways(job, machines, most, meshes=meshes):
        if not way.mesh:
            way = way._replace(changes=(*_without_mesh(job.mesh), *way.changes))
        made = _checked(way, job)
        if isinstance(made, Exception):
            if way.workers == 1 and way.same:
                raise made
            refused.append(RefusedWay(way.name, str(made).partition("\n")[0]))
        elif all(other.way.name != way.name for other in found):
            found.append(Candidate(way, made))
    return found, refused


def _checked(way: TrainingWay, job: JobSpec) -> JobSpec | Exception:
    """The job of a way, or why it cannot be."""
    try:
        made = job_of(way, job)
        return next(refusals(made), made)
    except (InstepError, ValueError) as error:
        return error


def job_of(way: TrainingWay, job: JobSpec) -> JobSpec:
    """The job with the workers, strategy and codec of a way.

    Raises:
        ValueError: it would be none.
    """
    replace = msgspec.structs.replace
    sync, own = job.sync, job.sync
    if (way.strategy, way.codec) != (own.name, own.codec) or way.servers != own.server_count:
        given: dict[str, Any] = {"name": way.strategy, "codec": way.codec}
        if way.strategy == own.name:
            given["options"] = own.options
        if way.codec == own.codec:
            given["codec_options"] = own.codec_options
        if way.servers:
            given["servers"] = way.servers
        if way.local_steps:
            given["participants"] = way.participants
        sync = SyncSpec(**given)
    mesh = job.mesh
    if not way.mesh:
        mesh = MeshSpec()
    elif way.mesh != axes_of(mesh):
        mesh = replace(mesh, **dict(way.mesh))
    return replace(job, workers=way.workers, sync=sync, mesh=mesh)


def _ways(job: JobSpec, machines: Machines, most: int, *, meshes: bool) -> Iterator[TrainingWay]:
    own, numbers = job.sync, counts(most, machines.hosts)
    if own.rounds is not None:
        for workers in numbers:
            yield _of_rounds(own.name, workers, job, same=True)
    else:
        yield TrainingWay(1, changes=_changes(own, "all_reduce"))
        for workers in numbers[1:]:
            yield TrainingWay(workers, changes=_changes(own, "all_reduce"))
        for workers in numbers[1:]:
            for servers in sorted({1, min(workers, machines.hosts)}):
                changes = _changes(own, "server_sync", servers)
                yield TrainingWay(workers, "server_sync", servers=servers, changes=changes)
    yield from _with_another_result(job, numbers[-1])
    if own.rounds is None and (meshes or job.mesh.ranks > 1):
        yield from _on_meshes(job, machines, most)


def _on_meshes(job: JobSpec, machines: Machines, most: int) -> Iterator[TrainingWay]:
    """The job's own mesh with one replica, two, four ...; or each axis by itself."""
    mesh, changes = job.mesh, _changes(job.sync, "all_reduce")
    if mesh.ranks > 1:
        for replicas in counts(max(1, most // mesh.ranks)):
            yield TrainingWay(replicas * mesh.ranks, changes=changes, mesh=axes_of(mesh))
        return
    sizes = {2, machines.hosts} if machines.hosts > 1 else {2}
    for size in sorted(size for size in sizes if size <= most):
        for axis in AXES:
            asked = (*changes, f"mesh.{axis}={size}")
            yield TrainingWay(size, changes=asked, mesh=((axis, size),))


def axes_of(mesh: MeshSpec) -> tuple[tuple[str, int], ...]:
    """Axes with several processes."""
    sizes = ((axis, getattr(mesh, axis)) for axis in AXES)
    return tuple((axis, size) for axis, size in sizes if size > 1)


def _without_mesh(mesh: MeshSpec) -> tuple[str, ...]:
    """Changes that take a mesh away, with all that is said of it."""
    plain = MeshSpec()
    values = {name: getattr(plain, name) for name in mesh.__struct_fields__}
    return tuple(
        f"mesh.{name}={json.dumps(value)}"
        for name, value in values.items()
        if value != getattr(mesh, name)
    )


def _with_another_result(job: JobSpec, workers: int) -> Iterator[TrainingWay]:
    if workers < 2:
        return
    own = job.sync
    mine = own.codec != "none" or own.leased or own.votes
    if mine:
        yield TrainingWay(job.workers, own.name, own.codec, own.server_count, same=False)
    for codec in CODECS_TRIED:
        changes = (*_changes(own, "all_reduce"), f"sync.codec={codec}")
        yield TrainingWay(workers, codec=codec, same=False, changes=changes)
    if own.rounds is not None:
        yield TrainingWay(workers, same=False, changes=_changes(own, "all_reduce"))
    for name in ROUNDS_TRIED:
        if name != own.name:
            yield _of_rounds(name, workers, job, same=False)
    for name in LEASED_TRIED:
        if name != own.name:
            changes = _changes(own, name, 1)
            yield TrainingWay(workers, name, servers=1, same=False, changes=changes)


def _of_rounds(name: str, workers: int, job: JobSpec, *, same: bool) -> TrainingWay:
    own = job.sync
    rounds = own.rounds if name == own.name else SyncSpec(name=name).rounds
    taking = own.taking_part if name == own.name else own.participants
    local = rounds.local_steps if rounds is not None else 0
    changes = () if name == own.name else (f"sync.name={name}",)
    batch = job.train.global_batch * local
    codec = own.codec if name == own.name else "none"
    return TrainingWay(workers, name, codec, 0, same, changes, local, taking, batch)


def _changes(own: SyncSpec, name: str, servers: int = 0) -> tuple[str, ...]:
    found: tuple[str, ...] = () if own.name == name else (f"sync.name={name}",)
    if own.codec != "none":
        found += ("sync.codec=none",)
    return (*found, f"sync.servers={servers}") if servers > 1 else found
