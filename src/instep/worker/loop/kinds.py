"""Kinds of devices that the members of a generation compute on, where hosts may differ.

Every member tells its own before their group forms. Ways in: `kind_of`, `backend_for`.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from instep.engine.member import Member
from instep.errors import SpecError
from instep.job.spec import JobSpec

Backend = Literal["gloo", "nccl", "staged"]
"""How a rank moves tensors: on the CPU; on its GPU; from its GPU by way of host memory, by gloo."""


def backend_for(member: Member, device: torch.device) -> Backend:
    """Choose how this member moves tensors, and refuse devices of several kinds where the job
    cannot be trained on these.

    Args:
        member: of the generation that is about to connect; on one machine all are of one kind.
        device: of this one.

    Raises:
        SpecError: names two of them.
        PeerError: a member was lost meanwhile.
    """
    own, form = kind_of(device), member.form
    if member.job.launch.count < 2 or form is None:
        return backend_of([own], 0)
    keys = [f"kinds-{form.generation}/{rank}" for rank in range(len(form.members))]
    member.run_store.set(keys[form.rank], own.encode())
    kinds = [member.run_store.get(key).decode() for key in keys]
    check_kinds(member.job, kinds)
    return backend_of(kinds, form.rank)


def backend_of(kinds: Sequence[str], rank: int) -> Backend:
    """How one of the ranks moves tensors: all of them by gloo, unless each has a GPU.

    Args:
        kinds: of all ranks, as `kind_of` names them.
        rank: one of them.
    """
    on_gpu = [_type_of(kind) == "cuda" for kind in kinds]
    if all(on_gpu):
        return "nccl"
    return "staged" if on_gpu[rank] else "gloo"


def _type_of(kind: str) -> str:
    return kind.partition(":")[0]


def kind_of(device: torch.device) -> str:
    """Name what decides how a device rounds: which GPU; of a CPU, which instructions torch uses."""
    if device.type == "cuda":
        return f"cuda: {torch.cuda.get_device_name(device)}"
    return f"{device.type}: {platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def check_kinds(job: JobSpec, kinds: Sequence[str]) -> None:
    """Refuse kinds that a job cannot be trained on together.

    Args:
        job: of the run.
        kinds: of the members, by rank.

    Raises:
        SpecError: names two of them.
    """
    other = next((rank for rank, kind in enumerate(kinds) if kind != kinds[0]), 0)
    if not other:
        return
    if job.train.determinism == "bits":
        raise SpecError(
            f"train.determinism = 'bits': {_two(kinds, other)}, and what they compute differs in "
            "the last bits. Use hosts of one kind, or train.determinism = 'order'."
        )
    first = _type_of(kinds[0])
    other = next((rank for rank, kind in enumerate(kinds) if _type_of(kind) != first), 0)
    if other and (what := next(_of_one_kind(job), "")):
        raise SpecError(
            f"{what}: {_two(kinds, other)}, and with both only whole gradients are summed. Leave "
            "it out, set train.device = 'cpu', or use hosts that all have GPUs."
        )


def _two(kinds: Sequence[str], other: int) -> str:
    return f"rank 0 computes on {kinds[0]!r} and rank {other} on {kinds[other]!r}"


def _of_one_kind(job: JobSpec) -> Iterator[str]:
    """Name what keeps something on the device of each rank, or lets passes wait for others."""
    sync = job.sync
    if sync.rounds is not None or sync.served or sync.votes:
        yield f"sync.name = {sync.name!r}"
    if sync.codec != "none":
        yield f"sync.codec = {sync.codec!r}"
    if sync.own_state:
        yield "[sync.options]"
    if job.mesh.ranks > 1:
        yield "[mesh]"
    if job.privacy.protects != "nothing":
        yield "[privacy]"
    if job.train.batch_norm == "global":
        yield "train.batch_norm = 'global'"
