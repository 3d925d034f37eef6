"""Figures of a job that follow from it alone, and from the length of its dataset: plain arithmetic.

Ways in: `of_job`, `of_batches`, `of_batch`.
"""

from __future__ import annotations

from typing import Any

from instep.data.batches import Batches
from instep.data.order import Position
from instep.job.spec import JobSpec
from instep.report.figures.sample import fields_of, shape_of


def of_job(job: JobSpec) -> dict[str, Any]:
    """Tell what the job asks for: strategy, processes, and where they are."""
    return {
        "name": job.name,
        "recipe": job.recipe,
        "strategy": job.sync.name,
        "codec": job.sync.codec,
        "workers": job.workers,
        "servers": job.sync.server_count,
        "replicas": job.workers // job.mesh.ranks,
        "mesh": {axis: getattr(job.mesh, axis) for axis in ("shard", "tensor", "stages")},
        "launcher": job.launch.launcher,
        "determinism": job.train.determinism,
        "precision": job.train.precision,
    }


def of_batches(job: JobSpec, samples: int, known: Batches | None = None) -> dict[str, Any]:
    """How a global batch is cut, and how many steps there are; with rounds, how a round is.

    Args:
        job: of the run.
        samples: to train on; 0 where nobody knows, which leaves out what follows from them.
        known: what commits take, where it has been planned.
    """
    commit, rounds = job.per_commit, job.sync.rounds is not None
    batches = known or Batches.of_job(job, samples)
    first = batches.of(job.start_after + 1) if samples else Position(0, 0, commit.global_batch)
    found: dict[str, Any] = {
        "global_batch": job.train.global_batch,
        "tokens_per_batch": job.train.tokens_per_batch,
        "unit": "participant" if rounds else "micro-batch",
        "parts": commit.micro_batches,
        "part_samples": _sizes(job, first),
        "of_a_worker": -(-commit.micro_batches // (job.workers // job.mesh.same_batch)),
        "local_steps": job.local_steps if rounds else None,
        "epochs": None if job.train.steps else job.train.passes,
        "steps": job.train.steps,
    }
    if samples:
        in_epoch = batches.in_epochs(1)
        last = batches.of(in_epoch)
        found |= {
            "steps": batches.length(job),
            "steps_per_epoch": in_epoch,
            "last_batch": last.stop - last.first,
            "last_batch_parts": len(_passes(job, last)),
        }
    return found


def _sizes(job: JobSpec, where: Position) -> list[int]:
    """The sizes that parts of a commit have, each once, the largest first."""
    return sorted(set(_passes(job, where)), reverse=True)


def _passes(job: JobSpec, where: Position) -> list[int]:
    """The samples of each part."""
    from instep.engine.passes import parts_of, share_of  # they import torch

    parts = parts_of(where, job.per_commit)
    return [part.size for part in share_of(where, parts, 1, 0, merge=False).passes]


def of_batch(batch: Any) -> list[dict[str, Any]]:
    """Names, shapes and types of what one batch has."""
    return [*_fields("", batch, 0)]


def _fields(name: str, value: Any, depth: int) -> list[dict[str, Any]]:
    if (shape := shape_of(value)) is not None:
        kind = str(value.dtype).removeprefix("torch.")
        return [{"name": name or "batch", "shape": list(shape), "dtype": kind}]
    if isinstance(value, dict | list | tuple) and depth < 3 and not _is_plain(value):
        inner = fields_of(value).items()
        return [
            each
            for key, part in inner
            for each in _fields(f"{name}.{key}" if name else key, part, depth + 1)
        ]
    many = f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else ""
    return [{"name": name or "batch", "shape": None, "dtype": many or type(value).__name__}]


def _is_plain(value: Any) -> bool:
    """Whether it is a list of numbers or texts, one for each sample."""
    return isinstance(value, list | tuple) and all(isinstance(each, str | int) for each in value)
